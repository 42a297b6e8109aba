"""Routes of the HTTP API: one module a family, each with a `router`; models beside the routes that answer with them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from collector.api import health, ingest

ROUTERS: Final[tuple[APIRouter, ...]] = (health.router, ingest.router)
