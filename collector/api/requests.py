"""`/api/v1/requests`: pages of requests, one request, its timeline, and the requests that are open now."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from collector import problems
from collector.api.common import READ_ERRORS, LimitParam, WindowText, answer, limit_of, window_of
from collector.intake.otlp_answer import PROTOBUF
from collector.otlp_export.page import CURSOR_HEADER, PAGE_ROWS, ROWS_HEADER, SpanPage, span_page
from collector.paths import text
from collector.perfetto.export import trace_of_request, trace_of_requests
from collector.reading.name_patterns import COLUMNS, PatternText, matching
from collector.reading.request_queries import FILTERS, Page, RequestFilter, get_request, list_requests
from collector.reading.request_timeline import timeline
from collector.services import Services, services_of
from engine_probe.errors import NotFound, UsageError
from store.interface import Window

router = APIRouter(prefix="/api/v1", tags=["requests"])


class ListedRequest(BaseModel):
    """One request at one vantage. Unknown is null; instants are ns since 1970-01-01 UTC."""

    request_id: str = Field(examples=["a1"])
    attempt: int | None
    vantage: Literal["engine", "client", "router"]
    state: Literal["finished", "failed", "aborted", "rejected"]
    engine: str | None
    worker: str | None
    model: str | None
    tenant: str | None
    workload: str | None
    session_id: str | None
    turn: int | None
    run_id: str | None
    arrival_ns: int
    first_token_ns: int | None
    last_token_ns: int | None
    end_ns: int | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    stalled_s: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    num_preemptions: int | None
    finish_reason: str | None
    http_status: int | None
    error: str | None
    ttft_s: float | None = Field(description="first token - arrival", examples=[0.25])
    tpot_s: float | None = Field(description="(last - first token) / (output tokens - 1)")
    e2e_s: float | None = Field(description="last token - arrival")


class RequestPage(BaseModel):
    """A page of requests."""

    window: str = Field(examples=["all live rows"])
    requests: list[ListedRequest]
    next_cursor: str | None = Field(description="give it as `cursor` for the next page; null on the last")


class OpenRequestRow(BaseModel):
    """A request that was routed and whose end nobody told yet."""

    request_id: str
    since_ns: int = Field(description="instant of the routing decision")
    open_s: float = Field(description="now - since_ns")
    router: str | None
    worker: str | None


class LiveWorker(BaseModel):
    """The newest step of a worker."""

    worker: str
    at_ns: int
    age_s: float = Field(description="now - at_ns: how old this picture is")
    step: int
    num_running: int | None
    num_waiting_prefill: int | None
    num_waiting_decode: int | None
    oldest_wait_s: float | None
    blocks_total: int | None
    blocks_used: int | None
    blocks_cached: int | None


class OpenRequests(BaseModel):
    """What runs now, as far as it was told."""

    told_by: list[Literal["route", "step"]] = Field(
        description="kinds of rows that tell: `route` names open requests, `step` counts them; empty: nothing tells"
    )
    num_open: int
    num_dropped: int = Field(description="open requests that were forgotten: too many, or unheard of for too long")
    requests: list[OpenRequestRow] = Field(description="the longest open first")
    workers: list[LiveWorker]


class RequestRows(BaseModel):
    """Everything stored of one request; rows have every column of the event contract."""

    model_config = ConfigDict(extra="forbid")

    request_id: str
    rows: list[dict[str, Any]] = Field(description="one a vantage, attempt and worker, with ttft_s, tpot_s, e2e_s")
    routes: list[dict[str, Any]]
    transfers: list[dict[str, Any]]
    truncated: list[str] = Field(description="lists of which rows were left out: an id that was used over and over")


class TimelineEvent(BaseModel):
    """Something that happened to the request."""

    what: str = Field(examples=["arrived", "phase prefill", "first token", "block evicted"])
    start_ns: int
    end_ns: int
    vantage: str | None
    worker: str | None
    attempt: int | None
    facts: dict[str, Any]


class Timeline(BaseModel):
    """The course of a request, in order of time."""

    request_id: str
    rows: list[dict[str, Any]]
    events: list[TimelineEvent]
    steps: list[dict[str, Any]] = Field(description="steps of its workers while it was there")
    neighbours: list[dict[str, Any]] = Field(description="other requests that its workers served meanwhile")
    lineage: list[dict[str, Any]] = Field(
        description="prompt blocks that it did not find: num_blocks, first_block, fate, at_ns, before_s, caused_by, reason, idle_s"
    )
    marks: list[dict[str, Any]] = Field(description="marks from a minute before it to its end")
    truncated: list[str] = Field(
        description="what was left out of: rows, routes, transfers, blocks, steps, neighbours, marks"
    )


class PerfettoTrace(BaseModel):
    """Chrome trace-event JSON: ui.perfetto.dev and chrome://tracing open it."""

    displayTimeUnit: Literal["ms"]
    otherData: dict[str, Any] = Field(
        description="origin_ns: the instant of ts 0; requests; window; truncated: kinds of which not all rows are drawn"
    )
    traceEvents: list[dict[str, Any]] = Field(description="ts and dur in microseconds")


