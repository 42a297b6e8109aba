"""From the store to what `hotspots` judges: what the window's rows (`rows`) and gauges (`scraped`) tell, in one set of arrays.

The workers are those that the router could choose from; where no decision names candidates, those that tell of themselves or served.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.hotspots.aligning import decided, outcomes, served_by, steps_of
from diagnosis.hotspots.candidates import beliefs_of, candidates, listed_in
from diagnosis.hotspots.columns import names_in, natural
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.reachable import reached
from diagnosis.hotspots.rows import known_workers, request_rows, step_rows
from diagnosis.hotspots.scraped import scraped_loads, scraped_queues
from diagnosis.parallel import both
from diagnosis.windows import holds_nothing, shown
from engine_probe.errors import BadWindow
from store.evidence.lineage import window_sql
from store.interface import Store, Window

MAX_CELLS = 32_000_000
"""Decisions times workers that are judged at once: some 2 GB."""
MAX_SPAN_S = 24 * 3600.0
"""Longest window that is judged at once."""


def read(store: Store, window: Window) -> Observed:
    """What the window holds. Raises BadWindow where it holds neither decisions nor requests that name their worker."""
    _check_size(store, window)
    with store.sharing():
        (routes, order, flat, named), ((requests, vantage), steps) = both(
            partial(candidates, store, window),
            lambda: (request_rows(store, window), step_rows(store, window)),
        )
        has_routes = len(order) > 0
        if named is not None and len(named):
            # whom the router could choose from, not whoever else is there (decode workers, other pools)
            workers = names_in(routes["chosen"], named.dictionary)
        else:
            known, apart = known_workers(store, window)
            known |= set(names_in(requests["worker"], steps["worker"])) - apart
            workers = tuple(sorted({*known, *names_in(routes["chosen"])}, key=natural))
            requests = requests.filter(pc.is_in(requests["worker"], value_set=pa.array(workers, pa.string())))
    if not has_routes and requests.num_rows == 0:
        raise BadWindow(
            holds_nothing(
                store,
                window,
                f"window {shown(window)} holds no routing decisions and no requests that name their worker",
            ),
            window=str(window),
        )
    flat_routes, routes = routes, routes.drop_columns(["candidates"]).take(pa.array(order))
    bounds = pc.min_max(routes["at_ns"] if has_routes else requests["arrival_ns"])
    # from the first decision on: a window may begin long before anything came
    origin = int(bounds["min"].as_py())
    end_s = (int(bounds["max"].as_py()) + 1 - origin) / 1e9
    if end_s > MAX_SPAN_S:
        raise BadWindow(
            f"window {shown(window)} spans {end_s / 3600:,.0f} hours; at most {MAX_SPAN_S / 3600:.0f} are judged at once: "
            "give a shorter one, as START/END or NAME@START/END",
            window=str(window),
        )
    prefix_names = names_in(requests["prefix"].cast(pa.string()), routes["prefix_hash"].cast(pa.string()))
    tenants = names_in(requests["tenant"])
    served = served_by(requests, workers, origin)
    if flat is not None and named is not None:
        beliefs = beliefs_of(flat_routes["candidates"], flat, named, workers, order)
        decisions = decided(routes, beliefs, requests, workers, prefix_names, tenants, origin)
        lists, has_lists = listed_in(flat_routes["candidates"], named, workers, order), len(named) > 0
        policies = names_in(routes["policy"])
    else:
        decisions = outcomes(requests, served, workers, prefix_names, tenants)
        policies, lists, has_lists = (), None, False
    scraped = None if np.isfinite(decisions.load).any() else scraped_loads(store, window, workers, origin, decisions)
    decisions, pools = reached(store, window, workers, origin, decisions, lists, has_lists)
    told_steps = steps_of(steps, workers, origin)
    return Observed(
        window,
        origin,
        end_s,
        workers,
        prefix_names,
        tenants,
        policies,
        decisions if scraped is None else replace(decisions, load=scraped),
        served,
        told_steps,
        has_routes,
        vantage or "engine",
        gauges=scraped_queues(store, window, workers, origin) if told_steps is None else None,
        loads_scraped=scraped is not None,
        pools=pools,
    )


def _check_size(store: Store, window: Window) -> None:
    """Raises BadWindow where decisions times workers would not fit into memory."""
    condition, params = window_sql(window, "at_ns")
    count = int(store.query(f"SELECT count(*) FROM route WHERE {condition}", params).column(0)[0].as_py())
    # one row tells how many candidates there are: to look at each would be to read them all twice
    some = f"SELECT len(candidates) FROM route WHERE {condition} AND len(candidates) > 0 LIMIT 1"
    if count == 0:
        condition, params = window_sql(window, "arrival_ns")
        named = f"FROM request WHERE {condition} AND worker IS NOT NULL"
        count = int(store.query(f"SELECT count(*) {named}", params).column(0)[0].as_py())
        some = f"SELECT count(DISTINCT worker) {named}"
    widths = store.query(some, params).column(0).to_pylist()
    width = int(widths[0]) if widths else 1
    if count * width > MAX_CELLS:
        raise BadWindow(
            f"window {shown(window)} holds {count:,} decisions between {width:,} workers, more than are judged at once: give one of "
            f"about {MAX_CELLS / (count * width):.0%} of its length",
            window=str(window),
        )
