"""From the store to what `hotspots` judges: the only module of this package that reads.

A decision is joined to the row of its request at the chosen worker. Warm-up requests and their decisions are left out; rows
that were delivered twice count once. A prefix is the row's `prefix_hash`, else the first block of its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, I64
from diagnosis.hotspots.observed import F32, Decisions, Decoded, Observed, Served, Steps
from diagnosis.parallel import both
from engine_probe.errors import BadWindow
from store.evidence.lineage import window_sql
from store.interface import Store, Window
from store.statements import literal

BY_LOAD = ("round_robin", "random", "least_loaded", "power_of_two")
"""Policies that look at no prefix: that they do not go by it is no fault of theirs."""
BELIEFS = {"matched": "matched_tokens", "load": "load", "score": "score"}
NOT_WARMUP = "coalesce(labels['phase'], '') <> 'warmup'"
MAX_CELLS = 32_000_000
"""Decisions times workers that are judged at once: some 2 GB."""
MAX_SPAN_S = 24 * 3600.0
"""Longest window that is judged at once."""
WARMUP_REACH_NS = 60_000_000_000
"""How far from the window a warm-up row of a request is looked for."""


def read(store: Store, window: Window) -> Observed:
    """What the window holds. Raises BadWindow where it holds neither decisions nor requests that name their worker."""
    _check_size(store, window)
    with store.sharing():
        (routes, order, flat, named), ((requests, vantage), steps) = both(
            partial(_candidates, store, window),
            lambda: (_requests(store, window), _step_rows(store, window)),
        )
        has_routes = len(order) > 0
        if named is not None and len(named):
            # whom the router could choose from, not whoever else is there (decode workers, other pools)
            workers = _names(routes["chosen"], named.dictionary)
        else:
            known, apart = _roles(store, window)
            known |= set(_names(requests["worker"], steps["worker"])) - apart
            workers = tuple(sorted({*known, *_names(routes["chosen"])}, key=_natural))
            requests = requests.filter(pc.is_in(requests["worker"], value_set=pa.array(workers, pa.string())))
    if not has_routes and requests.num_rows == 0:
        raise BadWindow(
            f"window {window} holds no routing decisions and no requests that name their worker; "
            "see `kvscope requests list` for what is stored",
            window=str(window),
        )
    flat_routes, routes = routes, routes.drop_columns(["candidates"]).take(pa.array(order))
    bounds = pc.min_max(routes["at_ns"] if has_routes else requests["arrival_ns"])
    # from the first decision on: a window may begin long before anything came
    origin = int(bounds["min"].as_py())
    end_s = (int(bounds["max"].as_py()) + 1 - origin) / 1e9
    if end_s > MAX_SPAN_S:
        raise BadWindow(
            f"window {window} spans {end_s / 3600:,.0f} hours; at most {MAX_SPAN_S / 3600:.0f} are judged at once: "
            "give a shorter one, as START/END or NAME@START/END",
            window=str(window),
        )
    prefix_names = _names(requests["prefix"].cast(pa.string()), routes["prefix_hash"].cast(pa.string()))
    tenants = _names(requests["tenant"])
    served = _served(requests, workers, origin)
    if flat is not None and named is not None:
        beliefs = _beliefs(flat_routes["candidates"], flat, named, workers, order)
        decisions = _decisions(routes, beliefs, requests, workers, prefix_names, tenants, origin)
        policies = _names(routes["policy"])
    else:
        decisions = _outcomes(requests, served, workers, prefix_names, tenants)
        policies = ()
    scraped = None if np.isfinite(decisions.load).any() else _scraped_loads(store, window, workers, origin, decisions)
    told_steps = _steps(steps, workers, origin)
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
        gauges=_gauges(store, window, workers, origin) if told_steps is None else None,
        loads_scraped=scraped is not None,
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
            f"window {window} holds {count:,} decisions between {width:,} workers, more than are judged at once: give one of "
            f"about {MAX_CELLS / (count * width):.0%} of its length",
            window=str(window),
        )


def _requests(store: Store, window: Window) -> tuple[pa.Table, str | None]:
    """Rows of the best vantage that names workers, each request once a worker and attempt, in order of arrival."""
    condition, params = window_sql(window, "arrival_ns")
    seen = (
        store.query(f"SELECT DISTINCT vantage FROM request WHERE {condition} AND worker IS NOT NULL", params)
        .column(0)
        .to_pylist()
    )
    vantage = next((name for name in ("engine", "router", "client") if name in seen), None)
    table = store.query(
        "SELECT request_id, worker, tenant, session_id, arrival_ns, first_scheduled_ns, first_token_ns, prompt_tokens, cached_tokens, "
        "computed_tokens, prefill_s, last_token_ns, decode_s, output_tokens, coalesce(prefix_hash, prompt_blocks[1]) AS prefix FROM request "
        f"WHERE {condition} AND vantage = ? AND worker IS NOT NULL AND {NOT_WARMUP} "
        "QUALIFY row_number() OVER (PARTITION BY request_id, worker, attempt ORDER BY first_token_ns) = 1 "
        "ORDER BY arrival_ns, request_id",
        [*params, vantage or ""],
    )
    return table, vantage


def _routes(store: Store, window: Window) -> tuple[pa.Table, I64]:
    """(decisions, their order by time without those of warm-up requests).

    They are put in order here: DuckDB would carry every candidate through its sort, which takes as long as to read them all.
    """
    condition, params = window_sql(window, "at_ns")
    wider = Window(
        None if window.start_ns is None else window.start_ns - WARMUP_REACH_NS,
        None if window.end_ns is None else window.end_ns + WARMUP_REACH_NS,
        window.run_id,
    )
    table = store.query(
        f"SELECT request_id, at_ns, policy, chosen, prefix_hash, candidates FROM route WHERE {condition} AND chosen IS NOT NULL",
        params,
    )
    warm, warm_params = window_sql(wider, "arrival_ns")
    warmup = store.query(
        f"SELECT DISTINCT request_id FROM request WHERE {warm} AND labels['phase'] = 'warmup'", warm_params
    )
    order = pc.sort_indices(table, [("at_ns", "ascending"), ("request_id", "ascending")])
    order = np.asarray(order).astype(np.int64)
    if warmup.num_rows:
        judged = ~np.asarray(pc.is_in(table["request_id"], value_set=warmup["request_id"].combine_chunks()))
        order = order[judged[order]]
    return table, order


def _candidates(store: Store, window: Window) -> tuple[pa.Table, I64, pa.StructArray | None, pa.DictionaryArray | None]:
    """(decisions, their order, their candidates one after the other, whom these name)."""
    routes, order = _routes(store, window)
    if not len(order):
        return routes, order, None, None
    flat = pc.list_flatten(routes["candidates"]).combine_chunks()
    return routes, order, flat, pc.struct_field(flat, "worker").dictionary_encode()


def _step_rows(store: Store, window: Window) -> pa.Table:
    condition, params = window_sql(window, "at_ns")
    return store.query(
        "SELECT worker, at_ns, duration_s, prefill_tokens, decode_tokens, num_running, "
        f"num_waiting_prefill AS waiting FROM step WHERE {condition} AND worker IS NOT NULL ORDER BY worker, at_ns",
        params,
    )


def _samples(store: Store, window: Window, names: tuple[str, ...], workers: tuple[str, ...]) -> pa.Table:
    """(name, code, at_ns, value) of these gauges of these workers, by worker and time."""
    condition, params = window_sql(window, "at_ns")
    table = store.query(
        f"SELECT name, worker, at_ns, max(value) AS value FROM sample WHERE {condition} AND worker IS NOT NULL "
        f"AND name IN ({', '.join(map(literal, names))}) GROUP BY ALL ORDER BY worker, at_ns",
        params,
    )
    code = _codes(table["worker"], workers)
    table = table.append_column("code", pa.array(code)).filter(pa.array(code >= 0))
    return table.take(pc.sort_indices(table, [("code", "ascending"), ("at_ns", "ascending")]))


def _scraped_loads(
    store: Store, window: Window, workers: tuple[str, ...], origin: int, decisions: Decisions
) -> F32 | None:
    """[N, K] the router's load gauge of each worker at each decision, the last value before it; None where it was not scraped."""
    table = _samples(store, window, ("router_load",), workers)
    if table.num_rows == 0 or len(decisions) == 0:
        return None
    code, at, value = np.asarray(table["code"]), _seconds(table["at_ns"], origin), _numbers(table["value"])
    loads = np.full((len(decisions), len(workers)), np.nan, dtype=np.float32)
    for worker in np.unique(code).tolist():
        mine = np.flatnonzero(code == worker)
        last = np.searchsorted(at[mine], decisions.at_s, "right") - 1
        loads[last >= 0, worker] = value[mine][last[last >= 0]]
    return loads


