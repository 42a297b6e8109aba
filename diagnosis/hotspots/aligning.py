"""Rows of a window as the arrays of `Observed`: names are codes, and a decision knows the row of its request.

A decision is joined to the row of its request at the chosen worker. A prefix is the row's `prefix_hash`, else the first block of its
prompt. Unknown is NaN or -1.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, I64
from diagnosis.hotspots.columns import codes, names_in, numbers, seconds_after
from diagnosis.hotspots.observed import F32, Decisions, Decoded, Served, Steps

BY_LOAD = frozenset(
    ("roundrobin", "random", "leastloaded", "leastload", "leastrequest", "leastrequests", "leastconn", "leastconnections", "leastqueue",
     "shortestqueue", "leastbusytime", "leastlatency", "leastkvcache", "throughput", "poweroftwo", "poweroftwochoices", "p2c")
)  # fmt: skip
"""Policies that look at no prefix, as routers call them, without what stands between words: that they do not go by it is no fault of theirs."""


def goes_by_load(policy: str | None) -> bool:
    """Whether the name is that of a policy that looks at no prefix: `least-request`, `Round Robin` and `power_of_two` are."""
    return policy is not None and "".join(filter(str.isalnum, policy)).lower() in BY_LOAD


def served_by(table: pa.Table, workers: tuple[str, ...], origin: int) -> Served:
    prompt, cached = numbers(table["prompt_tokens"]), numbers(table["cached_tokens"])
    computed = numbers(table["computed_tokens"])
    computed = np.where(np.isfinite(computed), computed, prompt - cached)
    scheduled, first = (
        seconds_after(table["first_scheduled_ns"], origin),
        seconds_after(table["first_token_ns"], origin),
    )
    prefill = numbers(table["prefill_s"])
    return Served(
        table["request_id"].to_pylist(),
        codes(table["worker"], workers),
        seconds_after(table["arrival_ns"], origin),
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
    last, decode = seconds_after(table["last_token_ns"], origin), numbers(table["decode_s"])
    implied = np.maximum(last - first, 0.0)
    return Decoded(last, decode if np.isfinite(decode).any() else implied, numbers(table["output_tokens"]))


def decided(
    routes: pa.Table,
    beliefs: dict[str, F32],
    requests: pa.Table,
    workers: tuple[str, ...],
    prefixes: tuple[str, ...],
    tenants: tuple[str, ...],
    origin: int,
) -> Decisions:
    request = _joined(routes, requests)
    prefix = codes(routes["prefix_hash"].cast(pa.string()), prefixes)
    of_request = codes(requests["prefix"].cast(pa.string()), prefixes)
    tenant = codes(requests["tenant"], tenants)
    by_load = [name for name in names_in(routes["policy"]) if goes_by_load(name)]
    policy = np.asarray(pc.fill_null(pc.is_in(routes["policy"], value_set=pa.array(by_load, pa.string())), False))
    return Decisions(
        routes["request_id"].to_pylist(),
        seconds_after(routes["at_ns"], origin),
        codes(routes["chosen"], workers),
        request,
        np.where(prefix >= 0, prefix, _taken(of_request, request)),
        _taken(tenant, request),
        policy,
        beliefs["matched"],
        beliefs["load"],
        beliefs["score"],
        session=_taken(_sessions(requests), request),
    )


def _sessions(requests: pa.Table) -> I64:
    """[R] code of the conversation that each request is a turn of, -1 unknown."""
    return codes(requests["session_id"], names_in(requests["session_id"]))


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


def outcomes(
    requests: pa.Table, served: Served, workers: tuple[str, ...], prefixes: tuple[str, ...], tenants: tuple[str, ...]
) -> Decisions:
    """Each request as a decision of which only the outcome is known."""
    nothing = np.full((len(served), len(workers)), np.nan, dtype=np.float32)
    return Decisions(
        served.ids,
        served.arrival_s,
        served.worker,
        np.arange(len(served)),
        codes(requests["prefix"].cast(pa.string()), prefixes),
        codes(requests["tenant"], tenants),
        np.zeros(len(served), dtype=np.bool_),
        nothing,
        nothing,
        nothing,
    )


def steps_of(table: pa.Table, workers: tuple[str, ...], origin: int) -> Steps | None:
    if table.num_rows == 0:
        return None
    worker = codes(table["worker"], workers)
    table, worker = table.filter(pa.array(worker >= 0)), worker[worker >= 0]
    if table.num_rows == 0:
        return None
    # the store orders by name, the workers here are in natural order
    order = np.argsort(worker, kind="stable")
    told = {name: numbers(table[name])[order] for name in ("duration_s", "prefill_tokens", "decode_tokens")}
    return Steps(
        worker[order],
        seconds_after(table["at_ns"], origin)[order],
        **told,
        waiting=numbers(table["waiting"])[order],
        running=numbers(table["num_running"])[order],
    )
