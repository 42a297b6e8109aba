"""Which prompt blocks requests missed although they had been stored before: lost, and computed again.

A miss is joined to the life of the very block it missed, by the block's hash (and the worker, where rows know theirs). Rows
of blocks name a request at most, never one of its attempts; so an attempt is told by its own row, which says what it asked
for and found, and by when it arrived: a block was there to be lost if it had been stored before that. Every attempt counts
for itself.

A lost block that was asked for again is stored twice, so only blocks that were stored at least twice can be lost. Where nobody tells of
stores (an engine, or a filter, that tells of evictions alone), a block that was evicted before it was asked for was lost. Blocks are
looked up from the hour before the window too (`lineage.past_of`): what was stored earlier and is missed now counts as new.
Arrays in place of a join in SQL: a fifth of the work over millions of events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store.evidence.key_index import CHUNK, U64, KeyIndex
from store.evidence.lineage import ON_DEVICE, past_of, window_sql
from store.interface import Store, Window

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that were stored at least twice, and the instant of their first store (ns) [k].

    A block is known by its hash, joined with its worker's where `by_worker`. `by_evictions`: no store is told, and these are the blocks
    that were evicted, with the instant of their first eviction.
    """

    index: KeyIndex
    first_ns: I64
    by_worker: bool
    by_evictions: bool = False


def stored_twice(store: Store, window: Window, *, by_worker: bool) -> Stored:
    """Blocks that were stored at least twice in the window and its past. `by_worker`: by the same worker."""
    keys, at = _changes(store, window, "= 'stored'", by_worker=by_worker)
    by_evictions = len(keys) == 0
    if by_evictions:
        keys, at = _changes(store, window, "IN ('evicted', 'removed')", by_worker=by_worker)
    rising = np.sort(keys)
    again = rising if by_evictions else rising[1:][rising[1:] == rising[:-1]]
    index = KeyIndex(again[np.concatenate([[True], again[1:] != again[:-1]])] if len(again) else again)
    first_ns = np.full(len(index.keys), np.iinfo(np.int64).max)
    for rows, place in index.each(keys):
        np.minimum.at(first_ns, place, at[rows])
    return Stored(index, first_ns, by_worker, by_evictions)


def _changes(store: Store, window: Window, change: str, *, by_worker: bool) -> tuple[U64, I64]:
    """(key, at_ns) of each block on the device that changed so in the window and its past, [m]."""
    scope, params = window_sql(past_of(window), "at_ns")
    key = f"xor(block_hash, {_KEY_OF_WORKER})" if by_worker else "block_hash"
    table = store.query(
        f"SELECT {key} AS key, at_ns FROM block WHERE {scope} AND change {change} AND {ON_DEVICE} AND block_hash IS NOT NULL",
        params,
    )
    return np.asarray(table["key"]).astype(np.uint64, copy=False), np.asarray(table["at_ns"])


def what_rows_tell(store: Store, window: Window, vantage: str) -> tuple[bool, bool]:
    """(whether any request row of the window tells its prompt blocks and what it found; whether all name their worker)."""
    condition, params = window_sql(window, "arrival_ns")
    told = store.query(
        "SELECT bool_or(prompt_blocks IS NOT NULL AND cached_tokens IS NOT NULL) AS blocks, bool_and(worker IS NOT NULL) AS workers "
        f"FROM request WHERE {condition} AND vantage = ?",
        [*params, vantage],
    )
    return bool(told["blocks"][0].as_py()), bool(told["workers"][0].as_py())


