"""Moves of KV between two workers: transfers as they were recorded, and those that requests alone tell of.

Idea: who records no transfer may tell a request's seconds on the wire and of orchestration all the same, or one row of it at a prefill
worker and one at a decode worker. That is a hand-over too. What lies between the two rows is then not before the engine.

Invariant: a request with a recorded transfer has no other; seconds that nobody tells stay unknown.
"""

from __future__ import annotations

from typing import Any, Final

from diagnosis.loading.requests import reach
from store.evidence.lineage import window_sql
from store.interface import Store, Window

BETWEEN: Final = (
    "source_worker IS NOT NULL AND target_worker IS NOT NULL AND source_worker <> target_worker "
    "AND NOT starts_with(source_worker, target_worker || '/') AND NOT starts_with(target_worker, source_worker || '/')"
)
"""SQL: between two workers; a tier load comes from the worker's own tier."""


COLUMNS: Final = "request_id, source_worker, target_worker, at_ns, num_bytes, outcome, wait_s, wire_s"


def moves(store: Store, window: Window) -> tuple[str, list[Any]] | None:
    """A query, and its parameters, of the window's moves: COLUMNS and whether each was `recorded`; None where there is none.

    Of a request that only tells seconds the move ends where they have passed since its prefill, else where it was first scheduled.
    """
    sent, sent_params = window_sql(reach(window), "at_ns")
    recorded = f"SELECT {COLUMNS}, true AS recorded FROM transfer WHERE {sent} AND {BETWEEN}"
    if not _are_told(store, window):
        is_there = store.query(f"SELECT 1 FROM transfer WHERE {sent} AND {BETWEEN} LIMIT 1", sent_params).num_rows
        return (recorded, sent_params) if is_there else None
    legs, leg_params = window_sql(reach(window), "arrival_ns")
    roles, role_params = _roles(window)
    passed = "CAST(1e9 * (coalesce(wire_s, 0) + coalesce(wait_s, 0)) AS BIGINT)"
    return (
        f"WITH sent AS ({recorded}), roles AS ({roles}), "
        "legs AS (SELECT request_id, arrival_ns, worker, first_token_ns, first_scheduled_ns, kv_transfer_s, handover_s, role "
        f"FROM (SELECT * FROM request WHERE {legs} AND vantage = 'engine' AND worker IS NOT NULL) LEFT JOIN roles USING (worker) "
        "WHERE request_id NOT IN (SELECT request_id FROM sent WHERE request_id IS NOT NULL)), "
        "told AS (SELECT request_id, arg_min(worker, arrival_ns) AS source_worker, arg_max(worker, arrival_ns) AS target_worker, "
        "min(first_token_ns) AS prefilled_ns, arg_max(first_scheduled_ns, arrival_ns) AS begun_ns, max(kv_transfer_s) AS wire_s, "
        f"max(handover_s) AS wait_s, {_TWO} AS two FROM legs GROUP BY request_id "
        f"HAVING max(kv_transfer_s) > 0 OR max(handover_s) > 0 OR {_TWO}) "
        "SELECT * FROM sent UNION ALL SELECT request_id, source_worker, target_worker, "
        f"CASE WHEN two AND (wire_s > 0 OR wait_s > 0) THEN prefilled_ns + {passed} ELSE begun_ns END, "
        "NULL, NULL, wait_s, wire_s, false FROM told WHERE begun_ns IS NOT NULL",
        [*sent_params, *role_params, *leg_params],
    )


_TWO: Final = "(count(DISTINCT worker) = 2 AND bool_or(role = 'prefill') AND bool_or(role = 'decode'))"
"""SQL: a request has a row at a worker that prefills and one at another that decodes."""


def _roles(window: Window) -> tuple[str, list[Any]]:
    """The last role that each worker told up to the window's end."""
    condition, params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    return (
        f"SELECT worker, arg_max(role, at_ns) AS role FROM worker WHERE {condition} AND role IS NOT NULL GROUP BY worker",
        params,
    )


def _are_told(store: Store, window: Window) -> bool:
    """Whether requests tell of moves, or workers that there are such who prefill and such who decode."""
    legs, params = window_sql(reach(window), "arrival_ns")
    told = (
        f"SELECT 1 FROM request WHERE {legs} AND vantage = 'engine' AND (kv_transfer_s > 0 OR handover_s > 0) LIMIT 1"
    )
    if store.query(told, params).num_rows:
        return True
    roles = store.query(*_roles(window))["role"].to_pylist()
    return {"prefill", "decode"} <= set(roles)
