"""Set-based questions that diagnosis asks of blocks and counters: lineage of missed blocks, block totals, counter increases.

A miss is joined to the life of the very block it missed: stored before and lost (evicted or cleared), or never stored. All
is one SQL statement each over the store's tables, so cost follows the window. Sums of floats are rounded, because parallel
aggregation adds them in any order and a verdict must not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from store.interface import Store, Window


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


def lost_blocks_sql(window: Window, vantage: str, block_size: int, by_worker: bool) -> tuple[str, list[Any]]:
    """A row a prompt block that was missed although it had been stored before: it was lost and had to be computed again.

    A lost block that was asked for again is stored twice, so only blocks stored at least twice can be lost; that keeps the
    join small. `by_worker`: a block counts only on the worker that served the request (needs rows that know their worker).
    Blocks are looked up from the run's (or the live store's) whole past, not only from inside the window.
    """
    in_window, params = window_sql(window, "arrival_ns")
    scope, scope_params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    worker = "coalesce(worker, '')" if by_worker else "''"
    sql = f"""
WITH twice AS (
    SELECT {worker} AS worker, block_hash, min(at_ns) AS first_ns
    FROM block WHERE {scope} AND change = 'stored' AND {ON_DEVICE}
    GROUP BY ALL HAVING count(*) > 1
), missed AS (
    SELECT request_id, {worker} AS worker, arrival_ns AS at_ns,
           unnest(prompt_blocks[cached_tokens // {block_size} + 1:]) AS block_hash
    FROM request
    WHERE {in_window} AND vantage = ? AND prompt_blocks IS NOT NULL AND cached_tokens IS NOT NULL
)
SELECT m.request_id, m.worker, m.at_ns, m.block_hash
FROM missed m JOIN twice t ON m.block_hash = t.block_hash AND m.worker = t.worker AND m.at_ns > t.first_ns
"""
    return sql, [*scope_params, *params, vantage]


ON_DEVICE = "coalesce(tier, 'device') = 'device'"


def knows_workers(store: Store, window: Window, vantage: str) -> bool:
    """Whether every request of the window names its worker."""
    condition, params = window_sql(window, "arrival_ns")
    told = store.query(
        f"SELECT bool_and(worker IS NOT NULL) FROM request WHERE {condition} AND vantage = ?", [*params, vantage]
    )
    return bool(told.column(0)[0].as_py())


def lost_blocks(
    store: Store, window: Window, vantage: str, block_size: int, by_worker: bool, limit: int = 10
) -> tuple[pa.Table, pa.Table]:
    """(by request: request_id, lost blocks; misses of the `limit` blocks lost most often: request_id, worker, block_hash, at_ns)."""
    inner, params = lost_blocks_sql(window, vantage, block_size, by_worker)
    table = store.query(
        f"""
WITH lost AS MATERIALIZED ({inner}),
worst AS (SELECT block_hash, worker FROM lost GROUP BY ALL ORDER BY count(*) DESC, block_hash, worker LIMIT {limit})
SELECT request_id, count(*) AS lost, NULL AS worker, NULL::UBIGINT AS block_hash, NULL::BIGINT AS at_ns
FROM lost GROUP BY request_id
UNION ALL
SELECT l.request_id, NULL, l.worker, l.block_hash, l.at_ns
FROM lost l SEMI JOIN worst w ON l.block_hash = w.block_hash AND l.worker = w.worker""",
        params,
    )
    of_block = pc.is_valid(table["block_hash"])
    by_request = table.filter(pc.invert(of_block)).select(["request_id", "lost"])
    return by_request, table.filter(of_block).select(["request_id", "worker", "block_hash", "at_ns"])


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
