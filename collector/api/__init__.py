"""Routes of the HTTP API: one module a family, each with a `router`; models beside the routes that answer with them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from collector.api import diagnosis, health, ingest, marks, pages, requests, series, sql

ROUTERS: Final[tuple[APIRouter, ...]] = (
    pages.router,
    health.router,
    ingest.router,
    requests.router,
    series.router,
    diagnosis.router,
    marks.router,
    sql.router,
)