def _gauges(store: Store, window: Window, workers: tuple[str, ...], origin: int) -> Steps | None:
    """Scraped queues in the form of steps that tell nothing else; None where none was scraped."""
    table = _samples(store, window, ("requests_waiting",), workers)
    if table.num_rows == 0:
        return None
    unknown = np.full(table.num_rows, np.nan)
    return Steps(
        np.asarray(table["code"]).astype(np.int64),
        _seconds(table["at_ns"], origin),
        unknown,
        unknown,
        unknown,
        _numbers(table["value"]),
        unknown,
    )


def _roles(store: Store, window: Window) -> tuple[set[str], set[str]]:
    """(workers that tell of themselves in the window, idle ones too; those that no prompt is sent to)."""
    condition, params = window_sql(window, "at_ns")
    alive = store.query(
        f"SELECT DISTINCT worker FROM sample WHERE {condition} AND worker IS NOT NULL "
        f"AND name IN ('requests_running', 'requests_waiting', 'router_load')",
        params,
    )
    past, past_params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    roles = store.query(
        f"SELECT worker, arg_max(role, at_ns) AS role, max(at_ns) AS at_ns FROM worker WHERE {past} AND worker IS NOT NULL "
        "GROUP BY worker",
        past_params,
    ).to_pylist()
    # a live store remembers workers that are long gone
    known = {
        row["worker"]
        for row in roles
        if window.run_id is not None or window.start_ns is None or row["at_ns"] >= window.start_ns
    }
    apart = {row["worker"] for row in roles if row["role"] in ("decode", "router")}
    return (known | set(alive["worker"].to_pylist())) - apart, apart


