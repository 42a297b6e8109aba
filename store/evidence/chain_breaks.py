"""At which block each request's chain broke, and what had become of that block when the cache was asked.

A prefix is found block by block up to the first that is missing; so the life of that one block, at that instant, says why all
behind it had to be computed: it had been evicted for room, given up by age, was there all the same, or had never been stored.

One look at the events of those blocks alone, so the cost follows the requests and not the cache.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store.evidence.lineage import ON_DEVICE, past_of, window_sql
from store.interface import Store, Window
from store.statements import one_text, rows_of

I64 = NDArray[np.int64]

NEVER, EVICTED, EXPIRED, PRESENT = 0, 1, 2, 3
"""What had become of the block: never stored (or nothing was missed), evicted, given up by age, in the cache."""
BY_AGE: Final = "ttl"
"""The reason of an eviction by age."""
FEW: Final = 1.0
"""Lost blocks over evicted ones up to which evictions can well be what lost them: each can lose its block once."""


def may_be_split(store: Store, window: Window, num_lost: float) -> bool:
    """Whether blocks were given up by age, or fewer evicted than would explain so many losses: a cheap look before the dear one."""
    scope, params = window_sql(past_of(window), "at_ns")
    found = store.query(
        f"SELECT count(*) AS evicted, count(*) FILTER (reason = '{BY_AGE}') AS by_age FROM block WHERE {scope} "
        f"AND change IN ('evicted', 'removed') AND {ON_DEVICE}",
        params,
    ).to_pylist()[0]
    return bool(found["by_age"]) or num_lost > FEW * found["evicted"]


def chain_breaks(
    store: Store, window: Window, asked: pa.Table, at_ns: I64, block_size: int, *, by_worker: bool
) -> NDArray[np.int8]:
    """What had become of the first block that each request missed, [n]: NEVER, EVICTED, EXPIRED or PRESENT.

    asked   [n] rows of the kind `request`: worker, cached_tokens, prompt_blocks    at_ns   [n] when the cache was asked
    """
    rows, keys = first_missed(asked, block_size)
    out = np.zeros(asked.num_rows, dtype=np.int8)
    if len(rows) == 0:
        return out
    events = _events(store, window, block_size, pc.unique(keys))
    if events.num_rows == 0:
        return out
    workers = asked["worker"].combine_chunks().fill_null("").take(pa.array(rows))
    names = pc.unique(pa.concat_arrays([workers, events["worker"].combine_chunks()]))
    of_asked, of_event = (np.asarray(pc.index_in(column, names)) for column in (workers, events["worker"]))
    if not by_worker:
        of_asked, of_event = np.zeros_like(of_asked), np.zeros_like(of_event)
    block, event_block = np.asarray(keys), np.asarray(events["block_hash"])
    event_at, event_state = np.asarray(events["at_ns"]), np.asarray(events["state"]).astype(np.int8)
    codes = np.unique(np.concatenate([block, event_block]), return_inverse=True)[1] * len(names)
    times = np.unique(event_at)
    # one number that rises with the block, the worker and the time: an event of that instant counts, whoever asked then
    asked_key = (codes[: len(rows)] + of_asked) * (len(times) + 1) + np.searchsorted(times, at_ns[rows], "right")
    event_key = (codes[len(rows) :] + of_event) * (len(times) + 1) + np.searchsorted(times, event_at, "right")
    # of several events of one instant the eviction comes last
    order = np.lexsort((event_state != PRESENT, event_key))
    event_key, event_state = event_key[order], event_state[order]
    place = np.searchsorted(event_key, asked_key, "right") - 1
    known = place >= 0
    same = np.zeros(len(rows), dtype=bool)
    same[known] = event_key[place[known]] // (len(times) + 1) == asked_key[known] // (len(times) + 1)
    out[rows[same]] = event_state[place[same]]
    return out


def first_missed(asked: pa.Table, block_size: int) -> tuple[I64, Any]:
    """(rows that missed a block, the first that each of them missed)."""
    blocks = asked["prompt_blocks"].combine_chunks()
    if isinstance(blocks, pa.ChunkedArray):  # a table without rows
        return np.empty(0, dtype=np.int64), pa.array([], pa.uint64())
    length = np.asarray(pc.fill_null(pc.list_value_length(blocks), 0)).astype(np.int64)
    known = np.asarray(asked["cached_tokens"].is_valid())
    hit = np.asarray(asked["cached_tokens"].fill_null(0)).astype(np.int64) // block_size
    rows = np.flatnonzero(known & (hit < length))
    start = np.cumsum(length) - length
    flat = blocks.flatten()
    return rows, flat.take(pa.array(start[rows] + hit[rows]))


def _events(store: Store, window: Window, block_size: int, blocks: Any) -> pa.Table:
    """worker, block_hash, at_ns, state of what happened to these blocks in the window and its past."""
    scope, params = window_sql(past_of(window), "at_ns")
    return store.query(
        f"SELECT coalesce(worker, '') AS worker, block_hash, at_ns, CASE WHEN change = 'stored' THEN {PRESENT} "
        f"WHEN reason = '{BY_AGE}' THEN {EXPIRED} ELSE {EVICTED} END AS state FROM block WHERE {scope} "
        f"AND change IN ('stored', 'evicted', 'removed') AND {ON_DEVICE} "
        f"AND block_hash IN (SELECT {rows_of('UBIGINT')})",
        [*params, one_text(blocks.drop_null().to_pylist())],
    )
