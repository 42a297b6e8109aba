"""An experiment's result as one document: what was fixed, the runs in their order, each arm, each contrast with its reading.

Invariant: `--json`, the text and the report are all made of it. Durations are s; an interval's open end is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from diagnosis.experiments.contrast import Contrast, HotWorker
from diagnosis.experiments.design import Trial
from diagnosis.experiments.knee import Knee, Level
from diagnosis.experiments.reading import Reading
from diagnosis.experiments.resampling import Estimate
from diagnosis.experiments.summary import ArmSummary


def experiment_document(
    name: str,
    fixed: Mapping[str, Any],
    trials: Sequence[Trial],
    arms: Sequence[ArmSummary],
    contrasts: Sequence[tuple[Contrast, Sequence[Reading]]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Keys: name, fixed, order, arms, contrasts, notes. fixed: what is the same in every arm, None where nobody told."""
    return {
        "name": name,
        "fixed": dict(fixed),
        "order": [trial.run_id for trial in trials],
        "arms": [_arm(arm) for arm in arms],
        "contrasts": [_contrast(*both) for both in contrasts],
        "notes": list(notes),
    }


def sweep_document(
    name: str, fixed: Mapping[str, Any], unit: str, levels: Sequence[Level], knee: Knee, notes: Sequence[str]
) -> dict[str, Any]:
    """Keys: name, fixed, unit, levels (load and what came of it, rising), knee, notes."""
    rows = []
    for level in sorted(levels, key=lambda level: level.load):
        rows.append({"load": level.load, **_arm(level.summary)})
    return {
        "name": name,
        "fixed": dict(fixed),
        "unit": unit,
        "levels": rows,
        "knee": asdict(knee),
        "notes": list(notes),
    }


def _arm(arm: ArmSummary) -> dict[str, Any]:
    return {
        "arm": arm.arm.name,
        "settings": dict(arm.arm.settings),
        "start": "warm" if arm.arm.is_warm else "cold",
        "vantage": arm.runs[0].vantage if arm.runs else None,
        "num_requests": arm.num_requests,
        "num_unfinished": arm.num_unfinished,
        "num_warmup_left_out": arm.num_warmup,
        "arrival_rate": _estimate(arm.arrival_rate),
        "concurrency": _estimate(arm.concurrency),
        "concurrency_max": arm.concurrency_max,
        "goodput_rps": _estimate(arm.goodput_rps),
        "output_tokens_per_s": _estimate(arm.output_tokens_per_s),
        "latency": _latency(arm.latency),
        "by_class": {name: {**row, "ttft": _estimates(row["ttft"])} for name, row in arm.by_class.items()},
        "phases_mean_s": arm.phases,
        "workers": arm.workers,
        "evicted_blocks": arm.evicted_blocks,
        "preemptions": arm.preemptions,
        "recomputed_tokens": arm.recomputed_tokens,
        "reused_ratio": arm.reused_ratio,
        "sent_late_max_s": arm.sent_late_max_s,
        "runs": [
            {
                "run": run.run_id,
                "num_requests": len(run),
                "arrival_rate": run.arrival_rate,
                "concurrency_mean": run.concurrency_mean,
                "concurrency_max": run.concurrency_max,
                "span_s": run.span_s,
            }
            for run in arm.runs
        ],
    }


def _contrast(found: Contrast, readings: Sequence[Reading]) -> dict[str, Any]:
    return {
        "baseline": found.baseline.arm.name,
        "suspect": found.suspect.arm.name,
        "reading": [asdict(reading) for reading in readings],
        "difference": _latency(found.latency),
        "same_calls_by_class": _estimates(found.paired_by_class),
        "num_unpaired": found.num_unpaired,
        "hot_worker": {"baseline": _hot(found.baseline_hot), "suspect": _hot(found.hot)},
        "lookup": {**_estimate(found.lookup_s), "paid_by": found.lookup_paid_share},
        "only_when_on": {
            name: {"baseline": getattr(found.baseline, name), "suspect": getattr(found.suspect, name)}
            for name in ("evicted_blocks", "preemptions", "recomputed_tokens")
        },
        "side_effects": [{**row, "interval_95": _bounds(row["interval_95"])} for row in found.side_effects],
    }


def _hot(found: HotWorker | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def _latency(latency: Mapping[str, Mapping[str, Estimate]]) -> dict[str, Any]:
    return {metric: _estimates(rows) for metric, rows in latency.items()}


def _estimates(rows: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: _estimate(found) for name, found in rows.items()}


def _estimate(found: Estimate) -> dict[str, Any]:
    return {"value": found.value, "interval_95": _bounds(found.interval_95), "reason": found.reason}


def _bounds(bounds: tuple[float, float] | None) -> list[float | None] | None:
    return None if bounds is None else [end if math.isfinite(end) else None for end in bounds]
