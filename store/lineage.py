"""Set-based questions that diagnosis asks of blocks and counters: lineage of missed blocks, block totals, counter increases.

A miss is joined to the life of the very block it missed: stored before and lost (evicted or cleared), or never stored. All
is one statement each over the store's tables, so cost follows the window. Sums of floats are rounded, because parallel
aggregation adds them in any order and a verdict must not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store.interface import Store, Window
from store.one_request import one_request_sql


def window_sql(window: Window, column: str, prefix: str = "") -> tuple[str, list[Any]]:
    """(condition, parameters) that keep the rows of a window; `prefix` is a table alias with its dot."""
    parts: list[str] = []
    params: list[Any] = []
    if window.run_id is None:
        parts.append(f"{prefix}run_id IS NULL")
    else:
        parts.append(f"{prefix}run_id = ?")
        params.append(window.run_id)
    if window.start_ns is not None:
        parts.append(f"{prefix}{column} >= ?")
        params.append(window.start_ns)
    if window.end_ns is not None:
        parts.append(f"{prefix}{column} < ?")
        params.append(window.end_ns)
    return " AND ".join(parts), params


ON_DEVICE = "coalesce(tier, 'device') = 'device'"


def knows_workers(store: Store, window: Window, vantage: str, *, merged: bool = False) -> bool:
    """Whether every request of the window names its worker. `merged`: several rows may tell of one request."""
    condition, params = window_sql(window, "arrival_ns")
    rows = _requests(f"{condition} AND vantage = ?", ("worker",), merged)
    told = store.query(f"SELECT bool_and(worker IS NOT NULL) FROM {rows}", [*params, vantage])
    return bool(told.column(0)[0].as_py())


def lost_blocks(
    store: Store,
    window: Window,
    vantage: str,
    block_size: int,
    by_worker: bool,
    limit: int = 10,
    *,
    merged: bool = False,
) -> tuple[pa.Table, pa.Table]:
    """Prompt blocks that were missed although they had been stored before: lost, and computed again.

    Answers (by request: request_id, lost blocks; misses of the `limit` blocks lost most often: request_id, worker, block_hash,
    at_ns). A lost block that was asked for again is stored twice, so only blocks stored at least twice can be lost.
    `by_worker`: a block counts only on the worker that served the request (needs rows that know their worker). Blocks are
    looked up from the run's (or the live store's) whole past, not only from inside the window. `merged`: several rows may tell
    of one request. Sorted arrays in place of a join in SQL: three times less work over millions of events.
    """
    keys, first_ns = _stored_twice(store, window, by_worker)
    asked = _asked(store, window, vantage, block_size, by_worker, merged)
    lists = asked["missed"].combine_chunks()
    owner = np.repeat(np.arange(len(lists)), np.asarray(pc.fill_null(pc.list_value_length(lists), 0)))
    block = np.asarray(lists.flatten())
    at = np.asarray(asked["at_ns"])
    key = block ^ np.asarray(asked["worker_key"])[owner]
    position = np.clip(np.searchsorted(keys, key), 0, max(len(keys) - 1, 0))
    lost = (
        np.zeros(len(key), dtype=bool) if len(keys) == 0 else (keys[position] == key) & (at[owner] > first_ns[position])
    )
    counts = np.bincount(owner[lost], minlength=len(lists))
    hit = np.flatnonzero(counts)
    by_request = pa.table({"request_id": asked["request_id"].take(pa.array(hit)), "lost": counts[hit]})
    times = np.bincount(position[lost], minlength=len(keys))
    worst = np.lexsort((keys, -times))[:limit] if len(keys) else np.empty(0, dtype=np.int64)
    rows = np.flatnonzero(lost & np.isin(position, worst[times[worst] > 0]))
    of = pa.array(owner[rows])
    misses = pa.table(
        {
            "request_id": asked["request_id"].take(of),
            "worker": asked["worker"].take(of),
            "block_hash": block[rows],
            "at_ns": at[owner[rows]],
        }
    )
    return by_request, misses


def _stored_twice(store: Store, window: Window, by_worker: bool) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Keys (block and worker) that were stored at least twice, ascending, and the instant of their first store (ns)."""
    scope, params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    table = store.query(
        f"SELECT xor(block_hash, {_worker_key(by_worker)}) AS key, at_ns FROM block "
        f"WHERE {scope} AND change = 'stored' AND {ON_DEVICE} AND block_hash IS NOT NULL",
        params,
    )
    key, at = np.asarray(table["key"]), np.asarray(table["at_ns"])
    if len(key) == 0:
        return key.astype(np.uint64), at.astype(np.int64)
    order = np.argsort(key, kind="stable")
    key = key[order]
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    twice = np.diff(np.append(starts, len(key))) > 1
    return key[starts][twice], np.minimum.reduceat(at[order], starts)[twice]


