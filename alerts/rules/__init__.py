"""Prometheus rules as data: one subject a file, made of the metric catalogue; `alerts/files.py` writes them as YAML."""

from __future__ import annotations

from alerts.rules import blocks, collector, routing, slo, telemetry
from alerts.rules.rule import Alerting, Recording, Rule

GROUPS: dict[str, tuple[Rule, ...]] = {
    "kvscope-slo": slo.RULES,
    "kvscope-blocks": blocks.RULES,
    "kvscope-routing": routing.RULES,
    "kvscope-telemetry": telemetry.RULES,
    "kvscope-collector": collector.RULES,
}
"""Group -> its rules, in the order in which Prometheus evaluates them."""


def alerting_rules() -> tuple[Alerting, ...]:
    """Every alerting rule."""
    return tuple(rule for rules in GROUPS.values() for rule in rules if isinstance(rule, Alerting))


__all__ = ["GROUPS", "Alerting", "Recording", "Rule", "alerting_rules"]
