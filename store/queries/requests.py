"""Requests: a filtered, sorted list page by page, and one request with everything that is known of it.

Paging is by key: a page begins after the last row of the one before, so rows that arrive meanwhile shift nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import msgspec
import pyarrow as pa
import sqlalchemy as sa

from engine_probe.errors import UsageError
from engine_probe.events import KINDS
from store.interface import Store, Window
from store.metrics import METRICS
from store.statements import in_window, render
from store.tables import TABLES

REQUEST: Final = TABLES["request"]
COMPUTED: Final = ("ttft_s", "tpot_s", "e2e_token_s", "e2e_stream_s")
"""Metrics that stand as columns after the contract's scalars."""
SCALARS: Final = tuple(c.name for c in KINDS["request"] if "<" not in c.type)
SORTS: Final = (
    "arrival_ns",
    "end_ns",
    *COMPUTED,
    *(name for name in SCALARS if name.endswith(("_s", "_tokens"))),
    "num_preemptions",
)
_TIE: Final = ("request_id", "vantage", "attempt", "worker", "at_ns", "received_ns")
"""What tells rows of the same sort value apart."""


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Only requests with these values; None: any. `min_*`: at least so long (s)."""

    vantage: str | None = None
    state: str | None = None
    worker: str | None = None
    model: str | None = None
    tenant: str | None = None
    workload: str | None = None
    priority_class: str | None = None
    session_id: str | None = None
    trace_id: str | None = None
    request_id: str | None = None
    min_ttft_s: float | None = None
    min_tpot_s: float | None = None
    min_e2e_token_s: float | None = None
    preempted: bool | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Rows, and where the next page begins; None: this was the last."""

    rows: pa.Table
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class RequestDetail:
    """One request: its rows of every vantage, attempt and worker, and what happened around it.

    steps       steps of its workers from its arrival to its end
    blocks      events of its own blocks (by request, or by hash) from `lookback_s` before it to its end, newest first
    """

    requests: pa.Table
    steps: pa.Table
    blocks: pa.Table
    routes: pa.Table
    transfers: pa.Table
    marks: pa.Table


def list_requests(
    store: Store,
    window: Window,
    where: RequestFilter | None = None,
    *,
    sort: str = "arrival_ns",
    descending: bool = True,
    cursor: str | None = None,
    limit: int = 100,
) -> Page:
    """A page of requests: the contract's scalar columns and ttft_s, tpot_s, e2e_token_s, e2e_stream_s.

    Unknown sort values come last. Raises UsageError for an unknown sort, a foreign cursor or a limit below 1.
    """
    if sort not in SORTS:
        raise UsageError(f"Requests cannot be sorted by {sort!r}. Sort by {', '.join(SORTS)}.", sort=sort)
    if limit < 1:
        raise UsageError(f"A page of {limit} rows is none. Ask for at least 1.", limit=limit)
    key = _expression(sort)
    ties = [_tie(name) for name in _TIE]
    columns = [REQUEST.c[name] for name in SCALARS] + [_expression(name).label(name) for name in COMPUTED]
    statement = sa.select(*columns, *(tie.label(f"tie_{name}") for name, tie in zip(_TIE, ties, strict=True)))
    statement = statement.where(*in_window("request", window), *_conditions(where or RequestFilter()))
    if cursor is not None:
        statement = statement.where(_after(key, ties, descending, _decode(cursor, sort, descending)))
    order = (key.desc() if descending else key.asc()).nulls_last()
    sql, params = render(statement.order_by(order, *ties).limit(limit + 1))
    found = store.query(sql, params)
    shown = found.slice(0, limit)
    names = [name for name in found.column_names if not name.startswith("tie_")]
    following = None
    if found.num_rows > limit:
        last = shown.slice(limit - 1).to_pylist()[0]
        following = _encode(sort, descending, [last[sort], *(last[f"tie_{name}"] for name in _TIE)])
    return Page(shown.select(names), following)


