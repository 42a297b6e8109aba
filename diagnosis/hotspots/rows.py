"""What the store is asked of a window: its requests, its routing decisions, its steps, and which workers there are.

Warm-up requests and their decisions are left out; rows that were delivered twice count once.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.delivered_twice import again
from diagnosis.facts import I64
from store.evidence.lineage import window_sql
from store.interface import Store, Window

NOT_WARMUP = "coalesce(labels['phase'], '') <> 'warmup'"
STEP_SAYS = ("worker", "duration_s", "prefill_tokens", "decode_tokens", "num_running", "waiting")
"""Of two steps of one worker that ended at one instant and agree in all of it, one was delivered twice."""
WARMUP_REACH_NS = 60_000_000_000
"""How far from the window a warm-up row of a request is looked for."""


def request_rows(store: Store, window: Window) -> tuple[pa.Table, str | None]:
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


def route_rows(store: Store, window: Window) -> tuple[pa.Table, I64]:
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
    return table, order[~again(table, "at_ns", ("request_id", "chosen"), order)]


def step_rows(store: Store, window: Window) -> pa.Table:
    """Steps of named workers, by worker and time, each once."""
    condition, params = window_sql(window, "at_ns")
    table = store.query(
        "SELECT worker, at_ns, duration_s, prefill_tokens, decode_tokens, num_running, "
        f"num_waiting_prefill AS waiting FROM step WHERE {condition} AND worker IS NOT NULL ORDER BY worker, at_ns",
        params,
    )
    twice = again(table, "at_ns", STEP_SAYS)
    return table.filter(pa.array(~twice)) if twice.any() else table


def known_workers(store: Store, window: Window) -> tuple[set[str], set[str]]:
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