def _asked(store: Store, window: Window, vantage: str, block_size: int, by_worker: bool, merged: bool) -> pa.Table:
    """Requests that name their prompt blocks: request_id, worker, worker_key, at_ns (arrival), missed (list of block hashes)."""
    condition, params = window_sql(window, "arrival_ns")
    columns = ("request_id", "worker", "arrival_ns", "cached_tokens", "prompt_blocks")
    rows = _requests(f"{condition} AND vantage = ?", columns, merged)
    worker = "coalesce(worker, '')" if by_worker else "''"
    return store.query(
        f"SELECT request_id, {worker} AS worker, {_worker_key(by_worker)} AS worker_key, arrival_ns AS at_ns, "
        f"prompt_blocks[cached_tokens // {block_size} + 1:] AS missed FROM {rows} "
        "WHERE prompt_blocks IS NOT NULL AND cached_tokens IS NOT NULL",
        [*params, vantage],
    )


def _requests(condition: str, columns: Sequence[str], merged: bool) -> str:
    """The requests that meet the condition as a relation."""
    rows = (
        one_request_sql(condition, columns) if merged else f"SELECT {', '.join(columns)} FROM request WHERE {condition}"
    )
    return f"({rows})"


def _worker_key(by_worker: bool) -> str:
    """SQL of a 64-bit number that tells workers apart; 0 where they need not be. Two keys meet by chance once in 10^12 windows."""
    return "hash(coalesce(worker, ''))" if by_worker else "CAST(0 AS UBIGINT)"


def evictions_of(store: Store, window: Window, block_hashes: Sequence[int]) -> pa.Table:
    """Evictions of these blocks up to the end of the window: worker ('' where unknown), block_hash, at_ns, in order."""
    scope, params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    wanted = ", ".join(str(int(h)) for h in block_hashes) or "NULL"
    return store.query(
        f"SELECT coalesce(worker, '') AS worker, block_hash, at_ns FROM block WHERE {scope} "
        f"AND change IN ('evicted', 'removed') AND {ON_DEVICE} AND block_hash IN ({wanted}) ORDER BY block_hash, at_ns",
        params,
    )


def cache_resets(store: Store, window: Window) -> pa.Table:
    """Resets of a cache up to the end of the window: worker, at_ns."""
    scope, params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    return store.query(f"SELECT worker, at_ns FROM block WHERE {scope} AND change = 'cleared' ORDER BY at_ns", params)


def block_totals(store: Store, window: Window) -> pa.Table:
    """One row: blocks stored, evicted, and caches cleared in the window."""
    condition, params = window_sql(window, "at_ns")
    return store.query(
        f"""
SELECT count(*) FILTER (change = 'stored') AS stored,
       count(*) FILTER (change IN ('evicted', 'removed')) AS evicted,
       count(*) FILTER (change = 'cleared') AS cleared
FROM block WHERE {condition} AND {ON_DEVICE}""",
        params,
    )


def restored_blocks(store: Store, window: Window) -> int:
    """Blocks of the window that were stored after an eviction of the same block in the same window."""
    condition, params = window_sql(window, "at_ns")
    table = store.query(
        f"""
WITH gone AS (
    SELECT worker, block_hash, min(at_ns) AS at_ns
    FROM block WHERE {condition} AND change IN ('evicted', 'removed') AND {ON_DEVICE} GROUP BY ALL
)
SELECT count(*) FROM block b JOIN gone g
  ON b.block_hash = g.block_hash AND b.worker IS NOT DISTINCT FROM g.worker AND b.at_ns > g.at_ns
WHERE {window_sql(window, "at_ns", "b.")[0]} AND b.change = 'stored' AND coalesce(b.tier, 'device') = 'device'""",
        [*params, *params],
    )
    return int(table.column(0)[0].as_py())


def counter_increases(store: Store, window: Window) -> pa.Table:
    """Increase of every `*_total`, `*_sum`, `*_count` series over the window by name, restarts of the counter counted from zero.

    Columns: name, increase, series. Buckets are left out.
    """
    condition, params = window_sql(window, "at_ns")
    return store.query(
        f"""
SELECT name, round(sum(CASE WHEN before IS NULL THEN 0 WHEN value < before THEN value ELSE value - before END), 6) AS increase,
       count(DISTINCT (worker, key)) AS series
FROM (
    SELECT name, worker, CAST(labels AS VARCHAR) AS key, value,
           lag(value) OVER (PARTITION BY worker, name, CAST(labels AS VARCHAR) ORDER BY at_ns) AS before
    FROM sample WHERE {condition} AND (name LIKE '%\\_total' ESCAPE '\\' OR name LIKE '%\\_sum' ESCAPE '\\' OR name LIKE '%\\_count' ESCAPE '\\')
) GROUP BY name""",
        params,
    )


def gauge_summary(store: Store, window: Window) -> pa.Table:
    """Mean and maximum of every gauge over the window: name, reason (label, or null), mean, max, min, n."""
    condition, params = window_sql(window, "at_ns")
    return store.query(
        f"""
SELECT name, labels['reason'] AS reason, round(avg(value), 9) AS mean, max(value) AS max, min(value) AS min, count(*) AS n
FROM sample
WHERE {condition} AND NOT (name LIKE '%\\_total' ESCAPE '\\' OR name LIKE '%\\_sum' ESCAPE '\\' OR name LIKE '%\\_count' ESCAPE '\\'
      OR name LIKE '%\\_bucket' ESCAPE '\\')
GROUP BY name, reason""",
        params,
    )
