"""Error budgets: alerts on how fast they burn, over two windows each. Source: Google, The Site Reliability Workbook, chapter 5.

The budget is what the goal leaves: at 99 % (`store.metrics.SLO_GOAL`) one of 100 requests may miss a limit of its SLO. The long window says that
enough of it is gone to matter, the short one that it goes on: the alert ends soon after the trouble does. Windows in which hardly anybody
asked say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from alerts.condition import SEVERAL
from alerts.rules.rule import Alerting, Recording, Rule, increase, lately, rate, select
from store.metric_catalogue import NEWEST_STEP, OLDEST_WAIT, REQUEST_ERRORS, REQUESTS, SLO_REQUESTS

MIN_REQUESTS: Final = 50
"""Requests of the long window below which a burn rate is a matter of chance."""


@dataclass(frozen=True, slots=True)
class Burn:
    """`times` as fast as the budget of 30 days allows, over both windows; `spent` of the budget is gone by then."""

    long: str
    short: str
    times: float
    severity: str
    wait: str
    spent: str


BURNS: Final = (
    Burn("1h", "5m", 14.4, "critical", "2m", "2 % of the month's budget in an hour"),
    Burn("6h", "30m", 6.0, "critical", "15m", "5 % of the month's budget in six hours"),
    Burn("1d", "2h", 3.0, "warning", "1h", "10 % of the month's budget in a day"),
    Burn("3d", "6h", 1.0, "warning", "3h", "10 % of the month's budget in three days"),
)
_WINDOWS: Final = tuple(dict.fromkeys(window for burn in BURNS for window in (burn.long, burn.short)))
_BY: Final = ("model", "slo")


def missed_ratio(window: str) -> str:
    """Name of the recorded share of requests that missed their SLO."""
    return f"model_slo:{SLO_REQUESTS.name.removesuffix('_total')}_missed:ratio_rate{window}"


def _recorded(window: str) -> Recording:
    missed = rate(SLO_REQUESTS, window, *_BY, outcome="missed")
    every = rate(SLO_REQUESTS, window, *_BY)
    # A model that missed nothing has no series of misses: 0 of what there is.
    return Recording(missed_ratio(window), f"({missed} or 0 * {every}) / ({every} > 0)")


def _burn(burn: Burn, goal: float) -> Alerting:
    limit = f"{burn.times * (1 - goal):.4g}"
    enough = f"{increase(SLO_REQUESTS, burn.long, *_BY)} >= {MIN_REQUESTS}"
    return Alerting(
        "KvscopeErrorBudgetBurn",
        f"{missed_ratio(burn.long)} > {limit} and {missed_ratio(burn.short)} > {limit} and {enough}",
        "{{ $labels.model }} misses its SLO {{ $labels.slo }} too often",
        f"{{{{ $value | humanizePercentage }}}} of the requests of {burn.long} missed it, {burn.times:g} times what the goal of "
        f"{goal * 100:g} % allows: {burn.spent}. kvscope diagnose says why.",
        severity=burn.severity,
        wait=burn.wait,
        keep=None,
        labels={"role": "symptom", "metric": "ttft", "worker": SEVERAL, "window": burn.long},
        todo=(
            "kvscope diagnose, or the webhook of kvscope in Alertmanager: which cause owns how much of it",
            "KvscopeHotspot, KvscopeKvBlocked, KvscopePreemptionStorm and KvscopePrematureEviction, where they fire beside it, are why",
        ),
    )


def rules(goal: float) -> tuple[Rule, ...]:
    """Budgets of a goal: the share of the requests, 0 to 1, that should meet their SLO."""
    return (*(_recorded(window) for window in _WINDOWS), *(_burn(burn, goal) for burn in BURNS), *_OTHERS)


_OTHERS: Final[tuple[Rule, ...]] = (
    Alerting(
        "KvscopeRequestErrors",
        f"{rate(REQUEST_ERRORS, '5m', 'model', reason='!aborted')} / {rate(REQUESTS, '5m', 'model')} > 0.05 "
        f"and {increase(REQUESTS, '5m', 'model')} >= 20",
        "{{ $labels.model }}: more than 5 % of the requests fail",
        "{{ $value | humanizePercentage }} of the requests of 5 minutes did not finish (those that their callers gave up left out).",
        severity="critical",
        wait="2m",
        labels={"role": "symptom"},
        todo=(
            "dashboard Overview, errors by status and reason: too_many_requests is load, timeout is a queue, server_error is the engine",
            "kvscope requests list with state failed names some of them",
        ),
    ),
    Alerting(
        "KvscopeQueueStuck",
        f"{select(OLDEST_WAIT)} > 30{lately(NEWEST_STEP, 'worker')}",
        "{{ $labels.worker }}: a request has waited for more than 30 s",
        "The oldest request in the queue of {{ $labels.worker }} has waited for {{ $value | humanizeDuration }}.",
        wait="1m",
        labels={"role": "symptom", "metric": "ttft"},
        todo=(
            "what the queue waits for (blocks, budget, seats) is on the dashboard Scheduler",
            "kvscope hotspots, where other workers have room",
        ),
    ),
)
