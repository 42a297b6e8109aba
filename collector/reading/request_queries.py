"""Requests for people and programs: a sorted page of them, and one with all that was told of it.

The HTTP API and `kvscope requests` ask these same functions. Metrics are those of `store/metrics.py`.
A page is continued by its last row (keyset), not by a number of rows to skip: rows that arrive meanwhile shift nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from collector.reading.name_patterns import ALL, check_pattern
from engine_probe.errors import NotFound, UsageError
from store.evidence.lineage import window_sql
from store.interface import Store, Window
from store.metrics import metric
from store.sql_json import json_objects

FILTERS: Final = (
    "worker",
    "model",
    "tenant",
    "workload",
    "priority_class",
    "vantage",
    "state",
    "session_id",
    "trace_id",
    "finish_reason",
)
"""Columns that a list can be narrowed by, each to one value."""

SORTS: Final[dict[str, str]] = {
    "arrival": "arrival_ns",
    "ttft": metric("ttft").expression(),
    "tpot": metric("tpot").expression(),
    "e2e": metric("e2e").expression(),
    "queue": "queue_s",
    "prefill": "prefill_s",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "cached_tokens": "cached_tokens",
    "preemptions": "num_preemptions",
}
"""Name of an order -> SQL. Where a value is unknown the row comes last."""

_LISTED: Final = """request_id, attempt, vantage, state, engine, worker, model, tenant, workload, session_id, turn, run_id,
    arrival_ns, first_token_ns, last_token_ns, end_ns, queue_s, prefill_s, decode_s, stalled_s, prompt_tokens,
    cached_tokens, output_tokens, num_preemptions, finish_reason, http_status, error"""
_METRICS: Final = ", ".join(f"{metric(name).expression()} AS {name}_s" for name in ("ttft", "tpot", "e2e"))
_TIE: Final = {
    "arrival_ns": "arrival_ns",
    "request_id": "request_id",
    "vantage": "vantage",
    "worker": "coalesce(worker, '')",
    "attempt": "coalesce(attempt, 0)",
    "_at_ns": "at_ns",
    "run_id": "coalesce(run_id, '')",
}
"""Column of an answer -> SQL: what puts rows of the same key into one fixed order."""
_I64: Final = range(-(2**63), 2**63)
_TIE_TYPES: Final = (int, str, str, str, int, int, str)
"""Types of these columns, in their order."""
_KNOWN_IN_TIE: Final[Mapping[str, Any]] = {"worker": "", "attempt": 0, "run_id": ""}
_LAST: Final = 1e300
MAX_ROWS: Final = 1_000
"""Most rows of a kind that are told of one request; more mean that its id was used again and again."""


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Which requests, in which order, from where on.

    equal      column of FILTERS -> its value
    at_least   order of SORTS -> least value (s, tokens or times)
    matches    column of `name_patterns.COLUMNS` -> pattern of its value
    """

    window: Window
    equal: Mapping[str, str]
    at_least: Mapping[str, float]
    sort: str = "arrival"
    descending: bool = True
    limit: int = 100
    cursor: str | None = None
    matches: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page:
    """Rows, and the cursor of the next page; None where this is the last."""

    rows: list[dict[str, Any]]
    next_cursor: str | None


