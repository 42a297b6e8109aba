"""Which prompt blocks requests missed although they had been stored before: lost, and computed again.

A miss is joined to the life of the very block it missed, by the block's hash (and the worker, where rows know theirs). Rows
of blocks name a request at most, never one of its attempts; so an attempt is told by its own row, which says what it asked
for and found, and by when it arrived: a block was there to be lost if it had been stored before that. Every attempt counts
for itself.

A lost block that was asked for again is stored twice, so only blocks that were stored at least twice can be lost. Blocks are
looked up from the run's (or the live store's) whole past, not only from inside the window. Sorted arrays in place of a join
in SQL: a fifth of the work over millions of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store.interface import Store, Window
from store.lineage import ON_DEVICE, window_sql

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
"""Multiplied by it, 64-bit keys differ in their upper bits (Knuth, The Art of Computer Programming 3, section 6.4)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that were stored at least twice: their keys, rising, and the instant of their first store (ns), [k] each.

    A key is the block's hash, joined with its worker's where `by_worker`.
    """

    keys: U64
    first_ns: I64
    by_worker: bool

    def find(self, keys: U64) -> tuple[I64, I64]:
        """(which of `keys` [n] are here, rising; their position here)."""
        if len(self.keys) == 0:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        shift = np.uint64(64 - max(10, min(22, (16 * len(self.keys)).bit_length())))
        sieve = np.zeros(1 << (64 - int(shift)), dtype=np.bool_)
        sieve[(self.keys * _SPREAD) >> shift] = True
        maybe = np.flatnonzero(
            sieve[(keys * _SPREAD) >> shift]
        )  # few others pass, and a search costs ten times as much
        position = np.searchsorted(self.keys, keys[maybe])
        position = np.minimum(position, len(self.keys) - 1)
        here = self.keys[position] == keys[maybe]
        return maybe[here], position[here]


def stored_twice(store: Store, window: Window, *, by_worker: bool) -> Stored:
    """Blocks that were stored at least twice up to the end of the window. `by_worker`: by the same worker."""
    scope, params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    key = f"xor(block_hash, {_KEY_OF_WORKER})" if by_worker else "block_hash"
    table = store.query(
        f"SELECT {key} AS key, at_ns FROM block WHERE {scope} AND change = 'stored' AND {ON_DEVICE} AND block_hash IS NOT NULL",
        params,
    )
    keys, at = (
        np.asarray(table["key"]).astype(np.uint64, copy=False),
        np.asarray(table["at_ns"]).astype(np.int64, copy=False),
    )
    rising = np.sort(keys)
    again = rising[1:][rising[1:] == rising[:-1]]
    twice = again[np.concatenate([[True], again[1:] != again[:-1]])] if len(again) else again
    found = Stored(twice, np.full(len(twice), np.iinfo(np.int64).max), by_worker)
    rows, position = found.find(keys)
    np.minimum.at(found.first_ns, position, at[rows])
    return found


def lost_blocks(
    store: Store, stored: Stored, asked: pa.Table, block_size: int, limit: int = 10
) -> tuple[I64, pa.Table]:
    """(lost blocks of each request asked, [n]; the misses of the `limit` blocks that were lost most often).

    asked   [n] rows of the kind `request`: worker, arrival_ns, cached_tokens, prompt_blocks; a row without the last two asks nothing
    misses  row (of `asked`), worker ('' where blocks are not told apart by it), block_hash, at_ns (arrival)
    """
    owner, block = _missed(asked, block_size)
    at = np.asarray(pc.fill_null(asked["arrival_ns"], 0)).astype(np.int64, copy=False)
    workers = pc.fill_null(asked["worker"], "").combine_chunks().dictionary_encode()
    keys = block
    if stored.by_worker:
        code = np.asarray(workers.indices).astype(np.int64, copy=False)
        keys = block ^ _keys_of(store, workers.dictionary.to_pylist())[code[owner]]
    found, position = stored.find(keys)
    lost = at[owner[found]] > stored.first_ns[position]
    found, position = found[lost], position[lost]
    counts: I64 = np.bincount(owner[found], minlength=asked.num_rows)
    times = np.bincount(position, minlength=len(stored.keys))
    worst = np.lexsort((stored.keys, -times))[:limit]
    among = found[np.isin(position, worst[times[worst] > 0])]
    rows = owner[among]
    named = workers.dictionary_decode().take(pa.array(rows))
    misses = pa.table(
        {
            "row": rows,
            "worker": named if stored.by_worker else pa.array([""] * len(rows), pa.string()),
            "block_hash": block[among],
            "at_ns": at[rows],
        }
    )
    return counts, misses


def evictions_of(store: Store, window: Window, block_hashes: Sequence[int]) -> pa.Table:
    """Evictions of these blocks up to the end of the window: worker ('' where unknown), block_hash, at_ns; in no order."""
    scope, params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    wanted = ", ".join(str(int(h)) for h in block_hashes) or "NULL"
    # few rows have these hashes, so the tier is asked of those alone
    found = store.query(
        f"SELECT coalesce(worker, '') AS worker, block_hash, at_ns, {ON_DEVICE} AS here FROM block WHERE {scope} "
        f"AND block_hash IN ({wanted}) AND change IN ('evicted', 'removed')",
        params,
    )
    return found.filter(found["here"]).drop_columns(["here"])


def _missed(asked: pa.Table, block_size: int) -> tuple[I64, U64]:
    """The blocks that requests asked for and did not find in the cache: (row of `asked`, block hash), [m] each, in order."""
    lists, cached = asked["prompt_blocks"].combine_chunks(), asked["cached_tokens"]
    known = np.asarray(pc.and_(pc.is_valid(lists), pc.is_valid(cached)))
    lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64, copy=False)
    hit = np.asarray(pc.fill_null(cached, 0)).astype(np.int64, copy=False) // block_size
    missed = np.where(known, np.maximum(lengths - np.maximum(hit, 0), 0), 0)
    owner = np.repeat(np.arange(asked.num_rows), missed)
    end = np.cumsum(lengths)
    place = np.arange(len(owner)) + np.repeat(end - np.cumsum(missed), missed)
    return owner, np.asarray(pc.fill_null(lists.flatten(), 0)).astype(np.uint64, copy=False)[place]


_KEY_OF_WORKER: Final = "hash(coalesce(worker, ''))"
"""SQL of a 64-bit number that tells workers apart. Two keys meet by chance once in 10^12 windows."""


def _keys_of(store: Store, workers: Sequence[Any]) -> U64:
    """`_KEY_OF_WORKER` of these names, in their order."""
    table = store.query(
        f"SELECT {_KEY_OF_WORKER} AS key FROM (SELECT unnest(?::VARCHAR[]) AS worker, unnest(range(?)) AS place) ORDER BY place",
        [list(workers), len(workers)],
    )
    return np.asarray(table["key"]).astype(np.uint64, copy=False)
