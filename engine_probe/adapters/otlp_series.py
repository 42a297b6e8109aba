"""OTLP points -> cumulative `sample` rows: the names and the meaning of a page that Prometheus would scrape.

Idea: a point is spelled as Prometheus spells it (`gen_ai.server.request.duration` in s is
`gen_ai_server_request_duration_seconds`), so that the tables of names that read pages read points as well. A store
of samples differences counters, so points of delta temporality are added up here, series by series; a restart begins
again at 0, which reads as the reset it is. Exponential histograms are stored with the bounds 2^(k/8) between which they
have counts (finer ones are merged, which loses nothing but resolution), and once a bound was stored, it goes on.

Invariants: `prepare` changes nothing; `apply` after the commit does, so what was refused may be sent again. A point
that is not newer than its series' last one is a repetition and is left out. Series remembered are bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from engine_probe.adapters.metric_names import MetricNames, Row, SampleMapper
from engine_probe.adapters.otlp_points import Exponential, Labels, Metrics, Point
from engine_probe.adapters.prometheus import Page, Sample, Series

MAX_SERIES: Final = 100_000
"""OTLP series remembered (a histogram is one)."""
MAX_WORKERS: Final = 1_000
MAX_BOUNDS: Final = 2_000
"""Bounds of one histogram that are remembered; beyond, it begins anew (which reads as a reset)."""
GRID: Final = 8
"""Bounds of an exponential histogram are powers of 2^(1/8): scale 3."""
_GRID_SCALE: Final = 3
_ZERO: Final = -(1 << 40)
"""Key of the bound at zero, below all others."""
_UNITS: Final = {"s": "seconds", "By": "bytes", "By/s": "bytes_per_second", "%": "percent", "Hz": "hertz", "J": "joules", "V": "volts", "W": "watts"}  # fmt: skip
_NOT_NAME: Final = re.compile(r"[^a-zA-Z0-9_:]")
_NOT_LABEL: Final = re.compile(r"[^a-zA-Z0-9_]")

Key = tuple[str, str, Labels]
Totals = dict[tuple[str, str], float]
"""(suffix, le or quantile) -> value of one sample of a series."""


@dataclass(slots=True)
class _State:
    """What is remembered of one series: its newest instant, sums of its deltas, bounds that were stored."""

    at_ns: int
    totals: Totals = field(default_factory=dict)
    buckets: dict[int, float] = field(default_factory=dict)
    bounds: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows to store, and what to remember once they are. `num_repeated`: points that were seen before."""

    rows: list[Row]
    updates: Mapping[Key, _State]
    num_points: int
    num_repeated: int
    refused: Sequence[str]


class SeriesBook:
    """Remembers OTLP series from batch to batch. One thread at a time from `prepare` to `apply`."""

    def __init__(self, tables: Sequence[MetricNames], *, max_series: int = MAX_SERIES) -> None:
        self._tables = tables
        self._max_series = max_series
        self._states: dict[Key, _State] = {}
        self._series: dict[tuple[str, str, Labels, tuple[str, str]], Series] = {}
        self._mappers: dict[str | None, SampleMapper] = {}

    def prepare(self, batch: Sequence[Metrics]) -> Prepared:
        """The rows of a decoded body."""
        updates: dict[Key, _State] = {}
        by_worker: dict[str | None, list[Sample]] = {}
        num_points = num_repeated = 0
        refused: list[str] = []
        for metrics in batch:
            worker, shared = _identity(metrics.resource)
            samples = by_worker.setdefault(worker, [])
            refused += metrics.refused
            for point in metrics.points:
                num_points += 1
                name = prometheus_name(point)
                labels = tuple(sorted({**shared, **_label_names(point.labels)}.items()))
                key = (worker or "", name, labels)
                state = updates.get(key) or self._states.get(key)
                if state is not None and point.at_ns <= state.at_ns:
                    num_repeated += 1
                    continue
                if state is None and len(self._states) + len(updates) >= self._max_series:
                    refused.append(
                        f"more than {self._max_series} series are sent; drop attributes that identify requests"
                    )
                    continue
                totals, updates[key] = _advance(point, state)
                for place, value in totals.items():
                    samples.append(Sample(self._series_of(key, place), value, point.at_ns))
        rows: list[Row] = []
        for worker, samples in by_worker.items():
            if samples:
                rows += self._mapper(worker).rows(Page(samples, {}, {}, is_openmetrics=False), samples[0].at_ns or 0)
        return Prepared(rows, updates, num_points + len(refused), num_repeated, refused)

    def apply(self, prepared: Prepared) -> None:
        """Remember what was stored."""
        self._states.update(prepared.updates)

    def _series_of(self, key: Key, place: tuple[str, str]) -> Series:
        """One object a sample series: the mapper keys on it."""
        full = (*key, place)
        found = self._series.get(full)
        if found is None:
            if len(self._series) > 4 * self._max_series:
                self._series.clear()
                self._mappers.clear()
            _, name, labels = key
            suffix, edge = place
            extra = {} if not edge else {"le" if suffix == "_bucket" else "quantile": edge}
            found = self._series[full] = Series(name + suffix, dict(labels) | extra)
        return found

    def _mapper(self, worker: str | None) -> SampleMapper:
        if worker not in self._mappers:
            if len(self._mappers) >= MAX_WORKERS:
                self._mappers.clear()
            self._mappers[worker] = SampleMapper(worker, self._tables)
        return self._mappers[worker]


