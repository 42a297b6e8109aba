"""What a rule is, and PromQL made of the catalogue's families: a metric or a label that does not exist cannot be asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from store.metric_catalogue import Family, family_of


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that Prometheus keeps: `name` as level:metric:operations."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alerting:
    """One alert. Labels of a rule are templates as Prometheus has them; so are summary and description.

    wait   `for`: true for so long before it fires
    keep   `keep_firing_for`: so long after it was true for the last time
    cause  the cause whose runbook tells what to do; None: the rule's own (`todo`)
    todo   what to do, a line each; beside the cause's remedies where there is one
    """

    name: str
    expr: str
    summary: str
    description: str
    severity: str = "warning"
    wait: str = "5m"
    keep: str | None = "5m"
    cause: str | None = None
    todo: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def runbook(self) -> str:
        """Name of the runbook."""
        return self.cause or self.name


Rule = Recording | Alerting


def select(family: Family, series: str | None = None, **labels: str) -> str:
    """Selector of a family, or of one of its series (`family.count`). `!` before a value: not that one; `~`: a pattern."""
    if unknown := set(labels) - set(family.labels):
        raise ValueError(f"{family.name} has no label {', '.join(sorted(unknown))}; it has {', '.join(family.labels)}")
    if series is not None and family_of(series) is not family:
        raise ValueError(f"{series} is no part of {family.name}")
    matchers = ", ".join(_matcher(name, value) for name, value in labels.items())
    return f"{series or family.name}{{{matchers}}}" if matchers else series or family.name


def rate(family: Family, over: str, *by: str, series: str | None = None, **labels: str) -> str:
    """Increase a second over a time, summed by labels."""
    return f"{_sum(family, by)} (rate({select(family, series, **labels)}[{over}]))"


def increase(family: Family, over: str, *by: str, series: str | None = None, **labels: str) -> str:
    """Increase over a time, summed by labels."""
    return f"{_sum(family, by)} (increase({select(family, series, **labels)}[{over}]))"


def grew(family: Family, over: str, *by: str, **labels: str) -> str:
    """How much a counter grew, where it did; also where it was not there before, which `increase` does not see."""
    series = select(family, **labels)
    return f"({increase(family, over, *by, **labels)} > 0 or {_sum(family, by)} ({series} unless {series} offset {over}) > 0)"


def lately(instant: Family, label: str, within_s: int = 3_600) -> str:
    """` and ...`: of whom something came lately. A gauge stays as it was when whoever told it was taken down."""
    if label not in instant.labels:
        raise ValueError(f"{instant.name} has no label {label}")
    return f" and on ({label}) time() - {instant.name} < {within_s}"


def _sum(family: Family, by: tuple[str, ...]) -> str:
    if unknown := set(by) - set(family.labels) - {"le"}:
        raise ValueError(f"{family.name} has no label {', '.join(sorted(unknown))}")
    return f"sum by ({', '.join(by)})" if by else "sum"


def _matcher(name: str, value: str) -> str:
    if value.startswith("!~"):
        return f'{name}!~"{value[2:]}"'
    operator = {"!": "!=", "~": "=~"}.get(value[:1], "=")
    return f'{name}{operator}"{value if operator == "=" else value[1:]}"'