def get_request(
    store: Store,
    request_id: str,
    *,
    run_id: str | None = None,
    lookback_s: float = 3600.0,
    max_steps: int = 10_000,
    max_blocks: int = 10_000,
) -> RequestDetail | None:
    """Everything about one request of a run (None: live); None where there is no such request."""
    rows = store.rows(
        "request", Window(run_id=run_id), where="request_id = ?", params=[request_id], order_by="arrival_ns"
    )
    if rows.num_rows == 0:
        return None
    first = min(rows.column("arrival_ns").to_pylist())
    last = max(value for name in ("at_ns", "end_ns") for value in rows.column(name).to_pylist() if value is not None)
    span = Window(first, last + 1, run_id)
    # A step ends at its instant, so the step that the request ended in may end a little later than the request.
    around = Window(first, last + 1_000_000_000, run_id)
    workers = sorted({name for name in rows.column("worker").to_pylist() if name is not None})
    hashes = sorted({value for blocks in rows.column("prompt_blocks").to_pylist() for value in blocks or ()})
    by_id: dict[str, Any] = {"where": "request_id = ?", "params": [request_id], "order_by": "at_ns"}
    return RequestDetail(
        requests=rows,
        steps=store.rows(
            "step", around, where="worker IN (SELECT unnest(?))", params=[workers], order_by="at_ns", limit=max_steps
        ),
        blocks=store.rows(
            "block",
            Window(first - round(lookback_s * 1e9), last + 1, run_id),
            where="request_id = ? OR block_hash IN (SELECT unnest(?::UBIGINT[]))",
            params=[request_id, hashes],
            order_by="at_ns DESC",
            limit=max_blocks,
        ),
        routes=store.rows("route", Window(run_id=run_id), **by_id),
        transfers=store.rows("transfer", Window(run_id=run_id), **by_id),
        marks=store.rows("mark", span, order_by="at_ns"),
    )


def _expression(name: str) -> sa.ColumnElement[Any]:
    if name in COMPUTED:
        return sa.literal_column(METRICS[name].expression("request"))
    return REQUEST.c[name]


def _tie(name: str) -> sa.ColumnElement[Any]:
    column = REQUEST.c[name]
    if name == "worker":
        return sa.func.coalesce(column, "")
    return sa.func.coalesce(column, -1) if name == "attempt" else column


def _conditions(where: RequestFilter) -> list[sa.ColumnElement[bool]]:
    conditions: list[sa.ColumnElement[bool]] = []
    for field in fields(where):
        value = getattr(where, field.name)
        if value is None:
            continue
        if field.name == "preempted":
            preempted = sa.func.coalesce(REQUEST.c.num_preemptions, 0) > 0
            conditions.append(preempted if value else sa.not_(preempted))
        elif field.name.startswith("min_"):
            conditions.append(_expression(field.name.removeprefix("min_")) >= value)
        else:
            conditions.append(REQUEST.c[field.name] == value)
    return conditions


def _after(
    key: sa.ColumnElement[Any], ties: Sequence[sa.ColumnElement[Any]], descending: bool, position: list[Any]
) -> sa.ColumnElement[bool]:
    """Rows that come after the position, with unknown keys last."""
    value, *tie = position
    later_tie = sa.tuple_(*ties) > sa.tuple_(*(sa.literal(part) for part in tie))
    if value is None:
        return sa.and_(key.is_(None), later_tie)
    beyond = key < value if descending else key > value
    return sa.or_(beyond, sa.and_(key == value, later_tie), key.is_(None))


def _encode(sort: str, descending: bool, position: list[Any]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode([sort, descending, *position])).decode()


def _decode(cursor: str, sort: str, descending: bool) -> list[Any]:
    try:
        found = msgspec.json.decode(base64.urlsafe_b64decode(cursor.encode()))
    except (ValueError, binascii.Error, msgspec.DecodeError) as error:
        raise UsageError("The cursor is not one of ours. Begin again without one.", cursor=cursor[:80]) from error
    if not isinstance(found, list) or len(found) != 3 + len(_TIE) or found[:2] != [sort, descending]:
        raise UsageError("The cursor belongs to another list. Begin again without one.", cursor=cursor[:80])
    return found[2:]
