"""Set-based questions that diagnosis asks of blocks and counters: block totals, resets, counter increases.

Each is one statement over the store's tables, so cost follows the window. Sums of floats are rounded, because parallel
aggregation adds them in any order and a verdict must not depend on it. What became of missed blocks: `lost_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from store.interface import Store, Window
from store.metrics import count_sql
from store.statements import can_be_literal, literal


def window_sql(window: Window, column: str, prefix: str = "") -> tuple[str, list[Any]]:
    """(condition, parameters) that keep the rows of a window; `prefix` is a table alias with its dot.

    Without parameters wherever that can be: DuckDB answers statements that have none faster (`duckdb_store.py`).
    """
    parts: list[str] = []
    params: list[Any] = []
    if window.run_id is None:
        parts.append(f"{prefix}run_id IS NULL")
    elif can_be_literal(window.run_id):
        parts.append(f"{prefix}run_id = {literal(window.run_id)}")
    else:
        parts.append(f"{prefix}run_id = ?")
        params.append(window.run_id)
    if window.start_ns is not None:
        parts.append(f"{prefix}{column} >= {int(window.start_ns)}")
    if window.end_ns is not None:
        parts.append(f"{prefix}{column} < {int(window.end_ns)}")
    return " AND ".join(parts), params


ON_DEVICE = "coalesce(tier, 'device') = 'device'"

PAST_NS: Final = 3_600_000_000_000
"""How long before a window a block may have been stored and still be missed by it as lost, not as new."""


def past_of(window: Window) -> Window:
    """The window and the hour before it: what can have become of the blocks that it misses. Of a whole run all there is.

    Bounded, so that the cost follows the window and not the history, and so that of two windows neither remembers more.
    """
    start = None if window.start_ns is None else window.start_ns - PAST_NS
    return Window(start, window.end_ns, window.run_id)


def cache_resets(store: Store, window: Window) -> pa.Table:
    """Resets of a cache in the window and its past: worker, at_ns."""
    scope, params = window_sql(past_of(window), "at_ns")
    return store.query(f"SELECT worker, at_ns FROM block WHERE {scope} AND change = 'cleared' ORDER BY at_ns", params)


def block_totals(store: Store, window: Window) -> dict[str, int]:
    """Blocks `stored`, `evicted`, and caches `cleared` in the window; estimates where block rows are a sample.

    Of slower tiers: blocks `tier_taken` in, `tier_given_up`, and `tier_loaded` to the device.
    """
    condition, params = window_sql(window, "at_ns")
    table = store.query(
        f"SELECT change, {ON_DEVICE} AS on_device, round({count_sql()}) AS n FROM block WHERE {condition} GROUP BY ALL",
        params,
    )
    counts = {(row["change"], row["on_device"]): int(row["n"]) for row in table.to_pylist()}

    def sum_of(*changes: str, on_device: bool = True) -> int:
        return sum(counts.get((change, on_device), 0) for change in changes)

    return {
        "stored": sum_of("stored"),
        "evicted": sum_of("evicted", "removed"),
        "cleared": sum_of("cleared"),
        "tier_taken": sum_of("offloaded") + sum_of("offloaded", "stored", on_device=False),
        "tier_given_up": sum_of("evicted", "removed", on_device=False),
        "tier_loaded": sum_of("loaded") + sum_of("loaded", on_device=False),
    }


def tells_of_blocks(store: Store, window: Window, workers: Sequence[str | None]) -> bool:
    """Whether any of these workers tells of its blocks in the window or the hour before it; of a run: in all that came before its end."""
    before = past_of(window) if window.run_id is None else Window(None, window.end_ns, window.run_id)
    condition, params = window_sql(before, "at_ns")
    found = store.query(
        f"SELECT DISTINCT worker FROM block WHERE {condition} AND change IN ('stored', 'evicted', 'removed', 'cleared') AND {ON_DEVICE}",
        params,
    )
    names = set(found["worker"].to_pylist())
    return None in names or bool(names & set(workers))


def hit_tokens(store: Store, window: Window) -> float:
    """Tokens of blocks that the window's requests found on the device, by the blocks' own events; a request's own blocks count nothing."""
    condition, params = window_sql(window, "at_ns")
    table = store.query(
        f"SELECT {count_sql()} * coalesce(avg(num_tokens), 0) FROM block WHERE {condition} AND change = 'hit' AND {ON_DEVICE} "
        "AND reason IS DISTINCT FROM 'self'",
        params,
    )
    return float(table.column(0)[0].as_py())


