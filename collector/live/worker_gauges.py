"""Gauges of workers on `/metrics`: what the newest step says, else the newest scraped sample, and open requests.

A worker's gauges are as old as its step or sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import Metric

from collector.counts.book import metric_of
from collector.counts.bounded import label
from collector.live.live import Live
from store import metric_catalogue as names

_PLAIN: Final = {
    "num_running": names.REQUESTS_RUNNING,
    "oldest_wait_s": names.OLDEST_WAIT,
    "blocks_reserved": names.KV_RESERVED,
    "wasted_slots": names.KV_WASTED_SLOTS,
    "gpu_util": names.GPU_UTILIZATION,
    "memory_util": names.GPU_MEMORY,
}
_QUEUES: Final = {"num_waiting_prefill": "prefill", "num_waiting_decode": "decode"}


def worker_gauges(live: Live, clock: Callable[[], int] = time.time_ns) -> Iterator[Metric]:
    """Every gauge that some worker tells."""
    workers, scraped = live.workers(), live.scraped()
    for column, family in _PLAIN.items():
        more = _values(scraped, "requests_running") if family is names.REQUESTS_RUNNING else {}
        yield _gauge(family, {**{(name,): state[column] for name, state in workers.items()}, **more})
    instants: dict[tuple[str, ...], float | None] = {
        (name,): max(at_ns for at_ns, _ in found.values()) / 1e9 for name, found in scraped.items()
    }
    yield _gauge(names.NEWEST_STEP, {**{(name,): state["at_ns"] / 1e9 for name, state in workers.items()}, **instants})
    yield _gauge(
        names.REQUESTS_WAITING,
        {(name, queue): state[column] for name, state in workers.items() for column, queue in _QUEUES.items()}
        | {(*labels, ""): value for labels, value in _values(scraped, "requests_waiting").items()},
    )
    yield _gauge(
        names.WAITING_ON,
        {(name, on): count for name, state in workers.items() for on, count in (state["waiting_on"] or {}).items()},
    )
    yield from _of_blocks(live, workers, _values(scraped, "kv_usage_ratio"))
    if live.sees_routes:
        now_ns = clock()
        oldest = live.oldest_open_ns(now_ns)
        yield _gauge(names.REQUESTS_OPEN, {(): live.num_open})
        yield _gauge(names.OLDEST_OPEN, {(): 0.0 if oldest is None else (now_ns - oldest) / 1e9})


def _values(scraped: Mapping[str, Mapping[str, tuple[int, float]]], name: str) -> dict[tuple[str, ...], float]:
    return {(worker,): found[name][1] for worker, found in scraped.items() if name in found}


def _of_blocks(
    live: Live, workers: Mapping[str, Mapping[str, Any]], scraped_usage: Mapping[tuple[str, ...], float]
) -> Iterator[Metric]:
    states: dict[tuple[str, ...], float | None] = {}
    capacity: dict[tuple[str, ...], float | None] = {}
    usage: dict[tuple[str, ...], float | None] = {}
    fragmentation: dict[tuple[str, ...], float | None] = {}
    for name, state in workers.items():
        total = live.num_blocks(name) if state["blocks_total"] is None else state["blocks_total"]
        used, cached = state["blocks_used"], state["blocks_cached"]
        capacity[(name,)] = total
        states[(name, "used")], states[(name, "cached")] = used, cached
        if total and used is not None:
            usage[(name,)] = used / total
            if cached is not None:
                states[(name, "free")] = max(0, total - used - cached)
        size, wasted = live.block_sizes.get(name), state["wasted_slots"]
        if size and used and wasted is not None:
            fragmentation[(name,)] = wasted / (used * size)
    yield _gauge(names.KV_BLOCKS, states)
    yield _gauge(names.KV_CAPACITY, capacity)
    yield _gauge(names.KV_USAGE, {**scraped_usage, **usage})
    yield _gauge(names.KV_FRAGMENTATION, fragmentation)


def _gauge(family: names.Family, series: Mapping[tuple[str, ...], float | None]) -> Metric:
    """What is known; unknown is absent."""
    metric: Metric = metric_of(family)
    for labels, value in series.items():
        if value is not None:
            metric.add_metric(tuple(map(label, labels)), value)  # type: ignore[attr-defined]  # of a gauge
    return metric
