"""What an engine's row implies and does not say: phases by its instants, cached tokens by those that it computed.

A queue ends at the first schedule, prefill at the first token, and of a prompt what was not computed was cached; an engine (or a log of
one) that gives instants alone has told its phases all the same. Invariant: a column that any row tells is left as it is (who tells it
leaves it out on purpose elsewhere), and what is told beside (loads, look-ups, the front end) is taken off, so that phases never sum to
more than the time they lie in. All of it is of one row, so of one vantage and one clock; nothing is joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64

BEFORE_QUEUE: Final = ("frontend_s", "tokenize_s")
WITH_PREFILL: Final = ("cache_lookup_s", "kv_load_s", "kv_transfer_s", "handover_s", "alloc_s", "first_sample_s")
"""Phases between the queue and the first token, beside prefill."""
NEEDS: Final = {
    "queue_s": ("arrival_ns", "first_scheduled_ns"),
    "prefill_s": ("first_scheduled_ns", "first_token_ns"),
    "decode_s": ("first_scheduled_ns", "first_token_ns", "last_token_ns"),
    "cached_tokens": ("prompt_tokens", "computed_tokens"),
}
"""What each column follows from. Decoding only beside a schedule: a row without one may be one that was never told of its phases."""


def with_implied(table: pa.Table) -> tuple[pa.Table, tuple[str, ...]]:
    """Engine rows with the columns that no row tells and that follow from others, and the names of those that were filled."""
    filled = []
    for name, needs in NEEDS.items():
        if not _is_unknown(table, name) or any(_is_unknown(table, need) for need in needs):
            continue
        values = _implied(table, name)
        known = pa.array(values, pa.float64(), mask=~np.isfinite(values))
        if known.null_count == len(known):
            continue
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(name), known.cast(table.schema.field(name).type))
        filled.append(name)
    return table, tuple(filled)


def names_implied(names: Iterable[str]) -> frozenset[str]:
    """Names (`request.queue_s`) that follow from rows which fill these."""
    seen = frozenset(names)
    return frozenset(
        f"request.{name}" for name, needs in NEEDS.items() if all(f"request.{need}" in seen for need in needs)
    )


def _is_unknown(table: pa.Table, name: str) -> bool:
    return bool(table[name].null_count == table.num_rows)


def _implied(table: pa.Table, name: str) -> F64:
    """[n] of the column; NaN where what it follows from is not known, or in the wrong order."""
    if name == "cached_tokens":
        cached = _numbers(pc.subtract(table["prompt_tokens"], table["computed_tokens"]))
        return np.where(cached < 0.0, 0.0, cached)
    if name == "decode_s":
        decoded = _between(table, "first_token_ns", "last_token_ns") - _sum(table, ("stalled_s",))
        scheduled = np.asarray(table["first_scheduled_ns"].is_valid())
        return np.where(scheduled, np.where(decoded < 0.0, 0.0, decoded), np.nan)
    worked, beside = _between(table, "first_scheduled_ns", "first_token_ns"), _sum(table, WITH_PREFILL)
    if name == "prefill_s":
        seconds = worked - beside
    else:  # a load may come before the first schedule: what does not fit behind it lay in the wait
        waited = _between(table, "arrival_ns", "first_scheduled_ns")
        seconds = waited - _sum(table, BEFORE_QUEUE) - np.fmax(beside - worked, 0.0)
    return np.where(seconds < 0.0, 0.0, seconds)


def _between(table: pa.Table, start: str, end: str) -> F64:
    """Seconds from one instant to the other, NaN where they are in the wrong order; subtracted as integers, so nothing is rounded."""
    seconds = _numbers(pc.subtract(table[end], table[start])) / 1e9
    return np.where(seconds >= 0.0, seconds, np.nan)


def _sum(table: pa.Table, names: Iterable[str]) -> F64:
    """[n] seconds of the phases that are told; what is not told, or cannot be, counts nothing."""
    total = np.zeros(table.num_rows)
    for name in names:
        if table[name].null_count < table.num_rows:
            seconds = _numbers(table[name])
            total += np.where(np.isfinite(seconds) & (seconds > 0.0), seconds, 0.0)
    return total


def _numbers(column: pa.ChunkedArray) -> F64:
    return np.asarray(column.to_numpy(), dtype=np.float64)