def lost_blocks(
    store: Store, stored: Stored, asked: pa.Table, block_size: int, limit: int = 10
) -> tuple[I64, pa.Table]:
    """(lost blocks of each request asked, [n]; the misses of the `limit` blocks that were lost most often).

    asked   [n] rows of the kind `request`: worker, arrival_ns, cached_tokens, prompt_blocks; a row without the last two asks nothing
    misses  row (of `asked`), worker ('' where blocks are not told apart by it), block_hash, at_ns (arrival)
    """
    at = np.asarray(asked["arrival_ns"].fill_null(0)).astype(np.int64, copy=False)
    workers = asked["worker"].fill_null("").combine_chunks().dictionary_encode()
    salt = np.zeros(asked.num_rows, dtype=np.uint64)
    if stored.by_worker:
        salt = _keys_of(store, workers.dictionary.to_pylist())[np.asarray(workers.indices)]
    owners, places = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for rows, missed, keys in _missed(asked, block_size):
        keys ^= np.repeat(salt[rows], missed)
        found, place = stored.index.find(keys)
        owner = np.repeat(np.arange(rows.start, rows.stop), missed)[found]
        lost = at[owner] > stored.first_ns[place]
        owners.append(owner[lost])
        places.append(place[lost])
    owner, place = np.concatenate(owners), np.concatenate(places)
    counts: I64 = np.bincount(owner, minlength=asked.num_rows)
    times = np.bincount(place, minlength=len(stored.first_ns))
    worst = np.lexsort((stored.index.keys, -times))[:limit]
    among = np.isin(place, worst[times[worst] > 0])
    row = owner[among]
    names = workers.dictionary_decode().take(pa.array(row))
    misses = pa.table(
        {
            "row": row,
            "worker": names if stored.by_worker else pa.array([""] * len(row), pa.string()),
            "block_hash": stored.index.keys[place[among]] ^ salt[row],
            "at_ns": at[row],
        }
    )
    return counts, misses


def evictions_of(store: Store, window: Window, block_hashes: Sequence[int]) -> pa.Table:
    """Evictions of these blocks in the window and its past: worker ('' where unknown), block_hash, at_ns; in no order."""
    scope, params = window_sql(past_of(window), "at_ns")
    wanted = ", ".join(str(int(h)) for h in block_hashes) or "NULL"
    # few rows have these hashes, so the tier is asked of those alone
    found = store.query(
        f"SELECT coalesce(worker, '') AS worker, block_hash, at_ns, {ON_DEVICE} AS here FROM block WHERE {scope} "
        f"AND block_hash IN ({wanted}) AND change IN ('evicted', 'removed')",
        params,
    )
    return found.filter(found["here"]).drop_columns(["here"])


def _missed(asked: pa.Table, block_size: int) -> Iterator[tuple[slice, I64, U64]]:
    """The blocks that requests asked for and did not find in the cache, some requests at a time: (rows of `asked`, how many
    blocks each, their hashes request by request)."""
    cached = asked["cached_tokens"]
    known = np.asarray(cached.is_valid())
    hit = np.maximum(np.asarray(cached.fill_null(0)).astype(np.int64, copy=False) // block_size, 0)
    first = 0
    for lists in asked["prompt_blocks"].chunks:  # joined into one, they would be copied
        flat = lists.flatten()
        hashes = np.asarray(flat if flat.null_count == 0 else flat.fill_null(0)).astype(np.uint64, copy=False)
        lengths = np.asarray(pc.list_value_length(lists).fill_null(0)).astype(np.int64, copy=False)
        end = np.cumsum(lengths)
        for some in _portions(end):
            rows = slice(first + some.start, first + some.stop)
            missed = np.where(known[rows], np.maximum(lengths[some] - hit[rows], 0), 0)
            begin, stop = int(end[some.start] - lengths[some.start]), int(end[some.stop - 1])
            edges = np.zeros(stop - begin + 1, dtype=np.int8)  # +1 where missed blocks begin, -1 behind them
            np.add.at(edges, end[some] - missed - begin, np.int8(1))
            np.subtract.at(edges, end[some] - begin, np.int8(1))
            taken = np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)
            yield rows, missed, hashes[begin:stop][taken]
        first += len(lists)


def _portions(end: I64) -> Iterator[slice]:
    """Spans of consecutive lists that hold about CHUNK items together; `end` [n] is where each list ends."""
    start = 0
    while start < len(end):
        before = end[start - 1] if start else 0
        stop = max(int(np.searchsorted(end, before + CHUNK, "right")), start + 1)
        yield slice(start, stop)
        start = stop


_KEY_OF_WORKER: Final = "hash(coalesce(worker, ''))"
"""SQL of a 64-bit number that tells workers apart. Two keys meet by chance once in 10^12 windows."""


def _keys_of(store: Store, workers: Sequence[Any]) -> U64:
    """`_KEY_OF_WORKER` of these names, in their order."""
    table = store.query(
        f"SELECT {_KEY_OF_WORKER} AS key FROM (SELECT unnest(?::VARCHAR[]) AS worker, unnest(range(?)) AS place) ORDER BY place",
        [list(workers), len(workers)],
    )
    return np.asarray(table["key"]).astype(np.uint64)
