"""Raw samples from a Prometheus server -> the pages that it scraped, target by target -> rows.

All samples of one scrape carry one instant, so a target's samples of an instant are the page that the server saw then,
and are read as such a page: by the tables of who made it. Who a target is: its `job` and `instance` (and what tells apart
servers and clusters). Its worker is what `--map` says, else the label asked for, else its pod, else its instance; an
exporter of a host has no worker of its own. `up` tells when it could not be scraped. Invariant: pages of a target are
taken in the order of their instants, each instant once; what arrives for an instant already passed is counted, not taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from engine_probe.adapters.prometheus import Page, Sample, Series
from engine_probe.adapters.registry import recognise
from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.events import CANONICAL_SAMPLES
from engine_probe.readers.scrapes import ScrapeTarget
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.adapters.thinning import Row

TARGET_LABELS: Final = ("cluster", "prometheus", "prometheus_replica", "job", "instance")
SERVER_SERIES: Final = ("up", "scrape_", "ALERTS", "ALERTS_FOR_STATE")
"""What the server says of its own scrapes; `up` is understood, the rest is no sample of a target."""
COUNTERS: Final = frozenset(name for name in CANONICAL_SAMPLES if name.endswith("_total"))

Key = tuple[str, ...]
Labelled = Mapping[frozenset[tuple[str, str]], Iterable[tuple[int, float]]]


@dataclass(slots=True)
class _Target:
    """One target: its rows, when it was last taken, whether it was up then."""

    worker: str
    labels: Mapping[str, str]
    pages: ScrapeTarget | None = None
    lives: Any = None
    last_ns: int = -1
    series: dict[frozenset[tuple[str, str]], Series] = field(default_factory=dict)


class ServerTargets:
    """Takes answers in the order of time; `drain` hands out the rows.

    worker_label  label that names the worker; None: the pod, else the instance
    """

    def __init__(self, worker_map: WorkerMap | None = None, worker_label: str | None = None) -> None:
        self._map = worker_map or WorkerMap()
        self._worker_label = worker_label
        self._targets: dict[Key, _Target] = {}
        self._marks: list[dict[str, Any]] = []
        self.num_samples = 0
        self.num_late = 0

    def take(self, answer: Labelled) -> None:
        """Add the samples of one stretch of time."""
        pages: dict[Key, dict[int, list[tuple[frozenset[tuple[str, str]], float]]]] = {}
        for labels, points in answer.items():
            told = dict(labels)
            key = tuple(told.get(label, "") for label in TARGET_LABELS)
            if key not in self._targets:
                self._targets[key] = _Target(self._name_of(told), told)
            of_target = pages.setdefault(key, {})
            for at_ns, value in points:
                of_target.setdefault(at_ns, []).append((labels, value))
        for key, instants in pages.items():
            target = self._targets[key]
            for at_ns in sorted(instants):
                if at_ns <= target.last_ns:
                    self.num_late += len(instants[at_ns])
                    continue
                target.last_ns = at_ns
                self._page(target, at_ns, instants[at_ns])

    def finish(self) -> None:
        """Release what is held back. Call after the last answer."""
        for target in self._targets.values():
            if target.pages is not None:
                target.pages.finish()

    def drain(self) -> dict[str, pa.Table]:
        """Tables of the rows so far; kinds without rows are absent."""
        import pyarrow as pa

        parts: dict[str, list[pa.Table]] = {}
        for target in self._targets.values():
            for kind, table in (target.pages.drain() if target.pages is not None else {}).items():
                parts.setdefault(kind, []).append(table)
        if self._marks:
            parts.setdefault("mark", []).append(table_from_rows("mark", self._marks))
            self._marks = []
        return {kind: pa.concat_tables(tables) for kind, tables in parts.items()}

    def kinds(self) -> dict[str, int]:
        """How many targets of which kind were seen; `other` for those that no adapter knows."""
        counts: dict[str, int] = {}
        for target in self._targets.values():
            maker = None if target.pages is None else target.pages.maker
            name = "other" if maker is None else maker.engine
            counts[name] = counts.get(name, 0) + (target.pages is not None)
        return {name: count for name, count in sorted(counts.items()) if count}

    def workers(self) -> list[str]:
        """Names of the engines seen."""
        return sorted(t.worker for t in self._targets.values() if t.lives is not None)

    @property
    def last_ns(self) -> int | None:
        """Instant of the newest page of any target."""
        return max((target.last_ns for target in self._targets.values()), default=None)

    def _page(self, target: _Target, at_ns: int, found: list[tuple[frozenset[tuple[str, str]], float]]) -> None:
        samples: list[Sample] = []
        up: float | None = None
        for labels, value in found:
            series = target.series.get(labels)
            if series is None:
                told = dict(labels)
                series = target.series[labels] = Series(told.pop("__name__", ""), told)
            if series.name == "up":
                up = value
            elif not series.name.startswith(SERVER_SERIES):
                samples.append(Sample(series, value, None))
        self.num_samples += len(found)
        if up == 0.0:
            self._down(target, at_ns)
        if not samples:
            return
        page = Page(samples, {}, {}, False)
        if target.pages is None:
            self._know(target, page)
        assert target.pages is not None
        rows = target.pages.take_page(page, at_ns)
        if target.lives is not None:
            self._life(target, rows, at_ns)

    def _know(self, target: _Target, page: Page) -> None:
        from engine_probe.attach.life import Lives

        maker = recognise(page)
        serves = maker is not None and maker.serves
        is_nameless = maker is not None and maker.is_nameless
        named = not is_nameless or self._map.worker(target.labels) is not None
        target.pages = ScrapeTarget(target.worker if named else None, names_worker=self._map.worker)
        target.lives = Lives(target.worker) if serves else None

    def _life(self, target: _Target, rows: list[Row], at_ns: int) -> None:
        counters: dict[str, float] = {}
        start_s = None
        for _, _, name, _, value in rows:
            if name in COUNTERS:
                counters[name] = counters.get(name, 0.0) + value
            elif name == "process_start_time_seconds":
                start_s = value
        self._mark(target.lives.seen(counters, start_s, at_ns))

    def _down(self, target: _Target, at_ns: int) -> None:
        if target.lives is not None:
            self._mark(target.lives.failed("the Prometheus server could not scrape it (up is 0).", at_ns))

    def _mark(self, marks: list[dict[str, Any]]) -> None:
        self._marks += [{**mark, "attrs": {**mark["attrs"], "seen_by": "prometheus"}} for mark in marks]

    def _name_of(self, labels: Mapping[str, str]) -> str:
        asked = labels.get(self._worker_label) if self._worker_label else None
        return self._map.worker(labels) or asked or labels.get("pod") or labels.get("instance") or "unknown"
