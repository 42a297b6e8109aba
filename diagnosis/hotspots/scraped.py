"""What scraped gauges tell of a fleet where neither its decisions nor its steps do: the router's loads, and the workers' queues."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.hotspots.columns import codes, numbers, seconds_after
from diagnosis.hotspots.observed import F32, Decisions, Steps
from store.evidence.lineage import window_sql
from store.interface import Store, Window
from store.statements import literal


def scraped_loads(
    store: Store, window: Window, workers: tuple[str, ...], origin: int, decisions: Decisions
) -> F32 | None:
    """[N, K] the router's load gauge of each worker at each decision, the last value before it; None where it was not scraped."""
    table = _samples(store, window, ("router_load",), workers)
    if table.num_rows == 0 or len(decisions) == 0:
        return None
    code, at, value = np.asarray(table["code"]), seconds_after(table["at_ns"], origin), numbers(table["value"])
    loads = np.full((len(decisions), len(workers)), np.nan, dtype=np.float32)
    for worker in np.unique(code).tolist():
        mine = np.flatnonzero(code == worker)
        last = np.searchsorted(at[mine], decisions.at_s, "right") - 1
        loads[last >= 0, worker] = value[mine][last[last >= 0]]
    return loads


def scraped_queues(store: Store, window: Window, workers: tuple[str, ...], origin: int) -> Steps | None:
    """Scraped queues in the form of steps that tell nothing else; None where none was scraped."""
    table = _samples(store, window, ("requests_waiting",), workers)
    if table.num_rows == 0:
        return None
    unknown = np.full(table.num_rows, np.nan)
    return Steps(
        np.asarray(table["code"]).astype(np.int64),
        seconds_after(table["at_ns"], origin),
        unknown,
        unknown,
        unknown,
        numbers(table["value"]),
        unknown,
    )


def _samples(store: Store, window: Window, names: tuple[str, ...], workers: tuple[str, ...]) -> pa.Table:
    """(name, code, at_ns, value) of these gauges of these workers, by worker and time."""
    condition, params = window_sql(window, "at_ns")
    table = store.query(
        f"SELECT name, worker, at_ns, max(value) AS value FROM sample WHERE {condition} AND worker IS NOT NULL "
        f"AND name IN ({', '.join(map(literal, names))}) GROUP BY ALL ORDER BY worker, at_ns",
        params,
    )
    code = codes(table["worker"], workers)
    table = table.append_column("code", pa.array(code)).filter(pa.array(code >= 0))
    return table.take(pc.sort_indices(table, [("code", "ascending"), ("at_ns", "ascending")]))
