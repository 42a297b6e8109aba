"""`/metrics`: the truth about the fleet as its raw events tell it, and the collector's own health.

Every name is of `store/metric_catalogue.py`. What no row told has no series (unknown is absent, never zero). In OpenMetrics,
which Prometheus asks for, buckets of TTFT and E2E name a request as their exemplar.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from collector.counts.book import Counts, Labels, buckets, metric_of
from collector.counts.fleet import Fleet
from collector.intake.ingest import Ingest
from collector.live.latencies import Latencies
from collector.live.live import Live
from collector.live.meters import Meters
from collector.live.worker_gauges import worker_gauges
from engine_probe.errors import KvscopeError
from engine_probe.events import column
from store import metric_catalogue as names
from store.interface import Store, StoreStats
from store.metrics import SLO_GOAL

log = logging.getLogger(__name__)

HISTOGRAMS: Final = {
    "ttft": names.TTFT,
    "tpot": names.TPOT,
    "itl": names.ITL,
    "e2e": names.E2E,
    "queue": names.QUEUE,
    "prefill": names.PREFILL,
    "cache_lookup": names.CACHE_LOOKUP,
}
PHASES: Final = {"kv_load": names.KV_LOAD, "kv_transfer": names.KV_TRANSFER}
SUMS: Final = {
    "prompt_tokens": names.PROMPT_TOKENS,
    "cached_tokens": names.PREFIX_HIT_TOKENS,
    "output_tokens": names.OUTPUT_TOKENS,
    "num_preemptions": names.PREEMPTIONS,
    "computed_tokens": names.COMPUTED_TOKENS,
    "recomputed_tokens": names.RECOMPUTED_TOKENS,
    "self_hit_tokens": names.SELF_HIT_TOKENS,
    "draft_tokens": names.DRAFT_TOKENS,
    "accepted_tokens": names.ACCEPTED_TOKENS,
}
TIERS: Final = {
    "cached_tokens_device": "device",
    "cached_tokens_host": "host",
    "cached_tokens_remote": "remote",
}
STATES: Final = column("request", "state").choices
STATS_AGE_S: Final = 15.0
"""Sizes of the store are read at most so often: counting rows is a query."""


class MetricsPage:
    """Renders the page; `render` is called on a worker thread."""

    def __init__(
        self,
        meters: Meters,
        ingest: Ingest,
        latencies: Latencies,
        live: Live,
        store: Store,
        fleet: Fleet,
        *,
        judged: Callable[[], Iterable[Metric]] = tuple,
        disk_budget_bytes: int | None = None,
        slo_goal: float = SLO_GOAL,
    ) -> None:
        self._registry = meters.registry
        self._registry.register(_Collector(lambda: _of_requests(latencies)))
        self._registry.register(_Collector(lambda: worker_gauges(live)))
        self._registry.register(_Collector(lambda: _of_fleet(fleet, latencies)))
        self._registry.register(_Collector(judged))
        self._of_collector = _OfCollector(meters, ingest, store, disk_budget_bytes, slo_goal)
        self._registry.register(_Collector(self._of_collector.collect))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics for who accepts it, else Prometheus' text format."""
        if any(part.partition(";")[0].strip() == "application/openmetrics-text" for part in accept.split(",")):
            page: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]  # the library has no types here
            return page, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def store_stats(self) -> StoreStats:
        """Size and content of the store, at most STATS_AGE_S old."""
        return self._of_collector.fresh_stats()