def _names(*columns: pa.ChunkedArray | pa.Array | None) -> tuple[str, ...]:
    names: set[str] = set()
    for column in columns:
        if column is not None:
            names.update(name for name in pc.unique(column).to_pylist() if name is not None)
    return tuple(sorted(names, key=_natural))


def _natural(name: str) -> tuple[str, int, str]:
    """w2 before w10."""
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return head, int(digits) if digits else -1, name


def _codes(column: pa.ChunkedArray | pa.Array, names: Iterable[str]) -> I64:
    found = pc.index_in(column, value_set=pa.array(list(names), type=pa.string()))
    found = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    return np.asarray(pc.fill_null(found, -1)).astype(np.int64)


def _numbers(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _floats(column: pa.Array) -> F32:
    """As float32, unknown NaN."""
    known = column if column.null_count == 0 else column.cast(pa.float64())
    return np.asarray(known.to_numpy(zero_copy_only=False)).astype(np.float32)


def _seconds(column: pa.ChunkedArray, origin: int) -> np.ndarray:
    """Seconds after the origin; the difference is taken in whole nanoseconds."""
    return _numbers(pc.subtract(column, pa.scalar(origin, pa.int64()))) / 1e9


def _served(table: pa.Table, workers: tuple[str, ...], origin: int) -> Served:
    prompt, cached = _numbers(table["prompt_tokens"]), _numbers(table["cached_tokens"])
    computed = _numbers(table["computed_tokens"])
    computed = np.where(np.isfinite(computed), computed, prompt - cached)
    scheduled, first = _seconds(table["first_scheduled_ns"], origin), _seconds(table["first_token_ns"], origin)
    prefill = _numbers(table["prefill_s"])
    return Served(
        table["request_id"].to_pylist(),
        _codes(table["worker"], workers),
        _seconds(table["arrival_ns"], origin),
        scheduled,
        first,
        prompt,
        np.where(np.isfinite(cached), cached, prompt - computed),
        computed,
        prefill
        if np.isfinite(prefill).any()
        else np.maximum(first - scheduled, 0.0),  # as diagnosis has it: implied.py
        _decoded(table, first, origin),
    )


def _decoded(table: pa.Table, first: F64, origin: int) -> Decoded:
    last, decode = _seconds(table["last_token_ns"], origin), _numbers(table["decode_s"])
    implied = np.maximum(last - first, 0.0)
    return Decoded(last, decode if np.isfinite(decode).any() else implied, _numbers(table["output_tokens"]))


def _decisions(
    routes: pa.Table,
    beliefs: dict[str, F32],
    requests: pa.Table,
    workers: tuple[str, ...],
    prefixes: tuple[str, ...],
    tenants: tuple[str, ...],
    origin: int,
) -> Decisions:
    request = _joined(routes, requests)
    prefix = _codes(routes["prefix_hash"].cast(pa.string()), prefixes)
    of_request = _codes(requests["prefix"].cast(pa.string()), prefixes)
    tenant = _codes(requests["tenant"], tenants)
    policy = np.asarray(pc.fill_null(pc.is_in(routes["policy"], value_set=pa.array(BY_LOAD)), False))
    return Decisions(
        routes["request_id"].to_pylist(),
        _seconds(routes["at_ns"], origin),
        _codes(routes["chosen"], workers),
        request,
        np.where(prefix >= 0, prefix, _taken(of_request, request)),
        _taken(tenant, request),
        policy,
        **beliefs,
        session=_taken(_sessions(requests), request),
    )


def _sessions(requests: pa.Table) -> I64:
    """[R] code of the conversation that each request is a turn of, -1 unknown."""
    return _codes(requests["session_id"], _names(requests["session_id"]))


def _beliefs(
    lists: pa.ChunkedArray, flat: pa.StructArray, named: pa.DictionaryArray, workers: tuple[str, ...], order: I64
) -> dict[str, F32]:
    """[N, K] of each belief, decisions in this order; a worker that was no candidate has none. named: the candidates' workers."""
    return {name: grid[order] for name, grid in _grids(lists, flat, named, workers).items()}


def _grids(
    lists: pa.ChunkedArray, flat: pa.StructArray, named: pa.DictionaryArray, workers: tuple[str, ...]
) -> dict[str, F32]:
    """The same in the order of the lists. named: the candidates' workers [len(flat)]."""
    num, size = len(lists), len(workers)
    places = np.append(_codes(named.dictionary, workers), -1)
    columns = places[np.asarray(pc.fill_null(named.indices, len(places) - 1))]
    if len(flat) == num * size and num and (columns.reshape(num, size) == columns[:size]).all():
        # everybody was a candidate every time, in one order: nothing is to be placed
        order = np.argsort(columns[:size])
        if (columns[:size][order] == np.arange(size)).all():
            grids = {name: _floats(pc.struct_field(flat, field)).reshape(num, size) for name, field in BELIEFS.items()}
            in_order = bool((order == np.arange(size)).all())
            return grids if in_order else {name: grid[:, order] for name, grid in grids.items()}
    rows = np.asarray(pc.list_parent_indices(lists).combine_chunks()).astype(np.int64)
    known = columns >= 0
    beliefs: dict[str, F32] = {}
    for name, field in BELIEFS.items():
        values = np.full((num, size), np.nan, dtype=np.float32)
        values[rows[known], columns[known]] = _floats(pc.struct_field(flat, field))[known]
        beliefs[name] = values
    return beliefs


def _joined(routes: pa.Table, requests: pa.Table) -> I64:
    """Row of the request at the chosen worker, -1 where none is stored."""
    if requests.num_rows == 0:
        return np.full(routes.num_rows, -1, dtype=np.int64)
    ours = pc.binary_join_element_wise(routes["request_id"], routes["chosen"], "\x1f")
    theirs = pc.binary_join_element_wise(requests["request_id"], requests["worker"], "\x1f")
    found = pc.index_in(ours, value_set=theirs.combine_chunks())
    return np.asarray(pc.fill_null(found.combine_chunks(), -1)).astype(np.int64)


def _taken(values: I64, index: I64) -> I64:
    if len(values) == 0:
        return np.full(len(index), -1, dtype=np.int64)
    return np.where(index >= 0, values[np.maximum(index, 0)], -1)


def _outcomes(
    requests: pa.Table, served: Served, workers: tuple[str, ...], prefixes: tuple[str, ...], tenants: tuple[str, ...]
) -> Decisions:
    """Each request as a decision of which only the outcome is known."""
    nothing = np.full((len(served), len(workers)), np.nan, dtype=np.float32)
    return Decisions(
        served.ids,
        served.arrival_s,
        served.worker,
        np.arange(len(served)),
        _codes(requests["prefix"].cast(pa.string()), prefixes),
        _codes(requests["tenant"], tenants),
        np.zeros(len(served), dtype=np.bool_),
        nothing,
        nothing,
        nothing,
    )


def _steps(table: pa.Table, workers: tuple[str, ...], origin: int) -> Steps | None:
    if table.num_rows == 0:
        return None
    worker = _codes(table["worker"], workers)
    table, worker = table.filter(pa.array(worker >= 0)), worker[worker >= 0]
    if table.num_rows == 0:
        return None
    # the store orders by name, the workers here are in natural order
    order = np.argsort(worker, kind="stable")
    numbers = {name: _numbers(table[name])[order] for name in ("duration_s", "prefill_tokens", "decode_tokens")}
    return Steps(
        worker[order],
        _seconds(table["at_ns"], origin)[order],
        **numbers,
        waiting=_numbers(table["waiting"])[order],
        running=_numbers(table["num_running"])[order],
    )