def prometheus_name(point: Point) -> str:
    """The metric's name as Prometheus spells it: underscores, the unit, `_total` for a counter."""
    name = _NOT_NAME.sub("_", point.name) or "_"
    if name[0].isdigit():
        name = "_" + name
    base = name.removesuffix("_total")
    unit = _UNITS.get(point.unit, "" if not point.unit.isalpha() or point.unit == "1" else point.unit)
    if unit and not base.endswith(f"_{unit}") and ":" not in name:
        base += f"_{unit}"
    return base + "_total" if point.kind == "counter" or name.endswith("_total") else base


def _advance(point: Point, state: _State | None) -> tuple[Totals, _State]:
    """(cumulative samples of a series after this point, what to remember)."""
    known = state or _State(0)
    buckets = known.buckets
    bounds = known.bounds
    if point.exponential is not None:
        fresh = _grid(point.exponential)
        buckets = _added(known.buckets, fresh) if point.is_delta else fresh
        edges = _edges(fresh, point.exponential)
        bounds = known.bounds | edges if len(known.bounds) < MAX_BOUNDS else edges
    totals = dict(_samples(point))
    if point.is_delta and point.kind != "gauge" and len(known.totals) < MAX_BOUNDS:
        totals = {place: totals.get(place, 0.0) + known.totals.get(place, 0.0) for place in {**known.totals, **totals}}
    kept = totals if point.is_delta else {}
    if point.exponential is not None:
        totals = totals | dict(_exponential_samples(buckets, bounds, point.exponential, totals[("_count", "")]))
    totals = {place: value for place, value in totals.items() if math.isfinite(value)}
    return totals, _State(point.at_ns, kept, buckets, bounds)


def _samples(point: Point) -> Iterator[tuple[tuple[str, str], float]]:
    """Samples of one point as it came; buckets of an exponential histogram apart."""
    if point.kind in ("gauge", "sum", "counter"):
        yield ("", ""), point.value
        return
    if point.kind == "summary":
        for quantile, value in point.quantiles:
            yield ("", f"{quantile:g}"), value
    for bound, count in zip(point.bounds, accumulate(point.counts), strict=False):
        yield ("_bucket", f"{bound:.12g}"), count
    if point.kind == "histogram":
        yield ("_bucket", "+Inf"), point.count
    if point.total is not None:
        yield ("_sum", ""), point.total
    yield ("_count", ""), point.count


def _grid(shape: Exponential) -> dict[int, float]:
    """Counts by the upper bound of their bucket on the grid; what is not above zero stands under the lowest key."""
    found: dict[int, float] = {}
    if shape.zero_count or shape.num_negative:
        found[_ZERO] = shape.zero_count + shape.num_negative
    down = max(shape.scale - _GRID_SCALE, 0)
    width = _width(shape)
    for position, count in enumerate(shape.counts):
        if count:
            upper = ((shape.offset + position >> min(down, 64)) + 1) * width
            found[upper] = found.get(upper, 0.0) + count
    return found


def _width(shape: Exponential) -> int:
    """Grid steps of one bucket: 1 at scale 3 and finer, 2^(3-scale) below."""
    return 1 << min(max(_GRID_SCALE - shape.scale, 0), 32)


def _edges(buckets: Mapping[int, float], shape: Exponential) -> frozenset[int]:
    """Both bounds of every bucket that counted something."""
    width = _width(shape)
    return frozenset(
        edge for upper in buckets for edge in ((upper,) if upper == _ZERO else (upper - width, upper))
    )  # fmt: skip


def _added(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}


def _exponential_samples(
    buckets: Mapping[int, float], bounds: frozenset[int], shape: Exponential, count: float
) -> Iterator[tuple[tuple[str, str], float]]:
    """Cumulative buckets at every bound that is or was stored, and at +Inf."""
    keys = sorted({*bounds, *buckets})
    for key, below in zip(keys, accumulate(buckets.get(key, 0.0) for key in keys), strict=True):
        bound = shape.zero_threshold if key == _ZERO else _power(key) * shape.factor
        if key in bounds and math.isfinite(bound):
            yield ("_bucket", f"{bound:.12g}"), below
    yield ("_bucket", "+Inf"), count


def _power(key: int) -> float:
    """2^(key/8); infinite beyond all floats."""
    return math.inf if key >= 1024 * GRID else 2.0 ** (key / GRID)


def _identity(resource: Mapping[str, str]) -> tuple[str | None, dict[str, str]]:
    """(worker, labels that tell its series from those of other instances) of a resource.

    A service's instance names the worker where it is an address (as scrapers write it), else the service does.
    """
    service, instance = resource.get("service.name"), resource.get("service.instance.id")
    if service is not None and service.startswith("unknown_service"):
        service = None
    shared = {key: text for key, text in (("service", service), ("instance", instance)) if text}
    worker = instance if instance and re.fullmatch(r"\S+:\d{1,5}", instance) else service
    return worker or None, shared


def _label_names(labels: Labels) -> dict[str, str]:
    return {_NOT_LABEL.sub("_", key) or "_": text for key, text in labels}
