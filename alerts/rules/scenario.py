"""A scenario of a rule: series by the minute, and what fires when. Written in promtool's notation: `0+10x60` is 61 samples from 0 in steps of 10."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alerts.rules.rule import Alerting, select
from store.metric_catalogue import Family

Series = tuple[str, str]


def series(family: Family, values: str, part: str | None = None, le: str | None = None, **labels: str) -> Series:
    """(series, values) of a family, of one of its parts, or of a bucket."""
    if le is not None:
        return f'{part}{{le="{le}"}}', values
    return select(family, part, **labels), values


@dataclass(frozen=True, slots=True)
class Firing:
    """An alert that fires at an instant. `labels`: those of the series, and what makes it one of several rules of its name.

    value  what `$value` is shown as, worked out by hand; None where the texts do not show it
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    value: str | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """`at`: instant -> what fires then of `alert`, nothing where the tuple is empty."""

    alert: str
    name: str
    series: tuple[Series, ...]
    at: Mapping[str, tuple[Firing, ...]]
    interval: str = "1m"

    @property
    def fires(self) -> bool:
        """At some instant."""
        return any(self.at.values())


def shown(rule: Alerting, text: str, firing: Firing) -> str:
    """A template filled in as Prometheus does it, as far as our rules use templates."""
    for name, value in firing.labels.items():
        text = text.replace(f"{{{{ $labels.{name} }}}}", value)
    before, opening, rest = text.partition("{{ $value")
    if not opening:
        return text
    if firing.value is None:
        raise ValueError(f"{rule.name}: a scenario in which it fires must say what $value is shown as")
    return f"{before}{firing.value}{rest.partition('}}')[2]}"
