"""One engine's words on a metrics page, as a table, and the mapper that turns pages into `sample` rows by such tables.

Invariant: the presence of a series decides, never a version; where an old and a new name of one thing stand on the
same page the new one takes the canonical name and the old one keeps its own, so nothing is counted twice. The name on
the wire stays in `labels.wire`. A series that no table knows keeps its name. Counters are stored as they are: a
restart makes them fall, and `deltas` is how to difference them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine_probe.adapters.prometheus import MAX_REMEMBERED_SERIES, Page, Series

Labels = Mapping[str, str]
Row = tuple[str | None, int, str, Labels, float]
"""(worker, at_ns, name, labels, value)"""

HOST_PREFIXES: Final = ("python_", "http_")
"""Series of the interpreter and of the web framework on an engine's page: they say nothing about the engine."""

SUFFIXES: Final = ("_bucket", "_sum", "_count")
_RULE = re.compile(r"(?P<name>[^{]+)(?:\{(?P<label>\w+)=(?P<values>[^}]+)\})?")


def same_worker(worker: str | None, labels: Labels) -> str | None:
    """Every series of the page is the instance's own."""
    return worker


def keep_all(labels: Labels) -> bool:
    """No series is a repetition of another one."""
    return True


@dataclass(frozen=True, slots=True)
class MetricNames:
    """How one engine's page is read.

    prefixes    what its names start with; the first is its own spelling, the others are exporters' (`vllm_` for `vllm:`)
    canonical   canonical sample name -> wire names without prefix, newest first; `name{label=a|b}` takes only those
                label values, and several series of one wire name then stand under one canonical name
    histograms  canonical family -> wire families; their `_bucket` (with `le`), `_sum` and `_count` are renamed
    scales      wire name (family for a histogram) -> factor to the canonical unit; `le` is scaled with it
    worker_of   (instance's name, labels) -> name of the worker that the series speaks of
    keeps       False for a series that repeats what another one says (a tensor-parallel rank's copy)
    """

    engine: str
    prefixes: tuple[str, ...]
    canonical: Mapping[str, tuple[str, ...]]
    histograms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    worker_of: Callable[[str | None, Labels], str | None] = same_worker
    keeps: Callable[[Labels], bool] = keep_all

    def bare(self, name: str) -> str | None:
        """The name without this engine's prefix; None where it is not this engine's."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return None


@dataclass(frozen=True, slots=True)
class _Rule:
    """One wire name may stand for `canonical`, where the label has one of the values and no newer name is there."""

    canonical: str
    label: str | None
    values: frozenset[str]
    newer: tuple[str, ...]


def _rules(names: MetricNames) -> dict[str, list[_Rule]]:
    rules: dict[str, list[_Rule]] = {}
    for canonical, wires in names.canonical.items():
        newer: list[str] = []
        for wire in wires:
            match = _RULE.fullmatch(wire)
            assert match is not None, wire
            values = frozenset((match["values"] or "").split("|"))
            rules.setdefault(match["name"], []).append(_Rule(canonical, match["label"], values, tuple(newer)))
            newer.append(match["name"])
    for canonical, wires in names.histograms.items():
        for suffix in SUFFIXES:
            for position, wire in enumerate(wires):
                before = tuple(name + suffix for name in wires[:position])
                rules.setdefault(wire + suffix, []).append(_Rule(canonical + suffix, None, frozenset(), before))
    return rules


class SampleMapper:
    """Turns pages of one target into `sample` rows; remembers each series' mapping from page to page.

    tables         the engines whose words may stand on the page; where two claim a name, the longer prefix has it
    drop_prefixes  series left out altogether
    """

    def __init__(
        self, worker: str | None, tables: Sequence[MetricNames], *, drop_prefixes: tuple[str, ...] = HOST_PREFIXES
    ) -> None:
        self._worker = worker
        self._drop_prefixes = drop_prefixes
        self._tables = sorted(
            ((prefix, table, rules) for table in tables for rules in (_rules(table),) for prefix in table.prefixes),
            key=lambda one: -len(one[0]),
        )
        self._mapped: dict[Series, tuple[str, Labels, str | None, float] | None] = {}
        self._label_sets: dict[tuple[tuple[str, str], ...], Labels] = {}
        self._names: frozenset[str] = frozenset()

    def rows(self, page: Page, at_ns: int) -> list[Row]:
        """Every sample kept; NaN (no value yet) is left out, infinities too.

        The labels of one series are the same object in every page (the thinner keys on it).
        """
        names = frozenset(page.names())
        if names != self._names or len(self._mapped) > 4 * len(page.samples):
            self._names = names
            self._mapped.clear()
        rows = []
        for series, value, stated_ns in page.samples:
            if series not in self._mapped:
                self._mapped[series] = self._map(series)
            mapped = self._mapped[series]
            if mapped is not None and -1e308 <= value <= 1e308:
                name, labels, worker, scale = mapped
                rows.append((worker, at_ns if stated_ns is None else stated_ns, name, labels, value * scale))
        return rows

    def _map(self, series: Series) -> tuple[str, Labels, str | None, float] | None:
        name, labels, worker, scale = series.name, series.labels, self._worker, 1.0
        if name.startswith(self._drop_prefixes) or self._is_created(name):
            return None
        canonical = name
        for prefix, table, rules in self._tables:
            if not name.startswith(prefix):
                continue
            if not table.keeps(labels):
                return None
            wire = name[len(prefix) :]
            worker = table.worker_of(worker, labels)
            found = self._canonical(wire, labels, table, rules)
            canonical = table.prefixes[0] + wire if found is None else found
            if found is not None:
                scale, labels = _scaled(wire, labels, table)
            break
        if canonical != name:
            labels = {**labels, "wire": name}
        if len(self._label_sets) > MAX_REMEMBERED_SERIES:
            self._label_sets.clear()
        return canonical, self._label_sets.setdefault(tuple(labels.items()), labels), worker, scale

    def _canonical(
        self, wire: str, labels: Labels, table: MetricNames, rules: Mapping[str, Sequence[_Rule]]
    ) -> str | None:
        for rule in rules.get(wire, ()):
            if any(prefix + name in self._names for name in rule.newer for prefix in table.prefixes):
                continue
            if rule.label is None or labels.get(rule.label) in rule.values:
                return rule.canonical
        return None

    def _is_created(self, name: str) -> bool:
        """`x_created` beside the family x is prometheus_client's creation time, not a measurement."""
        base = name.removesuffix("_created")
        return base != name and any(base + suffix in self._names for suffix in ("", "_total", *SUFFIXES))


def _scaled(wire: str, labels: Labels, table: MetricNames) -> tuple[float, Labels]:
    """Factor of the series' value, and its labels with `le` in the canonical unit. Counts of a histogram stay."""
    if wire in table.scales:
        return table.scales[wire], labels
    for suffix in SUFFIXES:
        factor = table.scales.get(wire.removesuffix(suffix)) if wire.endswith(suffix) else None
        if factor is None:
            continue
        if suffix == "_bucket" and labels.get("le") not in (None, "+Inf"):
            with contextlib.suppress(ValueError):  # not a number on the wire: what it says is kept as it is
                labels = {**labels, "le": f"{float(labels['le']) * factor:.12g}"}
        return (factor if suffix == "_sum" else 1.0), labels
    return 1.0, labels


def deltas(values: Iterable[float]) -> list[float]:
    """Increments of a counter between neighbouring scrapes; a fall is a restart, after which it counts from 0.

    [5, 8, 2] -> [3, 2]. n values give n - 1 increments, none of them negative.
    """
    out: list[float] = []
    previous: float | None = None
    for value in values:
        if previous is not None:
            out.append(value - previous if value >= previous else value)
        previous = value
    return out
