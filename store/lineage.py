"""Set-based questions that diagnosis asks of blocks and counters: lineage of missed blocks, block totals, counter increases.

A miss is joined to the life of the very block it missed: stored before and lost (evicted or cleared), or never stored. All
is one SQL statement each over the store's tables, so cost follows the window. Sums of floats are rounded, because parallel
aggregation adds them in any order and a verdict must not depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from store.interface import Store, Window

if TYPE_CHECKING:
    import pyarrow as pa


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


def missed_blocks_sql(window: Window, vantage: str, block_size: int, by_worker: bool) -> tuple[str, list[Any]]:
    """The statement behind `lineage`: a row a missed full prompt block, with the last change of that block before the miss.

    `life`: evicted | cleared | resident (still there, but unreachable behind a lost parent) | new (never stored before).
    `by_worker`: a block counts only on the worker that served the request (needs rows that know their worker).
    Blocks are looked up from the run's (or the live store's) whole past, not only from inside the window.
    """
    in_window, params = window_sql(window, "arrival_ns", "r.")
    scope = "run_id IS NULL" if window.run_id is None else "run_id = ?"
    scope_params: list[Any] = [] if window.run_id is None else [window.run_id]
    ended = "" if window.end_ns is None else " AND at_ns < ?"
    ended_params: list[Any] = [] if window.end_ns is None else [window.end_ns]
    # joined on plain columns: an expression over both sides would turn the hash join into a nested loop
    same_block = " AND m.worker = l.worker" if by_worker else ""
    same_clear = "c.worker = k.worker" if by_worker else "c.one = k.one"
    worker = "coalesce(worker, '')" if by_worker else "''"
    sql = f"""
WITH asked AS (
    SELECT r.request_id, coalesce(r.worker, '') AS worker, r.arrival_ns AS at_ns, r.prompt_blocks, r.cached_tokens // {block_size} AS num_hit
    FROM request r
    WHERE {in_window} AND r.vantage = ? AND r.prompt_blocks IS NOT NULL AND r.cached_tokens IS NOT NULL
), missed AS (
    SELECT request_id, worker, at_ns, unnest(prompt_blocks[num_hit + 1:]) AS block_hash,
           generate_subscripts(prompt_blocks[num_hit + 1:], 1) + num_hit AS position
    FROM asked
), life AS (
    -- one batch of events has one instant: a block that was evicted and stored again in it is there afterwards
    SELECT {worker} AS worker, block_hash, at_ns, max(change) AS change, max(idle_s) AS idle_s, max(age_s) AS age_s
    FROM block
    WHERE {scope}{ended} AND change IN ('stored', 'evicted', 'removed') AND coalesce(tier, 'device') = 'device'
      AND block_hash IN (SELECT block_hash FROM missed)
    GROUP BY ALL
), cleared AS (
    SELECT {worker} AS worker, at_ns, 1 AS one FROM block WHERE {scope}{ended} AND change = 'cleared'
), last_change AS (
    SELECT m.request_id, m.worker, m.at_ns, m.block_hash, m.position, l.change, l.at_ns AS changed_ns, l.idle_s, l.age_s,
           1 AS one
    FROM missed m ASOF LEFT JOIN life l
      ON m.block_hash = l.block_hash{same_block} AND m.at_ns > l.at_ns
)
SELECT c.request_id, c.block_hash, c.position, c.at_ns, c.changed_ns, c.idle_s, c.age_s,
       CASE WHEN c.change IS NULL THEN 'new'
            WHEN c.change IN ('evicted', 'removed') THEN 'evicted'
            WHEN k.at_ns IS NOT NULL AND k.at_ns > c.changed_ns THEN 'cleared'
            ELSE 'resident' END AS life
FROM last_change c ASOF LEFT JOIN cleared k
  ON {same_clear} AND c.at_ns > k.at_ns
"""
    all_params = [*params, vantage, *scope_params, *ended_params, *scope_params, *ended_params]
    return sql, all_params


def knows_workers(store: Store, window: Window, vantage: str) -> bool:
    """Whether every request of the window names its worker."""
    condition, params = window_sql(window, "arrival_ns")
    told = store.query(
        f"SELECT bool_and(worker IS NOT NULL) FROM request WHERE {condition} AND vantage = ?", [*params, vantage]
    )
    return bool(told.column(0)[0].as_py())


def lineage(store: Store, window: Window, vantage: str, block_size: int, by_worker: bool) -> pa.Table:
    """Missed blocks by request: request_id, evicted, resident, cleared, new (blocks), back_after_s (median eviction to miss)."""
    inner, params = missed_blocks_sql(window, vantage, block_size, by_worker)
    return store.query(
        f"""
SELECT request_id,
       count(*) FILTER (life = 'evicted') AS evicted,
       count(*) FILTER (life = 'resident') AS resident,
       count(*) FILTER (life = 'cleared') AS cleared,
       count(*) FILTER (life = 'new') AS new,
       median((at_ns - changed_ns) / 1e9) FILTER (life = 'evicted') AS back_after_s
FROM ({inner}) GROUP BY request_id""",
        params,
    )


def worst_blocks(
    store: Store, window: Window, vantage: str, block_size: int, by_worker: bool, limit: int = 10
) -> pa.Table:
    """Blocks that were evicted and asked for again most often: block_hash, position, times, requests (up to 5), back_after_s."""
    inner, params = missed_blocks_sql(window, vantage, block_size, by_worker)
    return store.query(
        f"""
SELECT block_hash, min(position) AS position, count(*) AS times, list(request_id ORDER BY at_ns, request_id)[1:5] AS request_ids,
       median((at_ns - changed_ns) / 1e9) AS back_after_s
FROM ({inner}) WHERE life = 'evicted' GROUP BY block_hash ORDER BY times DESC, block_hash LIMIT {limit}""",
        params,
    )


def block_totals(store: Store, window: Window) -> pa.Table:
    """One row: stored, evicted, cleared, and `restored` (stored again after an eviction of the same block)."""
    condition, params = window_sql(window, "at_ns")
    return store.query(
        f"""
WITH life AS (
    SELECT change, at_ns, lag(change) OVER (PARTITION BY worker, block_hash ORDER BY at_ns, change) AS before
    FROM block WHERE {condition} AND coalesce(tier, 'device') = 'device' AND change IN ('stored', 'evicted', 'removed', 'cleared')
)
SELECT count(*) FILTER (change = 'stored') AS stored,
       count(*) FILTER (change IN ('evicted', 'removed')) AS evicted,
       count(*) FILTER (change = 'cleared') AS cleared,
       count(*) FILTER (change = 'stored' AND before IN ('evicted', 'removed')) AS restored
FROM life""",
        params,
    )


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
