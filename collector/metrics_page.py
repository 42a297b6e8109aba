"""`/metrics`: the collector's own counters, its senders and its store, and the main latencies of what it watches.

Every name carries its unit and starts with `kvscope_`. What no row told has no series (unknown is absent, never zero).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from collector.ingest import Ingest
from collector.latencies import Histogram, Latencies, SeriesKey
from collector.live import Live
from collector.meters import Meters
from collector.sketches import BOUNDS_S
from store.interface import Store, StoreStats

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
HISTOGRAMS: Final = {
    "ttft": ("kvscope_time_to_first_token_seconds", "arrival to first token (TTFT)"),
    "tpot": (
        "kvscope_time_per_output_token_seconds",
        "(last - first token) / (output tokens - 1), one a request (TPOT)",
    ),
    "itl": ("kvscope_inter_token_latency_seconds", "gap between neighbouring tokens of a request (ITL)"),
    "e2e": ("kvscope_request_latency_seconds", "arrival to last token (E2E)"),
    "queue": ("kvscope_queue_seconds", "waiting for the first schedule"),
    "prefill": ("kvscope_prefill_seconds", "computing the prompt"),
}
SUMS: Final = {
    "prompt_tokens": ("kvscope_prompt_tokens", "prompt tokens of ended requests"),
    "cached_tokens": ("kvscope_prefix_hit_tokens", "prompt tokens served from cached blocks"),
    "output_tokens": ("kvscope_output_tokens", "tokens generated"),
    "num_preemptions": ("kvscope_preemptions", "times a running request gave its blocks back"),
}
_LABELS: Final = ["vantage", "worker", "model"]
STATS_AGE_S: Final = 15.0
"""Sizes of the store are read at most so often: counting rows is a query."""


class MetricsPage:
    """Renders the page; `render` is called on a worker thread."""

    def __init__(self, meters: Meters, ingest: Ingest, latencies: Latencies, live: Live, store: Store) -> None:
        self._registry = meters.registry
        self._registry.register(_OfRequests(latencies))
        self._registry.register(_OfWorkers(live))
        self._of_collector = _OfCollector(meters, ingest, store)
        self._registry.register(self._of_collector)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry)

    def store_stats(self) -> StoreStats:
        """Size and content of the store, at most STATS_AGE_S old."""
        return self._of_collector.fresh_stats()


class _OfRequests(Collector):
    """Latencies and sums of requests by vantage, worker and model."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        shown = self._latencies.shown()
        for metric, (name, doc) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, doc, labels=_LABELS)
            for key, series in shown:
                if metric in series.total:
                    histogram.add_metric(_values(key), *_buckets(series.total[metric]))
            yield histogram
        for column, (name, doc) in SUMS.items():
            counter = CounterMetricFamily(name, doc, labels=_LABELS)
            for key, series in shown:
                if column in series.sums:
                    counter.add_metric(_values(key), series.sums[column])
            yield counter
        requests = CounterMetricFamily("kvscope_requests", "requests by how they ended", labels=[*_LABELS, "state"])
        for key, series in shown:
            for state, count in series.states.items():
                requests.add_metric([*_values(key), state], count)
        yield requests


class _OfWorkers(Collector):
    """Newest step of every worker, evictions, open requests."""

    _GAUGES: Final = {
        "num_running": ("kvscope_requests_running", "requests in the batch of the newest step"),
        "num_waiting_prefill": ("kvscope_requests_waiting", "requests waiting for their first schedule, newest step"),
        "oldest_wait_s": ("kvscope_oldest_wait_seconds", "longest wait in the queue, newest step"),
    }
    _BLOCKS: Final = {"blocks_total": "total", "blocks_used": "used", "blocks_cached": "cached"}

    def __init__(self, live: Live) -> None:
        self._live = live

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        workers = self._live.workers()
        for column, (name, doc) in self._GAUGES.items():
            gauge = GaugeMetricFamily(name, doc, labels=["worker"])
            for worker, state in workers.items():
                if state[column] is not None:
                    gauge.add_metric([worker], state[column])
            yield gauge
        blocks = GaugeMetricFamily("kvscope_kv_blocks", "KV blocks of the newest step", labels=["worker", "state"])
        for worker, state in workers.items():
            for column, word in self._BLOCKS.items():
                if state[column] is not None:
                    blocks.add_metric([worker, word], state[column])
        yield blocks
        evictions = CounterMetricFamily(
            "kvscope_block_evictions",
            "cached KV blocks reclaimed, as told by rows of this kind",
            labels=["worker", "kind"],
        )
        for (worker, kind), count in self._live.evictions().items():
            evictions.add_metric([worker, kind], count)
        yield evictions
        if self._live.sees_routes:
            yield GaugeMetricFamily(
                "kvscope_requests_open", "routed requests without an end", value=self._live.num_open
            )


class _OfCollector(Collector):
    """Queue, memory, senders, store."""

    def __init__(
        self, meters: Meters, ingest: Ingest, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._meters = meters
        self._ingest = ingest
        self._store = store
        self._clock = clock
        self._stats: tuple[float, StoreStats] | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "kvscope_ingest_queue_batches", "batches on their way to disk", value=self._ingest.num_batches
        )
        yield GaugeMetricFamily("kvscope_ingest_memory_bytes", "bodies in flight", value=self._ingest.budget.used_bytes)
        yield from self._of_senders()
        yield from self._of_store()

    def _of_senders(self) -> Iterator[Metric]:
        labels = ["source"]
        received = GaugeMetricFamily(
            "kvscope_source_last_received_timestamp_seconds", "latest batch of a sender, as Unix time", labels=labels
        )
        offset = GaugeMetricFamily(
            "kvscope_source_clock_offset_seconds", "a sender's clock minus the collector's", labels=labels
        )
        error = GaugeMetricFamily(
            "kvscope_source_clock_error_seconds", "how far off the clock offset may be", labels=labels
        )
        missing = GaugeMetricFamily(
            "kvscope_source_missing_batches", "numbers skipped by a sender's newest epoch so far", labels=labels
        )
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
        stats = self.fresh_stats()
        yield GaugeMetricFamily("kvscope_store_bytes", "bytes of the store on disk", value=stats.bytes)
        rows = GaugeMetricFamily("kvscope_store_rows", "rows in the store", labels=["kind"])
        for kind, count in stats.rows.items():
            rows.add_metric([kind], count)
        yield rows
        place = Path(stats.url).resolve().parent
        if place.exists():
            free = shutil.disk_usage(place).free
            yield GaugeMetricFamily("kvscope_store_free_bytes", "free bytes of the disk of the store", value=free)

    def fresh_stats(self) -> StoreStats:
        """At most STATS_AGE_S old."""
        now = self._clock()
        if self._stats is None or now - self._stats[0] > STATS_AGE_S:
            self._stats = (now, self._store.stats())
        return self._stats[1]


def _values(key: SeriesKey) -> list[str]:
    return [key.vantage, key.worker, key.model]


def _buckets(part: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts by upper bound, and the sum, as prometheus_client wants them."""
    running = part.counts.cumsum().tolist()
    bounds = [f"{bound:g}" for bound in BOUNDS_S.tolist()] + ["+Inf"]
    return list(zip(bounds, running, strict=True)), part.total_s
