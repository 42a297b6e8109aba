"""The pages that a script fills from the API: each is a form, a place for the answer, and what to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Request
from starlette.responses import HTMLResponse

from collector.cookbook import saved
from collector.pages.frame import page
from collector.paths import text
from collector.services import Services, services_of

router = APIRouter(include_in_schema=False)

MOST_RUNS: Final = 500


@router.get("/requests")
async def requests(request: Request) -> HTMLResponse:
    """The list of requests."""
    return await _with_runs(request, "requests", "/requests", "Requests")


@router.get(f"/requests/{text('request_id')}")
async def one_request(request: Request, request_id: Annotated[str, Path(max_length=1000)]) -> HTMLResponse:
    """The course of one request."""
    return page("pages/request.html", path="/requests", title=f"Request {request_id}", request_id=request_id)


@router.get("/diagnosis")
async def diagnosis(request: Request) -> HTMLResponse:
    """Two windows, and why the second is worse."""
    return await _with_runs(request, "diagnosis", "/diagnosis", "Diagnosis")


@router.get("/workers")
async def workers(request: Request) -> HTMLResponse:
    """Workers beside each other, and hotspots."""
    return await _with_runs(request, "workers", "/workers", "Workers and hotspots")


@router.get("/capacity")
async def capacity(request: Request) -> HTMLResponse:
    """Hit rate against the number of blocks."""
    return await _with_runs(request, "capacity", "/capacity", "Capacity")


@router.get("/kv")
async def kv(request: Request) -> HTMLResponse:
    """Blocks of a worker over time."""
    return await _with_runs(request, "kv", "/kv", "KV map")


@router.get("/experiments")
async def experiments(request: Request) -> HTMLResponse:
    """Runs beside each other, and the document of an experiment."""
    return page("pages/experiments.html", path="/experiments", title="Experiments")


@router.get("/alerts")
async def alerts(request: Request) -> HTMLResponse:
    """What fires, who was told, what is silenced."""
    return page("pages/alerts.html", path="/alerts", title="Alerts")


@router.get("/sight")
async def sight(request: Request) -> HTMLResponse:
    """What this deployment can see."""
    return await _with_runs(request, "sight", "/sight", "What is visible")


@router.get("/sql")
async def sql(request: Request) -> HTMLResponse:
    """The SQL console."""
    return page("pages/sql.html", path="/sql", title="SQL", tables=_tables(), saved=list(saved().values()))


async def _with_runs(request: Request, name: str, path: str, title: str, **facts: Any) -> HTMLResponse:
    services = services_of(request)
    runs = await services.pages.run(path, _runs, services)
    return page(f"pages/{name}.html", path=path, title=title, runs=runs, **facts)


def _runs(services: Services) -> Sequence[str]:
    return services.known_runs().runs()[:MOST_RUNS]


def _tables() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(kind, columns as (name, type, meaning)) of the event contract."""
    from engine_probe.events import KINDS

    return [(kind, [(column.name, column.type, column.doc) for column in columns]) for kind, columns in KINDS.items()]
