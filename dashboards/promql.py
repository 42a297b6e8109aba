"""PromQL from the metric catalogue: what a panel asks, with the dashboard's variables in every selector.

Idea: an expression is made of `Family` objects, so a metric that does not exist cannot be asked for, and a variable is applied
wherever the family has its label. An empty label is "not known" and belongs to `All` too, which is why `All` is `.*`.
"""

from __future__ import annotations

from typing import Final

from store.metric_catalogue import Family, family_of

VARIABLES: Final = ("model", "worker", "tenant")
"""Labels that a dashboard lets people choose from."""
INTERVAL: Final = "$__rate_interval"


def select(family: Family, series: str | None = None, **labels: str) -> str:
    """Selector of a family (of a part of it, such as `family.count`); `labels` are matched as regular expressions."""
    unknown = set(labels) - set(family.labels) - {"le"}
    if unknown:
        raise ValueError(f"{family.name} has no label {', '.join(sorted(unknown))}; it has {', '.join(family.labels)}")
    if series is not None and family_of(series) is not family:
        raise ValueError(f"{series} is no part of {family.name}")
    matchers = [f'{name}=~"${name}"' for name in VARIABLES if name in family.labels and name not in labels]
    matchers += [f'{name}=~"{value}"' for name, value in labels.items()]
    name = family.name if series is None else series
    return f"{name}{{{', '.join(matchers)}}}" if matchers else name


def rate(family: Family, *by: str, series: str | None = None, **labels: str) -> str:
    """Increase a second, summed by labels."""
    return f"sum{_by(by)} (rate({select(family, series, **labels)}[{INTERVAL}]))"


def total(family: Family, *by: str, **labels: str) -> str:
    """Sum of a gauge by labels."""
    return f"sum{_by(by)} ({select(family, **labels)})"


def largest(family: Family, *by: str, **labels: str) -> str:
    """Largest value of a gauge by labels."""
    return f"max{_by(by)} ({select(family, **labels)})"


def quantile(q: str, family: Family, *by: str, **labels: str) -> str:
    """Quantile of a histogram by labels."""
    return f"histogram_quantile({q}, {rate(family, 'le', *by, series=family.bucket, **labels)})"


def mean(family: Family, *by: str, **labels: str) -> str:
    """Mean of a histogram's values by labels."""
    return ratio(rate(family, *by, series=family.sum, **labels), rate(family, *by, series=family.count, **labels))


def buckets(family: Family, **labels: str) -> str:
    """Increase of a histogram's buckets, for a heatmap."""
    return f"sum by (le) (increase({select(family, family.bucket, **labels)}[{INTERVAL}]))"


def ratio(part: str, whole: str) -> str:
    """One expression over another; without a value where the other is 0."""
    return f"({part}) / ({whole} > 0)"


def _by(by: tuple[str, ...]) -> str:
    return f" by ({', '.join(by)})" if by else ""