def sample_rates(store: Store, rows: str, params: Sequence[Any]) -> tuple[float | None, bool]:
    """(lowest share kept of what these rows stand for, None where all were kept; whether their rates differ).

    rows   "TABLE WHERE condition" or "(SELECT ...)"; it must have `sample_rate`
    """
    found = store.query(f"SELECT min(sample_rate), max(coalesce(sample_rate, 1.0)) FROM {rows}", params)
    lowest, highest = (column[0].as_py() for column in found.columns)
    return lowest, lowest is not None and lowest < highest


def block_rate(store: Store, window: Window) -> float | None:
    """Share of the blocks whose rows were kept in the window; None where all were. Of several rates, what they come to on average."""
    condition, params = window_sql(window, "at_ns")
    lowest, differ = sample_rates(store, f"block WHERE {condition} AND block_hash IS NOT NULL", params)
    if not differ:
        return lowest
    mean = store.query(
        f"SELECT count(*) / {count_sql()} FROM block WHERE {condition} AND block_hash IS NOT NULL", params
    )
    return float(mean.column(0)[0].as_py())


def restored_blocks(store: Store, window: Window) -> int:
    """Blocks of the window that were stored after an eviction of the same block in the same window."""
    condition, params = window_sql(window, "at_ns")
    table = store.query(
        f"""
WITH gone AS (
    SELECT worker, block_hash, min(at_ns) AS at_ns
    FROM block WHERE {condition} AND change IN ('evicted', 'removed') AND {ON_DEVICE} GROUP BY ALL
)
SELECT round({count_sql("b")}) FROM block b JOIN gone g
  ON b.block_hash = g.block_hash AND b.worker IS NOT DISTINCT FROM g.worker AND b.at_ns > g.at_ns
WHERE {window_sql(window, "at_ns", "b.")[0]} AND b.change = 'stored' AND coalesce(b.tier, 'device') = 'device'""",
        [*params, *params],
    )
    return int(table.column(0)[0].as_py())


def counter_increases(store: Store, window: Window) -> pa.Table:
    """Increase of every `*_total`, `*_sum`, `*_count` series over the window by name, restarts of the counter counted from zero.

    Columns: name, increase, series, span_s (seconds from the first reading to the last). Buckets are left out.
    """
    condition, params = window_sql(window, "at_ns")
    return store.query(
        f"""
SELECT name, round(sum(CASE WHEN before IS NULL THEN 0 WHEN value < before THEN value ELSE value - before END), 6) AS increase,
       count(DISTINCT (worker, key)) AS series, (max(at_ns) - min(at_ns)) / 1e9 AS span_s
FROM (
    SELECT name, worker, CAST(labels AS VARCHAR) AS key, value, at_ns,
           lag(value) OVER (PARTITION BY worker, name, CAST(labels AS VARCHAR) ORDER BY at_ns) AS before
    FROM sample WHERE {condition} AND (name LIKE '%\\_total' ESCAPE '\\' OR name LIKE '%\\_sum' ESCAPE '\\' OR name LIKE '%\\_count' ESCAPE '\\')
) GROUP BY name""",
        params,
    )


def scraped_workers(store: Store, window: Window) -> frozenset[str]:
    """Workers whose running or waiting requests were scraped in the window: they were there, whatever they were given."""
    condition, params = window_sql(window, "at_ns")
    found = store.query(
        f"SELECT DISTINCT worker FROM sample WHERE {condition} AND name IN ('requests_running', 'requests_waiting') AND worker IS NOT NULL",
        params,
    )
    return frozenset(found["worker"].to_pylist())


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
