"""`/api/v1/series`: time series for dashboards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from collector import problems
from collector.api.common import READ_ERRORS, WindowText, answer, window_of
from collector.reading.series_queries import SeriesRequest, series
from collector.services import Services, services_of

router = APIRouter(prefix="/api/v1", tags=["series"])


class OneSeries(BaseModel):
    """One line of a chart."""

    labels: dict[str, str | None] = Field(examples=[{"worker": "worker-0"}])
    points: list[tuple[int, float | None, int]] = Field(
        description="[start of the bucket in ns, value, number of values behind it]",
        examples=[[[1764403200000000000, 0.41, 120]]],
    )


class SeriesAnswer(BaseModel):
    """A number over time by group."""

    metric: str
    unit: str = Field(examples=["s"])
    stat: str = Field(examples=["0.99"])
    vantage: Literal["engine", "client", "router"] | None = Field(
        description="whose measurements these are; null where they are grouped by vantage, and for other kinds than requests"
    )
    sample_rate: float | None = Field(
        description="the lowest share of such rows that was kept, null where all were; below 1, counts, sums and means are estimates"
    )
    step_s: int
    window: str
    series: list[OneSeries]


@router.get(
    "/series",
    summary="A number over time, by group",
    responses={200: {"model": SeriesAnswer}, **problems.responses(*READ_ERRORS)},
)
async def get_series(
    request: Request,
    metric: Annotated[
        str,
        Query(
            description="ttft, tpot, e2e, itl, a phase (queue_s), requests, prompt_tokens (and other counts of tokens), step.COLUMN, block.CHANGE or sample.NAME",
            examples=["ttft"],
            max_length=200,
        ),
    ],
    window: WindowText = None,
    stat: Annotated[
        str | None,
        Query(description="quantile as a decimal (0.99), or mean, min, max, sum, count, last, increase", max_length=40),
    ] = None,
    step_s: Annotated[
        int | None, Query(description="length of a bucket, s; default by the window", ge=1, le=86400)
    ] = None,
    by: Annotated[str, Query(description="columns to group by, separated by commas", examples=["worker"])] = "",
    vantage: Annotated[
        Literal["engine", "client", "router"] | None,
        Query(
            description="of requests: whose measurements; default the client's, else the engine's, else the router's"
        ),
    ] = None,
) -> Response:
    """Quantiles are exact (nearest rank over raw rows). A request is counted in the bucket of its arrival."""
    services = services_of(request)
    groups = tuple(name.strip() for name in by.split(",") if name.strip())
    return answer(
        await services.reads.run("/api/v1/series", _ask, services, metric, window, stat, step_s, groups, vantage)
    )


def _ask(
    services: Services,
    metric: str,
    window: str | None,
    stat: str | None,
    step_s: int | None,
    by: tuple[str, ...],
    vantage: str | None,
) -> dict[str, Any]:
    most = services.settings.read.max_points
    wanted = SeriesRequest(metric, window_of(services, window), stat, step_s, by, vantage, most)
    return series(services.store, wanted)
