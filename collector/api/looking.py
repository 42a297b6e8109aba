"""`/api/v1/now`, `/api/v1/kv`, `/api/v1/runs`, `/api/v1/sight`: the live picture, the KV map of a worker, runs beside each other, what the stored rows tell."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from collector import problems
from collector.api.common import READ_ERRORS, WindowText, answer, window_of
from collector.live.now import picture
from collector.reading.kv_map import Colour, kv_map
from collector.reading.runs import runs
from collector.reading.what_is_seen import what_is_seen
from collector.services import Services, services_of

router = APIRouter(prefix="/api/v1", tags=["looking"])


class KvMap(BaseModel):
    """Slots of a worker's cache over time."""

    worker: str
    window: str
    colour: Literal["tenant", "prefix", "state"]
    start_ns: int
    end_ns: int
    at_ns: list[int] = Field(description="the instant that each column shows")
    legend: list[str] = Field(description="what a number in a cell means: a tenant, a prefix or a state")
    cells: list[list[int]] = Field(description="slots, each a list of columns; -1: no block lay there")
    gaps: dict[str, list[float] | None] = Field(
        description="s that blocks had been unused when they were hit and when they were evicted: 0, 5 ... 100 % of them"
    )
    blocks_drawn: int = Field(description="most blocks that were drawn at once")
    drawn_share: float = Field(description="share of all blocks that are drawn, chosen by their hash")


class Run(BaseModel):
    """An imported run. Durations in s; null where nobody told."""

    run_id: str
    vantage: Literal["client", "engine", "router"]
    requests: int
    unfinished: int
    start_ns: int
    end_ns: int
    prompt_tokens: int | None
    cached_tokens: int | None
    token_hit_rate: float | None
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    tpot_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p95_s: float | None
    e2e_p99_s: float | None


class Runs(BaseModel):
    """Runs, the newest first."""

    runs: list[Run]
    truncated: bool


class Sight(BaseModel):
    """What the rows of a window tell, and which verdicts that allows."""

    window: str
    kinds: list[dict[str, Any]] = Field(description="kind, rows, and of each column the share of rows that tell it")
    metrics: list[str] = Field(description="metrics whose change can be judged")
    causes: list[dict[str, Any]] = Field(
        description="cause, summary, and the names that it lacks; none: it can be judged"
    )


class Now(BaseModel):
    """The live picture. Durations in s; null where nobody told."""

    now_ns: int
    recent_minutes: int
    is_draining: bool
    totals: dict[str, float | int | None]
    workers: list[dict[str, Any]] = Field(
        description="the newest step of each, its age and the share of recent requests with hits"
    )
    latencies: list[dict[str, Any]] = Field(
        description="vantage, worker, model, requests, and p50_s and p99_s of each metric"
    )
    open: list[dict[str, Any]] = Field(description="the longest open requests")
    findings: list[dict[str, Any]] = Field(description="the latest verdicts, newest first")
    alerts: list[dict[str, Any]] | None = Field(description="what fires; null where nobody evaluates")


@router.get("/now", summary="The live picture", responses={200: {"model": Now}, **problems.responses(*READ_ERRORS)})
async def get_now(request: Request) -> Response:
    """What runs and waits, the last minutes, the latest verdicts, what fires: what `kvscope top` shows."""
    services = services_of(request)
    return answer(await services.pages.run("/api/v1/now", picture, services))


@router.get(
    "/kv", summary="The KV map of a worker", responses={200: {"model": KvMap}, **problems.responses(*READ_ERRORS)}
)
async def get_kv(
    request: Request,
    worker: Annotated[str, Query(max_length=300)],
    window: WindowText = None,
    colour: Annotated[Colour, Query(description="what a cell's number means")] = "tenant",
) -> Response:
    """Which blocks its cache held when, and whose they were or whether they were in use; from the block events."""
    services = services_of(request)
    return answer(await services.reads.run("/api/v1/kv", _kv, services, worker, window, colour))


@router.get("/runs", summary="Imported runs", responses={200: {"model": Runs}, **problems.responses(*READ_ERRORS)})
async def get_runs(request: Request) -> Response:
    """Runs and arms of experiments beside each other: requests, exact quantiles, hit rate, failures."""
    services = services_of(request)
    return answer(await services.reads.run("/api/v1/runs", runs, services.store))


@router.get("/sight", summary="What can be seen", responses={200: {"model": Sight}, **problems.responses(*READ_ERRORS)})
async def get_sight(request: Request, window: WindowText = None) -> Response:
    """Column by column what was told, and which causes can be judged from it."""
    services = services_of(request)
    return answer(await services.reads.run("/api/v1/sight", _sight, services, window))


def _kv(services: Services, worker: str, window: str | None, colour: Colour) -> dict[str, Any]:
    return kv_map(services.store, worker, window_of(services, window), colour)


def _sight(services: Services, window: str | None) -> dict[str, Any]:
    return what_is_seen(services.store, window_of(services, window))
