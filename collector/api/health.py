"""Is it alive, is it ready, what does it count: `/healthz`, `/readyz`, `/metrics`."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from collector import problems
from collector.services import services_of
from engine_probe.errors import NotReady, TooManyQueries, Unauthorized, WrongHost

router = APIRouter(tags=["health"])


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    """Batches are taken and questions answered."""

    status: Literal["ready"] = "ready"


@router.get("/healthz", summary="The process answers")
async def healthz() -> Alive:
    """Asks nothing of the store; needs no token."""
    return Alive()


@router.get("/readyz", summary="Batches are taken", responses=problems.responses(NotReady))
async def readyz(request: Request) -> Ready:
    """503 while starting and while draining before a stop; needs no token."""
    if services_of(request).is_draining:
        raise NotReady("the collector is stopping: what was accepted is being committed, nothing new is taken")
    return Ready()


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={
        200: {
            "content": {
                "text/plain": {"schema": {"type": "string"}},
                "application/openmetrics-text": {"schema": {"type": "string"}},
            },
            "description": "Prometheus' text format; OpenMetrics, with exemplars, for who accepts it",
        },
        **problems.responses(Unauthorized, WrongHost, NotReady, TooManyQueries),
    },
)
async def metrics(request: Request) -> Response:
    """The fleet as its raw events tell it, and the collector itself: docs/dashboards.md lists every metric."""
    services = services_of(request)
    accept = ",".join(request.headers.getlist("accept"))
    page, media_type = await services.pages.run("/metrics", services.metrics_page.render, accept)
    return Response(page, media_type=media_type)
