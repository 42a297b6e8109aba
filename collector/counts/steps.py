"""Scheduler steps as counters and histograms by worker: length, parts, tokens, batches, chunks, preemptions, evictions."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from collector.counts.book import Book, Floats
from collector.counts.bounded import Names
from collector.counts.columns import numbers, words
from collector.live.durations import weights_of
from store import metric_catalogue as names

PARTS: Final = ("schedule", "alloc", "forward", "sample", "probe", "kv_load")
_SPREAD: Final = (
    ("duration_s", names.STEP, names.LATENCY_BOUNDS_S),
    ("num_running", names.BATCH_REQUESTS, names.COUNT_BOUNDS),
)


def count_steps(book: Book, steps: pa.Table, worker: Names) -> None:
    """Count live rows of `step`."""
    if steps.num_rows == 0:
        return
    of_row, found = words(steps, "worker")
    labels = [(worker(name),) for name in found]
    weights = weights_of(steps)

    def total(family: names.Family, values: Floats | None, *more: str) -> None:
        """Add the sum by worker of the rows that know it."""
        if values is None:
            return
        known = np.isfinite(values)
        counted = np.where(known, values if weights is None else values * weights, 0.0)
        sums = np.bincount(of_row, counted, len(found)).tolist()
        told = np.bincount(of_row, known, len(found)).tolist()
        book.add_all(
            family, (((*label, *more), value) for label, value, any_ in zip(labels, sums, told, strict=True) if any_)
        )

    for column, family, bounds in _SPREAD:
        values = numbers(steps, column)
        if values is not None:
            book.spread(family, bounds, values, of_row, labels, weights)
    for part in PARTS:
        total(names.STEP_PART, numbers(steps, f"{part}_s"), part)
    prefill, decode = numbers(steps, "prefill_tokens"), numbers(steps, "decode_tokens")
    again = numbers(steps, "recomputed_tokens")
    total(names.STEP_TOKENS, prefill if prefill is None or again is None else prefill - np.nan_to_num(again), "prefill")
    total(names.STEP_TOKENS, decode, "decode")
    total(names.STEP_TOKENS, again, "recompute")
    if prefill is not None:
        chunks = np.where(prefill > 0, prefill, np.nan)
        book.spread(names.CHUNK_TOKENS, names.TOKEN_BOUNDS, chunks, of_row, labels, weights)
        if decode is not None:
            book.spread(names.BATCH_TOKENS, names.TOKEN_BOUNDS, prefill + decode, of_row, labels, weights)
    total(names.STEP_PREEMPTIONS, numbers(steps, "num_preempted"))
    total(names.BLOCK_EVICTIONS, numbers(steps, "blocks_evicted"), "step")
