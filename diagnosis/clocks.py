"""Two clocks: how far the engine's is ahead of the client's, told by the requests that both of them saw.

Instants of two vantages are never subtracted to say how long something took. But which events of the engine belong to a
window, and which block was stored before a request came, are questions of its clock: where it is a second or more away, the
client's instants are moved to it first. Invariant: what moves is every instant of a request alike, so no duration changes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.load_requests import INSTANTS, reach
from store.interface import Store, Window
from store.lineage import window_sql

APART_NS = 1_000_000_000
"""Arrivals at the client and at the engine that lie no farther apart are the way between them, not their clocks."""
LOOKED_AT = 200
"""Requests whose arrivals are compared: the first of the window."""


def engine_ahead_ns(store: Store, window: Window, vantage: str) -> int:
    """How far the engine's clock is ahead (ns) of the vantage's; 0 within a second, and where no request was seen by both."""
    if vantage == "engine":
        return 0
    ahead, share = _median(store, window, vantage, reach(window))
    if share < 0.5 and (window.start_ns is not None or window.end_ns is not None):
        ahead, share = _median(store, window, vantage, Window(run_id=window.run_id))
    return ahead if abs(ahead) > APART_NS else 0


def moved(window: Window, ahead_ns: int) -> Window:
    """The window on the engine's clock."""
    ends = [None if end is None else end + ahead_ns for end in (window.start_ns, window.end_ns)]
    return Window(ends[0], ends[1], window.run_id)


def moved_requests(table: pa.Table, ahead_ns: int) -> pa.Table:
    """The requests with every instant on the engine's clock."""
    if ahead_ns == 0:
        return table
    for name in INSTANTS:
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(name), pc.add(table[name], pa.scalar(ahead_ns, pa.int64())))
    place = table.column_names.index("token_ns")
    column = table["token_ns"].combine_chunks()
    lists = pa.ListArray.from_arrays(
        _offsets(column), pc.add(column.flatten(), pa.scalar(ahead_ns, pa.int64())), type=column.type
    )
    return table.set_column(place, table.schema.field("token_ns"), lists)


def _offsets(lists: pa.ListArray) -> pa.Array:
    """Offsets of the flattened lists, null where a list is."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    ends = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))]).astype(np.int32)
    return pa.array(ends, pa.int32(), mask=np.append(np.asarray(pc.is_null(lists)), False))


def _median(store: Store, window: Window, vantage: str, among: Window) -> tuple[int, float]:
    """(median difference of the arrivals of a request, ns; share of the requests looked at that the engine saw `among`)."""
    mine, my_params = window_sql(window, "arrival_ns")
    theirs, their_params = window_sql(among, "arrival_ns")
    row = store.query(
        f"WITH mine AS (SELECT request_id, arrival_ns FROM request WHERE {mine} AND vantage = ? ORDER BY arrival_ns, request_id "
        f"LIMIT {LOOKED_AT}), seen AS (SELECT request_id, min(e.arrival_ns) - any_value(mine.arrival_ns) AS ahead_ns FROM mine JOIN "
        f"(SELECT request_id, arrival_ns FROM request WHERE {theirs} AND vantage = 'engine') e USING (request_id) GROUP BY request_id) "
        "SELECT quantile_disc(ahead_ns, 0.5) AS ahead_ns, count(*) / (SELECT greatest(count(*), 1) FROM mine) AS share FROM seen",
        [*my_params, vantage, *their_params],
    ).to_pylist()[0]
    return row["ahead_ns"] or 0, row["share"] or 0.0
