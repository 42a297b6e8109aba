"""Two clocks: how far the engine's is ahead of the client's, told by the requests that both of them saw.

Instants of two vantages are never subtracted to say how long something took. But which events of the engine belong to a
window, and which block was stored before a request came, are questions of its clock: where it is provably a second or more away,
the client's instants are moved to it first. A long way to the engine (a front end that holds requests back) proves nothing. Invariant: what moves is every instant of a request alike, so no duration changes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.loading.requests import INSTANTS, reach
from store.evidence.lineage import window_sql
from store.interface import Store, Window

APART_NS = 1_000_000_000
"""Clocks that must be farther apart than this, or tokens would have come before they were made, are set right before anything is joined."""
LOOKED_AT = 200
"""Requests that are looked at, the first: bounds are medians, and these are within a tenth of their ranks by so many."""
FEWEST_ROUTED = 20
"""Routed requests of a worker from which on its clock is looked at."""
"""Requests whose arrivals are compared: the first of the window."""


def engine_ahead_ns(store: Store, window: Window, vantage: str) -> int:
    """How far the engine's clock is ahead (ns) of the vantage's; 0 within a second, and where no request was seen by both."""
    if vantage == "engine":
        return 0
    least, most, share = _bounds(store, window, vantage, reach(window))
    if share < 0.5 and (window.start_ns is not None or window.end_ns is not None):
        least, most, share = _bounds(store, window, vantage, Window(run_id=window.run_id))
    if most is None:
        return 0
    if (least is not None and least > APART_NS) or most < -APART_NS:
        return (
            most if least is None else least
        )  # answers come back by a shorter way than requests go through the front end
    return 0


def least_routed_s(store: Store, window: Window) -> dict[str, float]:
    """By worker the time from a routing decision to the request's arrival there that 99 of 100 requests exceed, s; by two clocks."""
    routed, params = window_sql(window, "at_ns")
    if (
        store.query(f"SELECT count(*) FROM (SELECT 1 FROM route WHERE {routed} LIMIT 1)", params).column(0)[0].as_py()
        == 0
    ):
        return {}
    arrived, more = window_sql(window, "arrival_ns")
    table = store.query(
        "SELECT worker, quantile_disc(lag_ns, 0.01) / 1e9 AS least_s FROM (SELECT seen.worker, min(seen.arrival_ns - routed.at_ns) AS lag_ns "
        f"FROM (SELECT request_id, worker, arrival_ns FROM request WHERE {arrived} AND vantage = 'engine' AND worker IS NOT NULL) seen "
        f"JOIN (SELECT request_id, chosen, at_ns FROM route WHERE {routed}) routed ON seen.request_id = routed.request_id "
        f"AND seen.worker = routed.chosen GROUP BY seen.worker, seen.request_id) GROUP BY worker HAVING count(*) >= {FEWEST_ROUTED} ORDER BY worker",
        [*more, *params],
    )
    return {row["worker"]: float(row["least_s"]) for row in table.to_pylist()}


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


def _bounds(store: Store, window: Window, vantage: str, among: Window) -> tuple[int | None, int | None, float]:
    """(least and most that the engine's clock can be ahead, ns, None unknown; share of the requests that the engine saw `among`).

    No request reaches the engine before it was sent, no token its caller before it was made: so the one bound is what half of
    the first tokens (or ends) allow, the other what half of the arrivals do: one worker of several that is off moves nobody.
    """
    mine, my_params = window_sql(window, "arrival_ns")
    theirs, their_params = window_sql(among, "arrival_ns")
    told = "request_id, arrival_ns, coalesce(first_token_ns, end_ns) AS answered_ns"
    row = store.query(
        f"WITH mine AS (SELECT {told} FROM request WHERE {mine} AND vantage = ? ORDER BY arrival_ns, request_id LIMIT {LOOKED_AT}), "
        # an id that several requests have, which are not attempts of one, says nothing of any of them
        f"shared AS (SELECT request_id FROM request WHERE {mine} AND vantage = ? AND request_id IN (SELECT request_id FROM mine) "
        "GROUP BY request_id HAVING count(DISTINCT arrival_ns) > greatest(count(DISTINCT attempt), 1)), "
        "seen AS (SELECT request_id, min(e.arrival_ns) - any_value(mine.arrival_ns) AS arrived_ns, "
        "max(e.answered_ns) - any_value(mine.answered_ns) AS answered_ns FROM mine JOIN "
        f"(SELECT {told} FROM request WHERE {theirs} AND vantage = 'engine') e USING (request_id) "
        "WHERE request_id NOT IN (SELECT request_id FROM shared) GROUP BY request_id) "
        "SELECT -quantile_disc(-answered_ns, 0.5) AS least_ns, quantile_disc(arrived_ns, 0.5) AS most_ns, "
        "count(*) / (SELECT greatest(count(*), 1) FROM mine) AS share FROM seen",
        [*my_params, vantage, *my_params, vantage, *their_params],
    ).to_pylist()[0]
    return row["least_ns"], row["most_ns"], row["share"] or 0.0
