"""Routes of the HTTP API: one module a family, each with a `router`; models beside the routes that answer with them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from collector.api import alerts, diagnosis, health, hotspots, ingest, looking, marks, requests, runbooks, series, sql
from collector.pages import overview, static, views
from collector.pages import runbooks as runbook_pages

OPEN_ROUTERS: Final[tuple[APIRouter, ...]] = (
    overview.router,
    static.router,
    views.router,
    runbook_pages.router,
    health.router,
    ingest.router,
)
"""Called by browsers, probes and exporters, which may add parameters of their own."""

ROUTERS: Final[tuple[APIRouter, ...]] = (
    requests.router,
    series.router,
    diagnosis.router,
    hotspots.router,
    alerts.router,
    runbooks.router,
    marks.router,
    looking.router,
    sql.router,
)
