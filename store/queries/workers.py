"""Workers and marks: the slow facts of each worker as last known, and what people should see on a time axis."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from engine_probe.events import KINDS
from store.interface import Store, Window
from store.queries.scope import in_window


def latest_facts(store: Store, window: Window) -> pa.Table:
    """One row a worker: every column of the kind `worker` as last known before the window's end; at_ns of the newest.

    A row holds until the next one and may tell only what changed. A worker first described later than the window is
    shown as it was first described. Workers that reported no facts, only steps or requests, are not there.
    """
    scope, params = in_window("worker", Window(run_id=window.run_id))
    known = [
        column.name for column in KINDS["worker"] if column.name not in ("worker", "at_ns", "run_id", "sample_rate")
    ]
    columns = ", ".join(f'arg_max("{name}", at_ns) FILTER ("{name}" IS NOT NULL) AS "{name}"' for name in known)
    rows, values = f"SELECT * FROM worker WHERE {scope}", params
    if window.end_ns is not None:
        rows += " QUALIFY at_ns < ? OR row_number() OVER (PARTITION BY worker ORDER BY at_ns) = 1"
        values = [*params, window.end_ns]
    return store.query(
        f"SELECT worker, max(at_ns) AS at_ns, {columns} FROM ({rows}) GROUP BY worker ORDER BY worker", values
    )


def marks(store: Store, window: Window, kinds: Sequence[str] | None = None) -> pa.Table:
    """Marks of the window in the order of time, all or only those kinds."""
    if kinds is None:
        return store.rows("mark", window, order_by="at_ns")
    return store.rows("mark", window, where="mark IN (SELECT unnest(?))", params=[list(kinds)], order_by="at_ns")