class FilterParams(BaseModel):
    """Columns to narrow a list by, each to one value; the least values that a request must reach."""

    model_config = ConfigDict(extra="forbid")

    window: WindowText = None
    worker: str | None = None
    model: str | None = None
    tenant: str | None = None
    workload: str | None = None
    priority_class: str | None = None
    vantage: Literal["engine", "client", "router"] | None = None
    state: Literal["finished", "failed", "aborted", "rejected", "open"] | None = Field(
        None,
        description="`open` answers with what runs now (OpenRequests) and takes only `limit` and `worker_matches` beside it",
    )
    worker_matches: PatternText = None
    model_matches: PatternText = None
    tenant_matches: PatternText = None
    session_id: str | None = None
    trace_id: str | None = None
    finish_reason: str | None = None
    min_ttft_s: float | None = Field(None, ge=0)
    min_e2e_s: float | None = Field(None, ge=0)
    min_queue_s: float | None = Field(None, ge=0)
    min_preemptions: int | None = Field(None, ge=0)
    sort: Literal[
        "arrival",
        "ttft",
        "tpot",
        "e2e",
        "queue",
        "prefill",
        "prompt_tokens",
        "output_tokens",
        "cached_tokens",
        "preemptions",
    ] = "arrival"
    order: Literal["desc", "asc"] = "desc"
    limit: LimitParam = None
    cursor: str | None = Field(None, max_length=2000)


class SpanParams(BaseModel):
    """Which requests leave as spans."""

    model_config = ConfigDict(extra="forbid")

    window: WindowText = None
    worker: str | None = None
    model: str | None = None
    vantage: Literal["engine", "client", "router"] | None = None
    cursor: str | None = Field(None, max_length=2000)


SPAN_FILTERS: Final = ("worker", "model", "vantage")


@router.get(
    "/requests",
    summary="A page of requests, or those that are open now",
    responses={200: {"model": RequestPage | OpenRequests}, **problems.responses(*READ_ERRORS)},
)
async def get_requests(request: Request, params: Annotated[FilterParams, Query()]) -> Response:
    """Newest first unless `sort` and `order` say otherwise; unknown values come last. `next_cursor` continues the page."""
    services = services_of(request)
    limit = limit_of(services, params.limit)
    if params.state == "open":
        if others := sorted(params.model_fields_set - {"state", "limit", "worker_matches"}):
            raise UsageError(
                f"state=open tells what runs now; it takes only limit and worker_matches beside it, not {', '.join(others)}",
                parameters=others,
            )
        if params.worker_matches is None:
            return answer(_open_requests(services, limit))
        asked = (services, limit, params.worker_matches)
        return answer(await services.reads.run("/api/v1/requests", _open_requests, *asked))
    page = await services.reads.run("/api/v1/requests", _page, services, params, limit)
    return answer(page)


@router.get(
    f"/requests/{text('request_id')}/timeline",
    summary="The course of one request",
    responses={200: {"model": Timeline}, **problems.responses(*READ_ERRORS, NotFound)},
)
async def get_timeline(
    request: Request, request_id: Annotated[str, Path(max_length=1000)], window: WindowText = None
) -> Response:
    """Instants, phases, routing, transfers, blocks, the steps it lived through, marks. Without a window all rows are searched."""
    if not _is_asked_for(request, "timeline"):
        return await get_one(request, _id_of(request), window)
    services = services_of(request)
    return answer(
        await services.reads.run("/api/v1/requests/{id}/timeline", _one, services, timeline, request_id, window)
    )


@router.get(
    f"/requests/{text('request_id')}/perfetto",
    summary="The course of one request as a trace file",
    responses={200: {"model": PerfettoTrace}, **problems.responses(*READ_ERRORS, NotFound)},
)
async def get_request_trace(
    request: Request, request_id: Annotated[str, Path(max_length=1000)], window: WindowText = None
) -> Response:
    """Its phases, tokens, routing and transfers, the steps and blocks of its workers, and the requests that shared them."""
    if not _is_asked_for(request, "perfetto"):
        return await get_one(request, _id_of(request), window)
    services = services_of(request)
    return answer(
        await services.reads.run("/api/v1/requests/{id}/perfetto", _one, services, trace_of_request, request_id, window)
    )


@router.get(
    "/perfetto",
    summary="A page of requests as a trace file",
    responses={200: {"model": PerfettoTrace}, **problems.responses(*READ_ERRORS, NotFound)},
)
async def get_trace(request: Request, params: Annotated[FilterParams, Query()]) -> Response:
    """The requests that `/api/v1/requests` would list, drawn with the steps, blocks and routes around them."""
    services = services_of(request)
    limit = limit_of(services, params.limit)
    if params.state == "open":
        raise UsageError("requests that are still open have no course to draw yet", state="open")
    return answer(await services.reads.run("/api/v1/perfetto", _trace, services, params, limit))


