"""`/api/v1/marks`: what people should see on a time axis; read, and set by hand or by a deployment script."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from collector import problems
from collector.api.common import READ_ERRORS, LimitParam, WindowText, answer, json_only, limit_of, window_of
from collector.intake.identity import Sender
from collector.services import Services, services_of
from engine_probe.errors import (
    BadRequest,
    BodyTimeout,
    DiskFull,
    InvalidRows,
    TooLarge,
    TooManyBatches,
    UnknownFormat,
)
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate
from store.evidence.lineage import window_sql
from store.sql_json import json_objects

router = APIRouter(prefix="/api/v1", tags=["marks"])

MarkWord = Literal[
    "config_changed",
    "deployed",
    "canary",
    "experiment",
    "fault",
    "cache_reset",
    "worker_up",
    "worker_down",
    "clock",
    "gap",
]


class NewMark(BaseModel):
    """A mark to set."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"mark": "deployed", "text": "v2 is out"}]}
    )

    mark: MarkWord
    at_ns: int | None = Field(None, description="its instant, ns since 1970-01-01 UTC; default now", ge=0, lt=2**63)
    worker: str | None = Field(None, max_length=500)
    subject: str | None = Field(None, description="worker, source, setting or tenant it is about", max_length=500)
    text: str | None = Field(None, description="one sentence", max_length=2000)
    attrs: dict[str, str] = Field(default_factory=dict, max_length=100)
    run_id: str | None = Field(None, description="mark an imported run in place of the live rows", max_length=500)


class Mark(BaseModel):
    """A mark on the time axis."""

    at_ns: int
    mark: MarkWord
    worker: str | None
    run_id: str | None
    subject: str | None
    text: str | None
    attrs: dict[str, str | None] | None
    source: str


class Marks(BaseModel):
    """Marks of a window, newest first."""

    window: str
    marks: list[Mark]


@router.get(
    "/marks", summary="Marks of a window", responses={200: {"model": Marks}, **problems.responses(*READ_ERRORS)}
)
async def get_marks(
    request: Request,
    window: WindowText = None,
    mark: Annotated[MarkWord | None, Query(description="only marks of this word")] = None,
    limit: LimitParam = None,
) -> Response:
    """Newest first."""
    services = services_of(request)
    return answer(await services.reads.run("/api/v1/marks", _marks, services, window, mark, limit_of(services, limit)))


@router.post(
    "/marks",
    summary="Set a mark",
    status_code=201,
    dependencies=[Depends(json_only)],
    responses={
        201: {"model": Mark, "description": "the mark is on disk"},
        **problems.responses(
            *READ_ERRORS, BadRequest, InvalidRows, BodyTimeout, TooLarge, TooManyBatches, UnknownFormat, DiskFull
        ),
    },
)
async def post_mark(request: Request, mark: NewMark) -> Response:
    """Say that something was deployed, reconfigured or tried, so that diagnosis can use it as a boundary."""
    services = services_of(request)
    now_ns = time.time_ns()
    row = {**mark.model_dump(), "at_ns": now_ns if mark.at_ns is None else mark.at_ns}
    tables = {"mark": table_from_rows("mark", [{**row, "attrs": list(mark.attrs.items()) or None}])}
    validate("mark", tables["mark"], now_ns)
    await services.ingest.put(Sender("api", None, None), tables, now_ns)
    return answer({**row, "attrs": mark.attrs or None, "source": "api"}, 201)


def _marks(services: Services, text: str | None, mark: str | None, limit: int) -> dict[str, Any]:
    window = window_of(services, text)
    condition, params = window_sql(window, "at_ns")
    if mark is not None:
        condition, params = f"{condition} AND mark = ?", [*params, mark]
    sql = (
        "SELECT at_ns, mark, worker, run_id, subject, text, attrs, source FROM mark "
        f"WHERE {condition} ORDER BY at_ns DESC, subject LIMIT {limit}"
    )
    return {"window": str(window), "marks": json_objects(services.store.query(sql, params))}
