"""What the workers tell: their slow facts, their scheduler's steps, and what their blocks went through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.delivered_twice import again
from diagnosis.facts import F64, I64, BlockTotals, RequestFacts, StepFacts, WorkerFacts, rows_by_code
from diagnosis.loading.caching_flags import caching_by_flags
from diagnosis.loading.requests import floats, seconds_since
from store.evidence import lineage as queries
from store.interface import Store, Window

STEP_NUMBERS = [
    "step",
    "num_running",
    "num_waiting_prefill",
    "num_waiting_decode",
    "prefill_tokens",
    "decode_tokens",
    "recomputed_tokens",
    "num_preempted",
    "blocks_total",
    "blocks_used",
    "blocks_evicted",
    "oldest_wait_s",
    "schedule_s",
    "alloc_s",
    "kv_load_s",
    "probe_s",
]
OVERLAP = 1.2
"""Durations of a worker's steps over the time that they cover from which on they overlap: clocks and rounding stay far below it."""
ONE_COUNT = 0.05
"""Share of the steps whose number may not follow on the one before: above it several schedulers count under one name."""


def worker_facts(store: Store, window: Window) -> list[WorkerFacts]:
    """Newest known value of each slow fact by worker, from the whole past of the run (or of the live store)."""
    past = Window(None, window.end_ns, window.run_id)
    table = store.rows("worker", past, order_by="at_ns")
    merged: dict[str | None, dict[str, Any]] = {}
    for row in table.to_pylist():
        facts = merged.setdefault(row["worker"], {"flags": {}})
        for key in ("engine", "engine_version", "model", "block_size", "num_blocks", "prefix_caching"):
            if row.get(key) is not None and (row[key] or key == "prefix_caching"):  # no pool has blocks of size 0
                facts[key] = row[key]
        facts["flags"].update({k: v for k, v in dict(row.get("flags") or []).items() if v is not None})
        if "prefix_caching" not in facts and (told := caching_by_flags(facts["flags"])) is not None:
            facts["prefix_caching"] = told
    return [WorkerFacts(worker=name, **facts) for name, facts in merged.items()]


def serving(workers: list[WorkerFacts], requests: RequestFacts) -> list[WorkerFacts]:
    """Those that served the window's requests: a live store remembers workers that are long gone. All, where no row tells."""
    return [w for w in workers if w.worker in requests.worker_names] or workers


def step_facts(store: Store, window: Window, origin: int) -> StepFacts | None:
    """Steps by worker and time, each once, seconds after the origin; None where none is stored. Without a duration the time since the step before.

    Where a worker has several steps in flight (asynchronous scheduling tells each from its schedule to its output), a step takes
    the time from the end before it to its own: that is how often tokens come.
    """
    table = store.rows(
        "step", window, ["worker", "at_ns", "duration_s", "waiting_on", *STEP_NUMBERS], order_by="worker, at_ns"
    )
    if table.num_rows == 0:
        return None
    twice = again(table, "at_ns", ("worker", "step", "duration_s", "num_running", "prefill_tokens", "decode_tokens"))
    table = table.filter(pa.array(~twice)) if twice.any() else table
    codes = table["worker"].combine_chunks().dictionary_encode()
    numbers = {name: floats(table[name]) for name in STEP_NUMBERS}
    waiting = table["waiting_on"].combine_chunks()
    for key in ("blocks", "budget", "seats", "dependency", "unknown"):
        numbers[f"waiting_on_{key}"] = floats(pc.struct_field(waiting, key))
    at = seconds_since(table["at_ns"], origin)
    worker = np.asarray(pc.fill_null(codes.indices, -1)).astype(np.int64)
    duration = floats(table["duration_s"])
    between = np.diff(at, prepend=np.nan)
    between[np.diff(worker, prepend=-2) != 0] = np.nan
    busy = np.nan_to_num(numbers["num_running"]) > 0
    duration = np.where(np.isfinite(duration), duration, np.where(busy, between, np.nan))
    names = tuple(codes.dictionary.to_pylist())
    duration, overlaps = _without_overlap(worker, names, at, duration, numbers["step"])
    return StepFacts(worker, names, at, duration, numbers, overlaps)


def _without_overlap(
    worker: I64, names: Sequence[str | None], at_s: F64, duration_s: F64, step: F64
) -> tuple[F64, dict[str | None, float]]:
    """(durations [m] of which none reaches before the end of the step before it, `StepFacts.overlaps`).

    Of workers whose steps overlap, and that have one scheduler: of several, each has its own steps.
    """
    out, overlaps = duration_s.copy(), dict[str | None, float]()
    for name, rows in zip((None, *names), rows_by_code(worker + 1, len(names) + 1), strict=True):
        rows = rows[np.isfinite(duration_s[rows])]
        told, counted = duration_s[rows], step[rows]
        if len(rows) < 2 or np.mean(np.diff(counted) <= 0) > ONE_COUNT:
            continue
        alone = np.minimum(told, np.diff(at_s[rows], prepend=-np.inf))
        if float(told.sum()) >= OVERLAP * float(alone.sum()) > 0.0:
            out[rows] = alone
            overlaps[name] = float(told.sum()) / float(alone.sum())
    return out, overlaps


def sequences_alone(steps: StepFacts) -> StepFacts:
    """Steps whose decode tokens are counted by sequence, as work is fitted: a step that speculates gives a sequence several."""
    sequences = np.fmin(steps.get("decode_tokens"), steps.get("num_running"))
    return replace(steps, numbers={**steps.numbers, "decode_tokens": sequences})


def block_totals(store: Store, window: Window, workers: Sequence[str | None]) -> BlockTotals | None:
    """None where these workers tell of no blocks; a window without a change of any is one in which nothing was evicted, if they do."""
    row = queries.block_totals(store, window)
    if not any(row.values()) and not queries.tells_of_blocks(store, window, workers):
        return None
    rate = queries.block_rate(store, window)
    tier = {name: row[name] for name in ("tier_taken", "tier_given_up", "tier_loaded")}
    return BlockTotals(row["stored"], row["evicted"], None, row["cleared"], rate, **tier)