class _Collector(Collector):
    """Families of a function, without those that nothing has told yet."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        return (metric for metric in self._families() if metric.samples)


def _of_requests(latencies: Latencies) -> Iterator[Metric]:
    """Latencies by vantage, worker, model and hit class; sums and states without the class."""
    shown = latencies.shown()
    for metric, family in HISTOGRAMS.items():
        histogram = metric_of(family)
        for key, series in shown:
            if metric in series.total:
                part = series.total[metric]
                histogram.add_metric(
                    (key.vantage, key.worker, key.model, key.hit),
                    buckets(part.counts, names.LATENCY_BOUNDS_S, part.exemplars),
                    part.total_s,
                )
        yield histogram
    for metric, family in PHASES.items():
        bars: dict[Labels, tuple[Counts, float]] = {}
        for key, series in shown:
            if metric in series.total:
                part, pair = series.total[metric], (key.vantage, key.worker, key.model)
                counts, total_s = bars.get(pair, (0, 0.0))
                bars[pair] = (counts + part.counts, total_s + part.total_s)
        histogram = metric_of(family)
        for labels, (counts, total_s) in bars.items():
            histogram.add_metric(labels, buckets(counts, names.LATENCY_BOUNDS_S), total_s)
        yield histogram
    sums: dict[names.Family, dict[Labels, float]] = {}

    def add(family: names.Family, labels: Labels, value: float) -> None:
        of = sums.setdefault(family, {})
        of[labels] = of.get(labels, 0.0) + value

    for key, series in shown:
        pair = (key.vantage, key.worker, key.model)
        for name, value in series.sums.items():
            if name in TIERS:
                add(names.TIER_HIT_TOKENS, (*pair, TIERS[name]), value)
            else:
                add(SUMS[name], pair, value)
        for name, value in series.reuse.items():
            if name == "cache_prompt_tokens":
                add(names.CACHE_PROMPT_TOKENS, pair, value)
            else:
                add(names.CACHE_REQUESTS, (*pair, name.removeprefix("reused_")), value)
        for state in STATES if series.states else ():
            # who is told of has a 0 where none ended so: the share of failures is then 0 and not unknown
            add(names.REQUESTS, (*pair, state), series.states.get(state, 0.0))
    for family, of_labels in sums.items():
        counter = metric_of(family)
        for labels, value in of_labels.items():
            counter.add_metric(labels, value)
        yield counter


def _of_fleet(fleet: Fleet, latencies: Latencies) -> Iterator[Metric]:
    """The book; of what two vantages tell the engine's where a model has it, else the client's, as with latencies."""
    at_engine = latencies.models_at_engine()

    def is_shown(family: names.Family, labels: Labels) -> bool:
        if family.labels[:1] != ("vantage",):
            return True
        model = labels[family.labels.index("model")]
        return labels[0] == "engine" or (labels[0] == "client" and model not in at_engine)

    return fleet.book.metrics(is_shown)


class _OfCollector:
    """Queue, memory, senders, store."""

    def __init__(
        self,
        meters: Meters,
        ingest: Ingest,
        store: Store,
        disk_budget_bytes: int | None,
        slo_goal: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meters = meters
        self._ingest = ingest
        self._store = store
        self._disk_budget_bytes = disk_budget_bytes
        self._slo_goal = slo_goal
        self._clock = clock
        self._stats: tuple[float, StoreStats] | None = None

    def collect(self) -> Iterator[Metric]:
        """Every family of the collector's own health."""
        yield _one(names.SLO_GOAL, self._slo_goal)
        yield _one(names.BUILD, 1.0, metadata.version("kvscope"))
        yield _one(names.INGEST_QUEUE, self._ingest.num_batches)
        yield _one(names.INGEST_QUEUE_LIMIT, self._ingest.settings.max_batches)
        yield _one(names.INGEST_MEMORY, self._ingest.budget.used_bytes)
        yield _one(names.INGEST_MEMORY_LIMIT, self._ingest.settings.memory_bytes)
        yield from self._of_senders()
        yield from self._of_store()

    def _of_senders(self) -> Iterator[Metric]:
        received, offset = metric_of(names.SOURCE_RECEIVED), metric_of(names.SOURCE_OFFSET)
        error, missing = metric_of(names.SOURCE_ERROR), metric_of(names.SOURCE_MISSING)
        seen: set[str] = set()
        for sender in self._store.sources():
            name = self._meters.bounded_source(sender.source)
            if name in seen:  # later ones share `other`: the most recently heard of them is shown
                continue
            seen.add(name)
            received.add_metric([name], sender.last_received_ns / 1e9)
            missing.add_metric([name], sum(last - first + 1 for first, last in sender.missing))
            if sender.clock_offset_s is not None:
                offset.add_metric([name], sender.clock_offset_s)
            if sender.clock_error_s is not None:
                error.add_metric([name], sender.clock_error_s)
        yield from (received, offset, error, missing)

    def _of_store(self) -> Iterator[Metric]:
        try:
            stats = self.fresh_stats()
        except (
            KvscopeError
        ) as error:  # busy, or without memory for a query: the page is worth having with older numbers, or none
            log.warning("store not measured", extra={"reason": error.message})
            if self._stats is None:
                return
            stats = self._stats[1]
        yield _one(names.STORE_BYTES, stats.bytes)
        rows = metric_of(names.STORE_ROWS)
        for kind, count in stats.rows.items():
            rows.add_metric([kind], count)
        yield rows
        place = Path(stats.url).resolve().parent
        if place.exists():
            yield _one(names.STORE_FREE, shutil.disk_usage(place).free)
        if self._disk_budget_bytes is not None:
            yield _one(names.STORE_BUDGET, self._disk_budget_bytes)

    def fresh_stats(self) -> StoreStats:
        """At most STATS_AGE_S old."""
        now = self._clock()
        if self._stats is None or now - self._stats[0] > STATS_AGE_S:
            self._stats = (now, self._store.stats())
        return self._stats[1]


def _one(family: names.Family, value: float, *labels: str) -> Metric:
    metric: Metric = metric_of(family)
    metric.add_metric(labels, value)  # type: ignore[attr-defined]  # of a gauge
    return metric
