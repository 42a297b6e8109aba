"""Scraped numbers: gauges as they are, counters as their increases, with restarts of the engine seen and said.

A counter that falls was reset: its increase is then its new value. A series is one name, worker and set of labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from store.interface import Store, Window
from store.queries.scope import NS_PER_S, in_window

COUNTER_SUFFIXES: Final = ("_total", "_sum", "_count", "_bucket")
"""A sample whose name ends so is a counter; anything else is a gauge."""

_SERIES = "name, worker, coalesce(list_sort(map_entries(labels))::VARCHAR, '')"


def sample_series(store: Store, window: Window, names: Sequence[str], *, lookback_s: float = 600.0) -> pa.Table:
    """Samples of these names: name, worker, labels, at_ns, value, increase, is_reset; by series and time.

    `increase` is since the sample before, which may lie up to `lookback_s` before the window; null for gauges and for the
    first sample of a series. `is_reset`: the counter fell, and `increase` is its new value.
    """
    inside, params = in_window("sample", window)
    early, early_params = in_window("sample", _widened(window, lookback_s))
    counter = " OR ".join(f"suffix(name, '{suffix}')" for suffix in COUNTER_SUFFIXES)
    return store.query(
        f"""
        WITH found AS (
            SELECT name, worker, labels, at_ns, value, run_id,
                   lag(value) OVER (PARTITION BY {_SERIES} ORDER BY at_ns) AS before
            FROM sample WHERE {early} AND name IN (SELECT unnest(?))
        )
        SELECT name, worker, labels, at_ns, value,
               CASE WHEN NOT ({counter}) OR before IS NULL THEN NULL
                    WHEN value < before THEN value ELSE value - before END AS increase,
               CASE WHEN ({counter}) AND before IS NOT NULL THEN value < before END AS is_reset
        FROM found WHERE {inside} ORDER BY {_SERIES}, at_ns
        """,
        [*early_params, list(names), *params],
    )


def counter_increases(store: Store, window: Window, names: Sequence[str], *, lookback_s: float = 600.0) -> pa.Table:
    """How much counters grew in the window: name, worker, increase, num_resets, num_samples; labels summed up."""
    series = sample_series(store, window, names, lookback_s=lookback_s)
    sums = series.group_by(["name", "worker"]).aggregate([("increase", "sum"), ("is_reset", "sum"), ("at_ns", "count")])
    sums = sums.rename_columns(["name", "worker", "increase", "num_resets", "num_samples"])
    return sums.sort_by([("name", "ascending"), ("worker", "ascending")])


def _widened(window: Window, lookback_s: float) -> Window:
    start = None if window.start_ns is None else window.start_ns - round(lookback_s * NS_PER_S)
    return Window(start, window.end_ns, window.run_id)