def list_requests(store: Store, wanted: RequestFilter) -> Page:
    """A page of requests. Raises UsageError for an unknown order, a pattern that is none, or a cursor that is not one of this order."""
    if wanted.sort not in SORTS:
        raise UsageError(f"there is no order {wanted.sort!r}; the orders are {', '.join(SORTS)}", sort=wanted.sort)
    condition, params = window_sql(wanted.window, "arrival_ns")
    conditions = [condition]
    for column, value in wanted.equal.items():
        if column not in FILTERS:
            raise UsageError(f"requests cannot be filtered by {column!r}; only by {', '.join(FILTERS)}", column=column)
        conditions.append(f"{column} = ?")
        params.append(value)
    for column, pattern in wanted.matches.items():
        if pattern != ALL:
            check_pattern(store, pattern)
            conditions.append(f"regexp_full_match(coalesce({column}, ''), ?)")
            params.append(pattern)
    for name, least in wanted.at_least.items():
        conditions.append(f"{SORTS[name]} >= ?")
        params.append(least)
    direction, sign = ("DESC", "<") if wanted.descending else ("ASC", ">")
    key = SORTS[wanted.sort]
    if wanted.sort != "arrival":
        key = f"coalesce({key}, {-1.0 if wanted.descending else _LAST})"
    order = (key, *_TIE.values())
    if wanted.cursor is not None:
        place = _read_cursor(wanted)
        # the key alone first: DuckDB skips what lies beyond it by the statistics of its row groups, as it cannot by a tuple
        conditions.append(f"{key} {sign}= ?")
        conditions.append(f"({', '.join(order)}) {sign} ({', '.join('?' * len(place))})")
        params += [place[0], *place]
    order_by = ", ".join(f"{part} {direction}" for part in order)
    sql = (
        f"SELECT {_LISTED}, {_METRICS}, {key} AS _key, at_ns AS _at_ns FROM request "
        f"WHERE {' AND '.join(conditions)} ORDER BY {order_by} LIMIT {wanted.limit + 1}"
    )
    rows = json_objects(store.query(sql, params))
    more = len(rows) > wanted.limit
    rows = rows[: wanted.limit]
    cursor = _write_cursor(wanted, rows[-1]) if more else None
    for row in rows:
        del row["_key"], row["_at_ns"]
    return Page(rows, cursor)


def get_request(store: Store, request_id: str, window: Window | None) -> dict[str, Any]:
    """All rows of a request (vantages, attempts, workers), its routing decisions and transfers. Raises NotFound.

    `truncated` names the lists of which rows were left out.
    """
    found: dict[str, Any] = {"request_id": request_id, "truncated": []}
    for name, kind in (("rows", "request"), ("routes", "route"), ("transfers", "transfer")):
        columns = f", {_METRICS}" if kind == "request" else ""
        found[name], more = rows_of_request(store, kind, request_id, window, columns)
        found["truncated"] += [name] if more else []
    if not any(found[name] for name in ("rows", "routes", "transfers")):
        where = "" if window is None else f" in {window}"
        raise NotFound(f"no row of request {request_id!r} is stored{where}", request_id=request_id)
    return found


def rows_of_request(
    store: Store, kind: str, request_id: str, window: Window | None, columns: str, limit: int = MAX_ROWS
) -> tuple[list[dict[str, Any]], bool]:
    """Rows of a kind that name the request, the earliest first, and whether there are more than `limit`."""
    instant = "arrival_ns" if kind == "request" else "at_ns"
    condition, params = ("true", []) if window is None else window_sql(window, instant)
    sql = (
        f'SELECT * EXCLUDE (received_ns){columns} FROM "{kind}" WHERE request_id = ? AND {condition} '
        f"ORDER BY at_ns LIMIT {limit + 1}"
    )
    found = json_objects(store.query(sql, [request_id, *params]))
    return found[:limit], len(found) > limit


def _write_cursor(wanted: RequestFilter, row: Mapping[str, Any]) -> str:
    tie = [_KNOWN_IN_TIE[name] if row[name] is None else row[name] for name in _TIE]
    place = [wanted.sort, wanted.descending, row["_key"], *tie]
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def _read_cursor(wanted: RequestFilter) -> list[Any]:
    text = wanted.cursor or ""
    try:
        place = msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        sort, descending, *values = place
        for value, types in zip(values, (int | float, *_TIE_TYPES), strict=True):
            if (
                not isinstance(value, types)
                or isinstance(value, bool)
                or (isinstance(value, int) and value not in _I64)
            ):
                raise ValueError("not the parts of a place")
    except (binascii.Error, msgspec.DecodeError, RecursionError, ValueError, TypeError, IndexError) as error:
        raise UsageError("the cursor is none that this API gave; start without one", cursor=text[:100]) from error
    if (sort, descending) != (wanted.sort, wanted.descending):
        raise UsageError(f"the cursor belongs to another order ({sort}); start without one", cursor=text[:100])
    return list(values)
