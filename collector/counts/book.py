"""The numbers behind `/metrics`: by family of the catalogue and by labels. Written a batch at a time, read by a scrape.

Invariant: a series appears with the first row that tells it, and not before; a counter never falls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Exemplar

from store.metric_catalogue import Family, le

Labels = tuple[str, ...]
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[Any]
Exemplars = dict[int, tuple[str, float, float]]
"""Number of the bucket -> (request id, value in s, instant as Unix time) of a request in it."""


class Book:
    """Counters and histograms by family and labels; safe from several threads."""

    def __init__(self) -> None:
        self._counters: dict[Family, dict[Labels, float]] = {}
        self._bars: dict[Family, dict[Labels, tuple[Counts, float]]] = {}
        self._bounds: dict[Family, tuple[float, ...]] = {}
        self._lock = threading.Lock()

    def add(self, family: Family, labels: Labels, value: float) -> None:
        """Count up; a series of 0 appears too, since it was told."""
        with self._lock:
            of = self._counters.setdefault(family, {})
            of[labels] = of.get(labels, 0.0) + value

    def add_all(self, family: Family, of_labels: Iterable[tuple[Labels, float]]) -> None:
        """Count up several series."""
        with self._lock:
            of = self._counters.setdefault(family, {})
            for labels, value in of_labels:
                of[labels] = of.get(labels, 0.0) + value

    def spread(
        self,
        family: Family,
        bounds: tuple[float, ...],
        values: Floats,
        groups: Counts,
        labels: Sequence[Labels],
        weights: Floats | None = None,
    ) -> None:
        """Put values (NaN: unknown) into the histogram of their group, whose labels are `labels[group]`."""
        known = np.isfinite(values)
        if not known.all():
            values, groups = values[known], groups[known]
            weights = None if weights is None else weights[known]
        if len(values) == 0:
            return
        width = len(bounds) + 1
        flat = groups * width + np.searchsorted(bounds, values, side="left")
        counts = np.bincount(flat, weights, len(labels) * width).reshape(len(labels), width)
        sums = np.bincount(groups, values if weights is None else values * weights, len(labels))
        present = np.flatnonzero(counts.any(axis=1)).tolist()
        self.add_bars(family, bounds, ((labels[number], counts[number], float(sums[number])) for number in present))

    def add_bars(self, family: Family, bounds: tuple[float, ...], bars: Iterable[tuple[Labels, Counts, float]]) -> None:
        """Add counts by bucket (the last above all bounds) and sums."""
        with self._lock:
            self._bounds[family] = bounds
            of = self._bars.setdefault(family, {})
            for labels, counts, total in bars:
                before = of.get(labels)
                of[labels] = (counts, total) if before is None else (before[0] + counts, before[1] + total)

    def drop(self, families: Sequence[Family], is_gone: Callable[[Labels], bool]) -> None:
        """Forget series; they end, and what follows them is counted elsewhere."""
        with self._lock:
            for family in families:
                counters, bars = self._counters.get(family, {}), self._bars.get(family, {})
                for labels in [labels for labels in (*counters, *bars) if is_gone(labels)]:
                    counters.pop(labels, None)
                    bars.pop(labels, None)

    def value(self, family: Family, *labels: str) -> float | None:
        """Of a counter, or how many values a histogram has; None where nothing told it."""
        with self._lock:
            if family.type == "histogram":
                bar = self._bars.get(family, {}).get(labels)
                return None if bar is None else float(bar[0].sum())
            return self._counters.get(family, {}).get(labels)

    def metrics(self, is_shown: Callable[[Family, Labels], bool] = lambda *_: True) -> Iterator[Metric]:
        """Every family that has a series, for a scrape."""
        with self._lock:
            counters = {family: dict(series) for family, series in self._counters.items()}
            bars = {family: dict(series) for family, series in self._bars.items()}
        for family, series in counters.items():
            metric = metric_of(family)
            for labels, value in series.items():
                if is_shown(family, labels):
                    metric.add_metric(labels, value)
            if metric.samples:
                yield metric
        for family, of_labels in bars.items():
            metric = metric_of(family)
            for labels, (counts, total) in of_labels.items():
                if is_shown(family, labels):
                    metric.add_metric(labels, buckets(counts, self._bounds[family]), total)
            if metric.samples:
                yield metric


def metric_of(family: Family) -> Any:
    """An empty family as prometheus_client wants it."""
    if family.type == "counter":
        return CounterMetricFamily(family.name.removesuffix("_total"), family.doc, labels=family.labels)
    kind = GaugeMetricFamily if family.type == "gauge" else HistogramMetricFamily
    return kind(family.name, family.doc, labels=family.labels)


def buckets(counts: Counts, bounds: tuple[float, ...], exemplars: Exemplars | None = None) -> list[Any]:
    """Cumulative counts by upper bound, as prometheus_client wants them."""
    running = np.cumsum(counts).tolist()
    names = [*_names(bounds), "+Inf"]
    if not exemplars:
        return list(zip(names, running, strict=True))
    return [
        (name, count, None if (seen := exemplars.get(number)) is None else Exemplar({"request_id": seen[0]}, *seen[1:]))
        for number, (name, count) in enumerate(zip(names, running, strict=True))
    ]


_KNOWN_NAMES: dict[tuple[float, ...], list[str]] = {}


def _names(bounds: tuple[float, ...]) -> list[str]:
    if bounds not in _KNOWN_NAMES:
        _KNOWN_NAMES[bounds] = [le(bound, bounds) for bound in bounds]
    return _KNOWN_NAMES[bounds]
