"""One engine's words on a metrics page, as a table, and the mapper that turns pages into `sample` rows by such tables.

Invariant: the presence of a series decides, never a version; where an old and a new name of one thing stand on the
same page the new one takes the canonical name and the old one keeps its own, so nothing is counted twice. The name on
the wire stays in `labels.wire`. A series that no table knows keeps its name. Counters are stored as they are: a
restart makes them fall, and `deltas` is how to difference them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine_probe.adapters.derived import Derivation
from engine_probe.adapters.prometheus import MAX_REMEMBERED_SERIES, Page, Series

Labels = Mapping[str, str]
Row = tuple[str | None, int, str, Labels, float]
"""(worker, at_ns, name, labels, value)"""
Mapped = tuple[str, Labels, str | None, float]
"""(name, labels, worker, factor) of a row that a series gives"""

HOST_PREFIXES: Final = ("python_", "http_", "go_", "promhttp_")
"""Series of the interpreter and of the web framework on an engine's page: they say nothing about the engine."""
SMALLEST_BLANK: Final = float((1 << 31) - 16)

SUFFIXES: Final = ("_bucket", "_sum", "_count")
_RULE = re.compile(r"(?P<name>[^{]+)(?:\{(?P<label>\w+)=(?P<values>[^}]*)\})?")


def same_worker(worker: str | None, labels: Labels) -> str | None:
    """Every series of the page is the instance's own."""
    return worker


