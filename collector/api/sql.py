"""`POST /api/v1/sql`: one statement of a person, run in a child process that can only read and compute.

The answer is JSON, written by the child, or an Arrow IPC stream where the client asks for one (`Accept`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from collector import problems
from collector.api.common import READ_ERRORS, json_only
from collector.services import Services, services_of
from engine_probe.errors import BadRequest, BodyTimeout, QueryKilled, QueryRefused, StoreError, TooLarge, UnknownFormat

ARROW: Final = "application/vnd.apache.arrow.stream"

_WEIGHT: Final = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")

router = APIRouter(prefix="/api/v1", tags=["sql"])


class SqlQuestion(BaseModel):
    """One statement: SELECT, or EXPLAIN without ANALYZE."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"sql": "SELECT worker, count(*) FROM request GROUP BY worker", "max_rows": 100}]
        },
    )

    sql: str = Field(min_length=1, max_length=100_000)
    max_rows: int | None = Field(None, ge=0, description="most rows of the answer; the setting is the upper limit")


class SqlColumn(BaseModel):
    """A column of the answer."""

    name: str
    type: str = Field(description="DuckDB type", examples=["BIGINT"])


class SqlAnswer(BaseModel):
    """Rows, each a list in the order of the columns."""

    columns: list[SqlColumn]
    rows: list[list[Any]]
    truncated: bool = Field(description="rows were left out: max_rows, or the size of an answer")


@router.post(
    "/sql",
    summary="Ask in SQL",
    dependencies=[Depends(json_only)],
    responses={
        200: {"model": SqlAnswer, "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}}},
        **problems.responses(
            *READ_ERRORS, BadRequest, QueryRefused, QueryKilled, BodyTimeout, TooLarge, UnknownFormat, StoreError
        ),
    },
)
async def post_sql(request: Request, question: SqlQuestion) -> Response:
    """Tables are the kinds (request, step, block, ...) and the evidence views. Killed at its deadline."""
    services = services_of(request)
    cancelled = threading.Event()
    watch = asyncio.create_task(_cancel_when_gone(request, cancelled))
    as_arrow = prefers_arrow(",".join(request.headers.getlist("accept")))
    try:
        body = await services.sql_reads.run("/api/v1/sql", _run, services, question, cancelled, as_arrow)
        return Response(body, media_type=ARROW if as_arrow else "application/json")
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


def prefers_arrow(accept: str) -> bool:
    """Whether a client named Arrow in `Accept` with a weight above zero, and none higher for JSON (RFC 9110, 12.5.1).

    JSON has the weight of the most specific range that holds it; what is no weight is none.
    """
    weights: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (word.strip().lower() for word in part.split(";"))
        given = [value.strip() for key, _, value in (one.partition("=") for one in parameters) if key.strip() == "q"]
        weights[name] = 1.0 if not given else float(given[0]) if _WEIGHT.fullmatch(given[0]) else 0.0
    json = next((weights[one] for one in ("application/json", "application/*", "*/*") if one in weights), 0.0)
    return weights.get(ARROW, 0.0) > 0 and weights[ARROW] >= json


async def _cancel_when_gone(request: Request, cancelled: threading.Event) -> None:
    """A client that hung up waits for no answer: its child is ended."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    cancelled.set()


def _run(services: Services, question: SqlQuestion, cancelled: threading.Event, as_arrow: bool) -> bytes:
    return services.run_sql(question.sql, question.max_rows, cancelled, as_arrow=as_arrow)
