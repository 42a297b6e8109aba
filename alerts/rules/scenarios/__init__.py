"""What each rule is held to: it fires, it ends, and it keeps quiet where something like it is harmless. Numbers are worked out by hand."""

from __future__ import annotations

from alerts.rules.scenario import Scenario
from alerts.rules.scenarios.blocks import BLOCKS
from alerts.rules.scenarios.collector import COLLECTOR
from alerts.rules.scenarios.routing import ROUTING
from alerts.rules.scenarios.slo import REQUESTS_SEEN, budgets
from alerts.rules.scenarios.telemetry import TELEMETRY
from store.metrics import SLO_GOAL


def scenarios(slo_goal: float = SLO_GOAL) -> tuple[Scenario, ...]:
    """All of them, for rules of that goal."""
    return (*budgets(slo_goal), *REQUESTS_SEEN, *BLOCKS, *ROUTING, *TELEMETRY, *COLLECTOR)