@dataclass(frozen=True, slots=True)
class MetricNames:
    """How one engine's page is read.

    prefixes    what its names start with; the first is its own spelling, the others are exporters' (`vllm_` for `vllm:`)
    canonical   canonical sample name -> wire names without prefix, newest first; `name{label=a|b}` takes only those
                label values (none at all is the empty one), and several series of one wire name then stand under one
                canonical name
    also        canonical sample name -> alternatives, newest first, each of wire names whose series add up to it: they
                are rows of that name too, where all of them stand on the page (hits and misses are the lookups) and
                none of its names in `canonical` does
    histograms  canonical family -> wire families; their `_bucket` (with `le`), `_sum` and `_count` are renamed
    scales      wire name (family for a histogram) -> factor to the canonical unit; `le` is scaled with it
    worker_of   (instance's name, labels) -> name of the worker that the series speaks of
    ranks       labels of ranks that repeat one another: of series that differ in these alone the lowest rank is kept
    per_rank    endings of names of which each rank has its own part, so that all are kept
    drops       wire names left out: what they say depends on who else reads the page
    keeps_unknown  whether series that no rule claims are kept under their own names (a host has thousands)
    derives     makes what reads further numbers out of one target's pages
    relabels    labels of a canonical row, from those on the wire
    is_blank    whether a number is the maker's word for "not known" (asked of numbers above 2^31 - 17 alone)
    """

    engine: str
    prefixes: tuple[str, ...]
    canonical: Mapping[str, tuple[str, ...]]
    histograms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    also: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    worker_of: Callable[[str | None, Labels], str | None] = same_worker
    ranks: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    drops: frozenset[str] = frozenset()
    keeps_unknown: bool = True
    derives: Callable[[], Derivation] | None = None
    relabels: Callable[[Labels], Labels] | None = None
    is_blank: Callable[[float], bool] | None = None

    def bare(self, name: str) -> str | None:
        """The name without this engine's prefix; None where it is not this engine's."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name[len(prefix) :]
        return None


@dataclass(frozen=True, slots=True)
class _Rule:
    """One wire name may stand for `canonical`, where the label has one of the values, `beside` is there, and of no
    alternative in `newer` everything is there."""

    canonical: str
    label: str | None
    values: frozenset[str]
    newer: tuple[frozenset[str], ...]
    beside: frozenset[str] = frozenset()

    def holds(self, labels: Labels, present: frozenset[str]) -> bool:
        if self.label is not None and labels.get(self.label, "") not in self.values:
            return False
        return self.beside <= present and not any(names <= present for names in self.newer)


@dataclass(frozen=True, slots=True)
class _Rules:
    """By wire name: rules of which the first that holds names the series, and those by which it counts elsewhere too."""

    named: dict[str, list[_Rule]]
    also: dict[str, list[_Rule]]


def _rules(names: MetricNames) -> _Rules:
    rules = _Rules({}, {})
    for canonical, wires in names.canonical.items():
        newer: list[frozenset[str]] = []
        for wire in wires:
            name, label, values = _parsed(wire)
            rules.named.setdefault(name, []).append(_Rule(canonical, label, values, tuple(newer)))
            newer.append(frozenset((name,)))
    for canonical, wires in names.histograms.items():
        for suffix in SUFFIXES:
            for position, wire in enumerate(wires):
                before = tuple(frozenset((name + suffix,)) for name in wires[:position])
                rules.named.setdefault(wire + suffix, []).append(_Rule(canonical + suffix, None, frozenset(), before))
    for canonical, alternatives in names.also.items():
        newer = [frozenset((_parsed(wire)[0],)) for wire in names.canonical.get(canonical, ())]
        for wires in alternatives:
            parts = [_parsed(wire) for wire in wires]
            beside = frozenset(name for name, _, _ in parts)
            for name, label, values in parts:
                rules.also.setdefault(name, []).append(_Rule(canonical, label, values, tuple(newer), beside))
            newer.append(beside)
    return rules


def _parsed(wire: str) -> tuple[str, str | None, frozenset[str]]:
    match = _RULE.fullmatch(wire)
    assert match is not None, wire
    return match["name"], match["label"], frozenset((match["values"] or "").split("|"))


def wires_of(table: MetricNames) -> frozenset[str]:
    """Wire names without prefix that some rule of the table claims."""
    rules = _rules(table)
    return frozenset(rules.named) | frozenset(rules.also)


class SampleMapper:
    """Turns pages of one target into `sample` rows; remembers each series' mapping from page to page.

    tables         the engines whose words may stand on the page; where two claim a name, the longer prefix has it
    drop_prefixes  series left out altogether
    names_worker   the worker that labels mean by rules of the user's; None where none fits
    """

    def __init__(
        self,
        worker: str | None,
        tables: Sequence[MetricNames],
        *,
        drop_prefixes: tuple[str, ...] = HOST_PREFIXES,
        names_worker: Callable[[Labels], str | None] = lambda labels: None,
    ) -> None:
        self._worker = worker
        self._names_worker = names_worker
        self._derivations = [(table, table.derives()) for table in tables if table.derives is not None]
        self._speaking: list[tuple[MetricNames, Derivation]] = []
        self._drop_prefixes = drop_prefixes
        self._tables = sorted(
            ((prefix, table, rules) for table in tables for rules in (_rules(table),) for prefix in table.prefixes),
            key=lambda one: -len(one[0]),
        )
        self._mapped: dict[Series, tuple[Mapped, ...]] = {}
        self._label_sets: dict[tuple[tuple[str, str], ...], Labels] = {}
        self._names: frozenset[str] = frozenset()
        self._present: dict[str, frozenset[str]] = {}
        self._lowest: dict[tuple[str, Hashable], tuple[tuple[int, str], ...]] = {}

    def rows(self, page: Page, at_ns: int) -> list[Row]:
        """Every sample kept; NaN (no value yet) is left out, infinities too.

        The labels of one series are the same object in every page (the thinner keys on it).
        """
        self._learn(page)
        rows = []
        for series, value, stated_ns in page.samples:
            if series not in self._mapped:
                self._mapped[series] = self._map(series)
            if -1e308 <= value <= 1e308 and not (value >= SMALLEST_BLANK and self._is_blank(series.name, value)):
                instant = at_ns if stated_ns is None else stated_ns
                for name, labels, worker, scale in self._mapped[series]:
                    rows.append((worker, instant, name, labels, value * scale))
        for table, derivation in self._speaking:
            for name, labels, value in derivation.told(page.samples, at_ns):
                worker = self._names_worker(labels) or table.worker_of(self._worker, labels)
                rows.append((worker, at_ns, name, self._interned(labels), value))
        return rows

    def names_of(self, page: Page) -> list[tuple[Mapped, ...]]:
        """What each series of the page is called, parallel to `samples`; () for one that is left out."""
        self._learn(page)
        return [self._map(series) for series, _, _ in page.samples]

    def _learn(self, page: Page) -> None:
        """What stands on the page decides which name is the newest, and whose copy a series is."""
        names = frozenset(page.names())
        if names != self._names or len(self._mapped) > 4 * len(page.samples):
            self._names = names
            self._present = {
                prefix: frozenset(name[len(prefix) :] for name in names if name.startswith(prefix))
                for prefix, _, _ in self._tables
            }
            self._mapped.clear()
            self._speaking = [
                one for one in self._derivations if any(name.startswith(one[0].prefixes) for name in names)
            ]
        if any(table.ranks for _, table, _ in self._tables) and any(
            sample.series not in self._mapped for sample in page.samples
        ):
            self._survey(page)

    def _map(self, series: Series) -> tuple[Mapped, ...]:
        name, labels, worker, scale = series.name, series.labels, self._worker, 1.0
        if name.startswith(self._drop_prefixes) or self._is_created(name):
            return ()
        found, others = name, []
        for prefix, table, rules in self._tables:
            if not name.startswith(prefix):
                continue
            wire = name[len(prefix) :]
            if wire in table.drops or self._repeats(series, wire, table):
                return ()
            worker = self._names_worker(labels) or table.worker_of(worker, labels)
            present = self._present[prefix]
            first = next((rule for rule in rules.named.get(wire, ()) if rule.holds(labels, present)), None)
            others = [rule.canonical for rule in rules.also.get(wire, ()) if rule.holds(labels, present)]
            if first is None and not others and not table.keeps_unknown:
                return ()
            found = table.prefixes[0] + wire if first is None else first.canonical
            if first is not None or others:
                scale, labels = _scaled(wire, labels, table)
                labels = labels if table.relabels is None else table.relabels(labels)
            break
        mapped = []
        for canonical in (found, *others):
            told = labels if canonical == name else {**labels, "wire": name}
            mapped.append((canonical, self._interned(told), worker, scale))
        return tuple(mapped)

    def _is_blank(self, name: str, value: float) -> bool:
        table = next((table for prefix, table, _ in self._tables if name.startswith(prefix)), None)
        return table is not None and table.is_blank is not None and table.is_blank(value)

    def _interned(self, labels: Labels) -> Labels:
        """Equal labels as one object."""
        if len(self._label_sets) > MAX_REMEMBERED_SERIES:
            self._label_sets.clear()
        return self._label_sets.setdefault(tuple(labels.items()), labels)

    def _survey(self, page: Page) -> None:
        """Which rank is the lowest of those that repeat one another."""
        self._lowest.clear()
        self._mapped.clear()
        for series, _, _ in page.samples:
            for prefix, table, _ in self._tables:
                if table.ranks and series.name.startswith(prefix):
                    key, rank = _rank(series, table)
                    self._lowest[key] = min(self._lowest.get(key, rank), rank)

    def _repeats(self, series: Series, wire: str, table: MetricNames) -> bool:
        if not table.ranks or wire.endswith(table.per_rank or ("\0",)):
            return False
        key, rank = _rank(series, table)
        return rank > self._lowest.get(key, rank)

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


def _rank(series: Series, table: MetricNames) -> tuple[tuple[str, Hashable], tuple[tuple[int, str], ...]]:
    """What series that repeat one another share, and the rank of this one (numbers by their size)."""
    rank = tuple((len(text), text) for text in (series.labels.get(label, "") for label in table.ranks))
    rest = frozenset((key, value) for key, value in series.labels.items() if key not in table.ranks)
    return (series.name, rest), rank


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
