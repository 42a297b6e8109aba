"""One arm over its repeats: latencies with intervals, hits and misses apart, phases, workers, evictions, and the load it really had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diagnosis.experiments.design import Arm
from diagnosis.experiments.observed import CLASSES, Observed
from diagnosis.experiments.resampling import Estimate, estimate, of_numbers
from diagnosis.facts import F64
from engine_probe.events import PHASES
from store.metrics import PRESET_SLOS, Slo

METRICS = ("ttft", "tpot", "e2e")
STATISTICS: tuple[tuple[str, str | None], ...] = (
    ("mean", None),
    ("p50", "0.5"),
    ("p95", "0.95"),
    ("p99", "0.99"),
    ("p99_9", "0.999"),
)


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """What an arm did. Counts are sums over its repeats, None where nobody tells; `latency` is metric -> statistic -> estimate.

    reused_ratio  of all tokens of prompts, those that the cache gave
    """

    arm: Arm
    runs: Sequence[Observed]
    latency: dict[str, dict[str, Estimate]]
    by_class: dict[str, dict[str, Any]]
    phases: dict[str, float]
    workers: list[dict[str, Any]]
    arrival_rate: Estimate
    concurrency: Estimate
    goodput_rps: Estimate
    output_tokens_per_s: Estimate
    num_requests: int
    num_unfinished: int
    num_warmup: int
    concurrency_max: int
    evicted_blocks: int | None
    preemptions: int | None
    recomputed_tokens: int | None
    reused_ratio: float | None
    sent_late_max_s: float | None


def summarise(arm: Arm, runs: Sequence[Observed], slo: Slo | None = None) -> ArmSummary:
    """Summary of an arm's runs. slo: what a good request keeps (default: interactive)."""
    slo = slo or PRESET_SLOS["interactive"]
    return ArmSummary(
        arm=arm,
        runs=runs,
        latency={metric: _statistics([values(run, metric) for run in runs]) for metric in METRICS},
        by_class={name: found for name in CLASSES if (found := _of_class(runs, name)) is not None},
        phases=_phases(runs),
        workers=_workers(runs),
        arrival_rate=of_numbers([run.arrival_rate for run in runs]),
        concurrency=of_numbers([run.concurrency_mean for run in runs]),
        goodput_rps=of_numbers([goodput_rps(run, slo) for run in runs]),
        output_tokens_per_s=of_numbers([tokens_per_s(run) for run in runs]),
        num_requests=sum(len(run) for run in runs),
        num_unfinished=sum(int((~run.finished).sum()) for run in runs),
        num_warmup=sum(run.num_warmup for run in runs),
        concurrency_max=max(run.concurrency_max for run in runs),
        evicted_blocks=_sum([run.evicted_blocks for run in runs]),
        preemptions=_sum([run.preemptions for run in runs]),
        recomputed_tokens=_sum([run.recomputed_tokens for run in runs]),
        reused_ratio=_reused(runs),
        sent_late_max_s=max((run.sent_late_max_s for run in runs if run.sent_late_max_s is not None), default=None),
    )


def _reused(runs: Sequence[Observed]) -> float | None:
    """Share of the prompts' tokens that came from the cache; None where nobody tells."""
    asked = sum(run.prompt_tokens_known for run in runs)
    return sum(run.reused_tokens for run in runs) / asked if asked else None


def values(run: Observed, metric: str) -> F64:
    """Known values of ttft, tpot or e2e of a run, s."""
    found: F64 = getattr(run, f"{metric}_s")
    return found[np.isfinite(found)]


def goodput_rps(run: Observed, slo: Slo) -> float:
    """Finished requests a second that kept every limit; TPOT does not apply to one token."""
    good = run.finished.copy()
    if slo.ttft_s is not None:
        good &= run.ttft_s <= slo.ttft_s
    if slo.tpot_s is not None:
        good &= (run.tpot_s <= slo.tpot_s) | (run.output_tokens <= 1)
    return float(good.sum()) / max(run.span_s, 1e-9)


def tokens_per_s(run: Observed) -> float:
    """Generated tokens a second over the counted stretch."""
    return float(np.nansum(run.output_tokens)) / max(run.span_s, 1e-9)


def _statistics(repeats: list[F64]) -> dict[str, Estimate]:
    return {name: estimate(repeats, q) for name, q in STATISTICS}


def _of_class(runs: Sequence[Observed], name: str) -> dict[str, Any] | None:
    """TTFT of the requests of one class; None where there are none."""
    of_class = [run.ttft_s[(run.outcome == name) & np.isfinite(run.ttft_s)] for run in runs]
    count = sum(int((run.outcome == name).sum()) for run in runs)
    if not count:
        return None
    known = sum(int((run.outcome != "").sum()) for run in runs)
    return {"num_requests": count, "share": count / known, "ttft": _statistics(of_class)}


def _phases(runs: Sequence[Observed]) -> dict[str, float]:
    """Mean seconds a request spent in each phase that is told."""
    found = {}
    for name in PHASES:
        told = np.concatenate([run.phase(name) for run in runs])
        told = told[np.isfinite(told)]
        if told.size:
            found[name] = float(told.mean())
    return found


def _workers(runs: Sequence[Observed]) -> list[dict[str, Any]]:
    rows = []
    for name in sorted({load.worker for run in runs for load in run.workers}):
        loads = [load for run in runs for load in run.workers if load.worker == name]
        count, waited = sum(load.num_requests for load in loads), _sum([load.queue_s for load in loads])
        means = [load.waiting_mean for load in loads if load.waiting_mean is not None]
        rows.append(
            {
                "worker": name,
                "num_requests": count,
                "queue_mean_s": waited / count if waited is not None and count else None,
                "waiting_mean": float(np.mean(means)) if means else None,
                "waiting_max": max((load.waiting_max for load in loads if load.waiting_max is not None), default=None),
            }
        )
    return rows


def _sum(told: Sequence[Any]) -> Any:
    known = [value for value in told if value is not None]
    return sum(known) if known else None
