"""The course of one request in time: its instants and phases, what was done to it, the steps it lived through, marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from collector.reading.request_lineage import lineage_of
from collector.reading.request_queries import get_request, rows_of_request
from store.evidence.lineage import PAST_NS, window_sql
from store.interface import Store, Window
from store.sql_json import json_objects

MAX_STEPS: Final = 2_000
MAX_BLOCKS: Final = 2_000
MAX_MARKS: Final = 100
MAX_NEIGHBOURS: Final = 200


def timeline(store: Store, request_id: str, window: Window | None) -> dict[str, Any]:
    """The course of a request: its instants and phases at each vantage, and what happened to it and around it.

    `events` are in order of time; `truncated` names what was left out of. Instants of different vantages come from different clocks. Raises NotFound.
    """
    request = get_request(store, request_id, window)
    events: list[dict[str, Any]] = []
    for row in request["rows"]:
        events += _instants(row) + _spans(row)
    for route in request["routes"]:
        events.append(_event("routed", route, to=route["chosen"], policy=route["policy"], took_s=route["decision_s"]))
    for transfer in request["transfers"]:
        seconds = (transfer["wait_s"] or 0.0) + (transfer["wire_s"] or 0.0)
        start_ns = transfer["at_ns"] - round(seconds * 1e9)
        facts = {name: transfer[name] for name in ("source_worker", "target_worker", "num_bytes", "outcome", "reason")}
        events.append(_event("transfer", transfer, start_ns=start_ns, **facts))
    blocks, more_blocks = rows_of_request(store, "block", request_id, window, "", MAX_BLOCKS)
    for block in blocks:
        facts = {name: block[name] for name in ("block_hash", "tier", "reason", "age_s", "idle_s")}
        events.append(_event(f"block {block['change']}", block, **facts))
    events.sort(key=lambda event: (event["start_ns"], event["end_ns"]))
    steps, marks = _steps_around(store, request["rows"]), _marks_around(store, request["rows"])
    neighbours = _neighbours(store, request["rows"])
    cut = {
        "blocks": more_blocks,
        "steps": len(steps) > MAX_STEPS,
        "marks": len(marks) > MAX_MARKS,
        "neighbours": len(neighbours) > MAX_NEIGHBOURS,
    }
    return {
        "request_id": request_id,
        "rows": [_brief(row) for row in request["rows"]],
        "events": events,
        "steps": steps[:MAX_STEPS],
        "neighbours": neighbours[:MAX_NEIGHBOURS],
        "lineage": lineage_of(store, request["rows"]),
        "marks": marks[:MAX_MARKS],
        "truncated": [*request["truncated"], *(name for name, is_cut in cut.items() if is_cut)],
    }


def _instants(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    words = {
        "arrival_ns": "arrived",
        "first_scheduled_ns": "first scheduled",
        "first_token_ns": "first token",
        "last_token_ns": "last token",
        "end_ns": str(row["state"]),
    }
    return [
        _event(word, row, start_ns=row[column], end_ns=row[column])
        for column, word in words.items()
        if row[column] is not None
    ]


def _spans(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        _event(f"phase {span['phase']}", row, start_ns=span["start_ns"], end_ns=span["end_ns"], tokens=span["tokens"])
        for span in row["spans"] or ()
        if span["start_ns"] is not None and span["end_ns"] is not None
    ]


def _event(
    what: str, row: Mapping[str, Any], start_ns: int | None = None, end_ns: int | None = None, **facts: Any
) -> dict[str, Any]:
    end = row["at_ns"] if end_ns is None else end_ns
    return {
        "what": what,
        "start_ns": end if start_ns is None else start_ns,
        "end_ns": end,
        "vantage": row.get("vantage"),
        "worker": row.get("worker"),
        "attempt": row.get("attempt"),
        "facts": {name: value for name, value in facts.items() if value is not None},
    }


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "vantage",
        "attempt",
        "worker",
        "model",
        "state",
        "run_id",
        "arrival_ns",
        "end_ns",
        "ttft_s",
        "tpot_s",
        "e2e_s",
    )
    return {name: row[name] for name in names}


def _steps_around(store: Store, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps of the request's workers while it was there; more than MAX_STEPS where there are."""
    steps: list[dict[str, Any]] = []
    for row in rows:
        last_ns = row["last_token_ns"] or row["end_ns"] or row["at_ns"]
        if row["vantage"] != "engine" or row["worker"] is None:
            continue
        condition, params = window_sql(Window(row["arrival_ns"], last_ns + 1, row["run_id"]), "at_ns")
        sql = (
            "SELECT worker, step, at_ns, duration_s, num_running, num_waiting_prefill, prefill_tokens, decode_tokens, "
            "recomputed_tokens, num_preempted, blocks_used, blocks_total, blocks_evicted FROM step "
            f"WHERE worker = ? AND {condition} ORDER BY at_ns LIMIT {MAX_STEPS + 1}"
        )
        steps += json_objects(store.query(sql, [row["worker"], *params]))
        if len(steps) > MAX_STEPS:
            break
    return steps


def _neighbours(store: Store, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Other requests that its workers served meanwhile, the earliest first; more than MAX_NEIGHBOURS where there are."""
    found: list[dict[str, Any]] = []
    for row in rows:
        last_ns = row["last_token_ns"] or row["end_ns"] or row["at_ns"]
        if row["vantage"] != "engine" or row["worker"] is None:
            continue
        condition, params = window_sql(Window(row["arrival_ns"] - PAST_NS, last_ns + 1, row["run_id"]), "arrival_ns")
        sql = (
            "SELECT request_id, worker, tenant, arrival_ns, first_scheduled_ns, first_token_ns, last_token_ns, "
            "prompt_tokens, cached_tokens, output_tokens, num_preemptions FROM request "
            f"WHERE vantage = 'engine' AND worker = ? AND request_id <> ? AND {condition} "
            f"AND coalesce(last_token_ns, end_ns, at_ns) >= {row['arrival_ns']} "
            f"ORDER BY arrival_ns LIMIT {MAX_NEIGHBOURS + 1}"
        )
        found += json_objects(store.query(sql, [row["worker"], row["request_id"], *params]))
    return found


def _marks_around(store: Store, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Marks from a minute before the request to its end."""
    if not rows:
        return []
    first_ns = min(row["arrival_ns"] for row in rows) - 60_000_000_000
    last_ns = max(row["at_ns"] for row in rows) + 1
    condition, params = window_sql(Window(first_ns, last_ns, rows[0]["run_id"]), "at_ns")
    sql = f"SELECT at_ns, mark, worker, subject, text FROM mark WHERE {condition} ORDER BY at_ns LIMIT {MAX_MARKS + 1}"
    return json_objects(store.query(sql, params))
