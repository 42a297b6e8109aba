"""Prometheus rules as data: one subject a file, made of the metric catalogue; `alerts/files.py` writes them as YAML."""

from __future__ import annotations

from alerts.rules import blocks, collector, routing, slo, telemetry
from alerts.rules.rule import Alerting, Recording, Rule
from store.metrics import SLO_GOAL


def groups(slo_goal: float = SLO_GOAL) -> dict[str, tuple[Rule, ...]]:
    """Group -> its rules, in the order in which Prometheus evaluates them. slo_goal: share of the requests that should meet their SLO."""
    return {
        "kvscope-slo": slo.rules(slo_goal),
        "kvscope-blocks": blocks.RULES,
        "kvscope-routing": routing.RULES,
        "kvscope-telemetry": telemetry.RULES,
        "kvscope-collector": collector.RULES,
    }


def alerting_rules(slo_goal: float = SLO_GOAL) -> tuple[Alerting, ...]:
    """Every alerting rule."""
    return tuple(rule for rules in groups(slo_goal).values() for rule in rules if isinstance(rule, Alerting))


__all__ = ["Alerting", "Recording", "Rule", "alerting_rules", "groups"]
