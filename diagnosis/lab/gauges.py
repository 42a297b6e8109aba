"""A run as a dashboard shows it: a dozen numbers a window, aggregated over the fleet, from what every engine exports.

This is all that the threshold judge of `thresholds.py` is given, of the same rows that the diagnosis reads. It is given the
best of it: latencies from raw requests, not from the buckets of a histogram; gauges of every sample, not of one in fifteen
seconds; the warm-up left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from diagnosis.lab.truth import latencies, np_mask
from diagnosis.loading.requests import is_warmup
from diagnosis.statistics.quantiles import F64

if TYPE_CHECKING:
    import pyarrow as pa

GAUGES = (
    "ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "queue_mean", "running_mean", "imbalance_ratio", "kv_usage_mean",
    "kv_usage_max", "hit_ratio", "preemptions", "rate_rps", "prompt_tokens_mean", "output_tokens_mean",
)  # fmt: skip
"""imbalance: the busiest worker's mean of running and waiting over the fleet's; kv_usage_max: the fullest worker's P95; preemptions: a request."""


def gauges(tables: Mapping[str, pa.Table]) -> dict[str, float | None]:
    """By name of GAUGES; None where nobody told."""
    requests = tables["request"]
    engine = requests.filter(pc.equal(requests["vantage"], "engine"))
    seen = engine.filter(pc.invert(np_mask(is_warmup(engine))))
    found: dict[str, float | None] = dict.fromkeys(GAUGES)
    for name, told in latencies(requests).items():
        found |= {
            key: value
            for key, value in ((f"{name}_mean_s", told.mean_s), (f"{name}_p99_s", told.p99_s))
            if key in found
        }
    if seen.num_rows:
        start, end = pc.min(seen["arrival_ns"]).as_py(), pc.max(seen["arrival_ns"]).as_py()
        found["rate_rps"] = seen.num_rows / max((end - start) / 1e9, 1e-9)
        found["prompt_tokens_mean"] = pc.mean(seen["prompt_tokens"]).as_py()
        found["output_tokens_mean"] = pc.mean(seen["output_tokens"]).as_py()
        if "sample" in tables:
            found |= _sampled(tables["sample"], start, end, seen.num_rows)
    return found


def _sampled(samples: pa.Table, start_ns: int, end_ns: int, requests: int) -> dict[str, float | None]:
    """Gauges and counters between two instants."""
    at = samples["at_ns"]
    samples = samples.filter(pc.and_(pc.greater_equal(at, start_ns), pc.less_equal(at, end_ns)))
    series: dict[str, dict[str, F64]] = {}
    workers = np.asarray(samples["worker"].to_pylist(), dtype=object)
    names = np.asarray(samples["name"].to_pylist(), dtype=object)
    values = np.asarray(samples["value"].to_numpy(), dtype=np.float64)
    for name in ("requests_running", "requests_waiting", "kv_usage_ratio", *COUNTERS):
        mine = names == name
        series[name] = {worker: values[mine & (workers == worker)] for worker in dict.fromkeys(workers[mine])}
    usage = series["kv_usage_ratio"].values()
    queries, hits = (_increase(series[name]) for name in COUNTERS[:2])
    preempted = _increase(series["preemptions_total"])
    return {
        "queue_mean": _mean(series["requests_waiting"]),
        "running_mean": _mean(series["requests_running"]),
        "imbalance_ratio": _imbalance(series["requests_running"], series["requests_waiting"]),
        "kv_usage_mean": _mean(series["kv_usage_ratio"]),
        "kv_usage_max": max((float(np.quantile(each, 0.95)) for each in usage if len(each)), default=None),
        "hit_ratio": hits / queries if queries and hits is not None else None,
        "preemptions": None if preempted is None else preempted / max(requests, 1),
    }


COUNTERS = ("prefix_queries_tokens_total", "prefix_hits_tokens_total", "preemptions_total")


def _mean(by_worker: Mapping[str, F64]) -> float | None:
    """Of the workers' means."""
    means = [float(each.mean()) for each in by_worker.values() if len(each)]
    return float(np.mean(means)) if means else None


def _increase(by_worker: Mapping[str, F64]) -> float | None:
    """Sum over workers of last less first."""
    return float(sum(each[-1] - each[0] for each in by_worker.values() if len(each))) if by_worker else None


def _imbalance(running: Mapping[str, F64], waiting: Mapping[str, F64]) -> float | None:
    busy = [
        float(each.mean() + waiting[name].mean())
        for name, each in running.items()
        if len(each) and len(waiting.get(name, ()))
    ]
    return max(busy) / max(float(np.mean(busy)), 1e-9) if busy else None
