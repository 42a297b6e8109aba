"""Runs of an experiment made up for tests: one `request` table a run, every number said by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from diagnosis.experiments.contrast import Contrast, contrast
from diagnosis.experiments.design import Arm
from diagnosis.experiments.observed import Observed, observe
from diagnosis.experiments.summary import ArmSummary, summarise
from engine_probe.schema import table_from_rows

MS = 1_000_000
START = 1_780_000_000_000_000_000


@dataclass(frozen=True)
class Call:
    """One request: when it came (s), how long to its first token, and what is known of it besides."""

    arrival_s: float
    ttft_s: float
    more: dict[str, Any] = field(default_factory=dict)


def request(number: int, call: Call, **defaults: Any) -> dict[str, Any]:
    """A `request` row; tokens come every 10 ms, ten of them."""
    arrival = START + round(call.arrival_s * 1e9)
    first = arrival + round(call.ttft_s * 1e9)
    last = first + 9 * 10 * MS
    row: dict[str, Any] = {
        "request_id": f"r-{number:04d}",
        "vantage": "engine",
        "state": "finished",
        "arrival_ns": arrival,
        "at_ns": last,
        "first_token_ns": first,
        "last_token_ns": last,
        "end_ns": last,
        "output_tokens": 10,
        "prompt_tokens": 1000,
        "labels": {},
    }
    return row | defaults | call.more


def observed(run_id: str, calls: Sequence[Call], steps: Sequence[dict[str, Any]] = (), **defaults: Any) -> Observed:
    """The run of these calls."""
    requests = table_from_rows("request", [request(n, call, **defaults) for n, call in enumerate(calls)])
    return observe(run_id, requests, steps_table(steps) if steps else None)


def steps_table(steps: Sequence[dict[str, Any]]) -> pa.Table:
    """Steps within the run, 1 s after its begin."""
    return table_from_rows(
        "step", [{"worker": "w0", "at_ns": START + 1_000 * MS, "step": n, **step} for n, step in enumerate(steps)]
    )


def arm(name: str, make: Callable[[int], Observed], **settings: str) -> ArmSummary:
    """An arm of three runs, the n-th of which `make(n)` gives."""
    return summarise(Arm(name, settings), [make(repeat) for repeat in range(3)])


def compared(base: Callable[[int], Observed], suspect: Callable[[int], Observed], **of_both: str) -> Contrast:
    """Arm B against arm D; of_both: their settings, but that B's cache is off and D's on unless it is said."""
    caches = ("off", "on") if "cache" not in of_both else (of_both["cache"],) * 2
    arms = [
        (name, make, {**of_both, "cache": cache})
        for name, make, cache in zip("BD", (base, suspect), caches, strict=True)
    ]
    baseline, other = (arm(name, make, **settings) for name, make, settings in arms)
    return contrast(baseline, other)