@router.get(
    "/otlp",
    summary="A page of requests as OpenTelemetry spans",
    response_class=Response,
    responses={
        200: {
            "description": f"an ExportTraceServiceRequest; {CURSOR_HEADER} continues the page, {ROWS_HEADER} counts requests",
            "content": {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}},
        },
        **problems.responses(*READ_ERRORS),
    },
)
async def get_spans(request: Request, params: Annotated[SpanParams, Query()]) -> Response:
    """The body that an OTLP/HTTP backend takes at `/v1/traces`: a span a request and vantage, a child a phase. In order of arrival."""
    services = services_of(request)
    page = await services.reads.run("/api/v1/otlp", _spans, services, params)
    headers = {ROWS_HEADER: str(page.num_rows)}
    if page.next_cursor is not None:
        headers[CURSOR_HEADER] = page.next_cursor
    return Response(page.body, media_type=PROTOBUF, headers=headers)


@router.get(
    f"/requests/{text('request_id')}",
    summary="All that is stored of one request",
    responses={200: {"model": RequestRows}, **problems.responses(*READ_ERRORS, NotFound)},
)
async def get_one(
    request: Request, request_id: Annotated[str, Path(max_length=1000)], window: WindowText = None
) -> Response:
    """Its rows of every vantage and attempt, routing decisions and transfers. Without a window all rows are searched."""
    services = services_of(request)
    return answer(await services.reads.run("/api/v1/requests/{id}", _one, services, get_request, request_id, window))


def _is_asked_for(request: Request, part: str) -> bool:
    """Whether this part of a request is meant, and not a request whose own id ends like it: a slash within an id comes as %2F."""
    raw: bytes | None = request.scope.get("raw_path")
    return raw is None or unquote(raw.rpartition(b"/")[2]) == part


def _id_of(request: Request) -> str:
    """All of the path behind the name of the list. (A pattern that ends in a word also fits the word and a line break.)"""
    return str(request.scope["path"]).partition(f"{router.prefix}/requests/")[2]


def _spans(services: Services, params: SpanParams) -> SpanPage:
    equal = {column: value for column in SPAN_FILTERS if (value := getattr(params, column)) is not None}
    limit = min(PAGE_ROWS, services.settings.read.max_page_rows)
    wanted = RequestFilter(window_of(services, params.window), equal, {}, limit=limit, cursor=params.cursor)
    return span_page(services.store, wanted)


def _trace(services: Services, params: FilterParams, limit: int) -> dict[str, Any]:
    page, window = _listed(services, params, limit)
    return trace_of_requests(services.store, [row["request_id"] for row in page.rows], window)


def _page(services: Services, params: FilterParams, limit: int) -> dict[str, Any]:
    page, window = _listed(services, params, limit)
    return {"window": str(window), "requests": page.rows, "next_cursor": page.next_cursor}


def _listed(services: Services, params: FilterParams, limit: int) -> tuple[Page, Window]:
    window = window_of(services, params.window)
    least = {
        "ttft": params.min_ttft_s,
        "e2e": params.min_e2e_s,
        "queue": params.min_queue_s,
        "preemptions": params.min_preemptions,
    }
    equal = {column: value for column in FILTERS if (value := getattr(params, column)) is not None}
    wanted = RequestFilter(
        window,
        equal,
        {name: float(value) for name, value in least.items() if value is not None},
        params.sort,
        params.order == "desc",
        limit,
        params.cursor,
        {column: pattern for column in COLUMNS if (pattern := getattr(params, f"{column}_matches")) is not None},
    )
    return list_requests(services.store, wanted), window


def _one(services: Services, ask: Any, request_id: str, window: str | None) -> Any:
    if not request_id:
        raise UsageError("the request's id is empty")
    return ask(services.store, request_id, None if window is None else window_of(services, window))


def _open_requests(services: Services, limit: int, pattern: str | None = None) -> dict[str, Any]:
    now_ns = time.time_ns()
    live = services.live
    workers = live.workers()
    if pattern is None:
        found = live.open_requests(now_ns, limit)
    else:
        every = live.open_requests(now_ns, services.settings.read.open_requests)
        chosen = matching(services.store, pattern, [*workers, *(one.worker or "" for one in every)])
        found = [one for one in every if (one.worker or "") in chosen][:limit]
        workers = {name: state for name, state in workers.items() if name in chosen}
    return {
        "told_by": [kind for kind, tells in (("route", live.sees_routes), ("step", bool(workers))) if tells],
        "num_open": live.num_open,
        "num_dropped": live.num_dropped,
        "requests": [
            {
                "request_id": one.request_id,
                "since_ns": one.since_ns,
                "open_s": (now_ns - one.since_ns) / 1e9,
                "router": one.router,
                "worker": one.worker,
            }
            for one in found
        ],
        "workers": [
            {"worker": name, "age_s": (now_ns - state["at_ns"]) / 1e9, **state} for name, state in workers.items()
        ],
    }
