"""`/`: what goes on now, how it went in the last hour, what was found, who sends. Its live part is sent again while it is watched."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse

from collector import problems
from collector.live.durations import METRICS
from collector.live.now import picture
from collector.pages.frame import fragment, page
from collector.services import Services, services_of
from engine_probe.errors import NotReady, TooManyQueries, TooManyReaders, Unauthorized, WrongHost
from engine_probe.events import KINDS

router = APIRouter(tags=["pages"])

LIVE_EVERY_S: Final = 2.0
NAPS: Final = 8
"""Between two pictures: a collector that stops is noticed within a nap."""
MOST_WATCHERS: Final = 32
RETRY_S: Final = 10
"""Who found no room asks again after so long; `overview.js` does."""
_MOST_ROWS: Final = 50


@router.get(
    "/",
    summary="The collector at a glance",
    response_class=HTMLResponse,
    responses=problems.responses(Unauthorized, WrongHost, NotReady, TooManyQueries),
)
async def overview(request: Request) -> HTMLResponse:
    """HTML; its tiles follow what goes on by server-sent events of `/live`."""
    services = services_of(request)
    facts = await services.pages.run("/", lambda: _stored(services) | _now(services))
    return page("pages/overview.html", path="/", title="Overview", url=str(request.base_url).rstrip("/"), **facts)


@router.get(
    "/live",
    summary="The overview's live part, again and again",
    response_class=StreamingResponse,
    responses={
        200: {"description": "server-sent events", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
        **problems.responses(Unauthorized, WrongHost, NotReady, TooManyReaders),
    },
)
async def live(request: Request) -> StreamingResponse:
    """Server-sent events: `now` is the HTML of the live part, as a JSON text, every 2 s until the reader goes or the collector stops.

    So many readers at a time have a stream; others are answered with 503, and ask `/live/once` now and then.
    """
    services = services_of(request)
    if services.num_watchers >= MOST_WATCHERS:
        raise TooManyReaders(
            f"{MOST_WATCHERS} readers follow the overview already; ask GET /live/once every {RETRY_S} s, or try again then",
            retry_after_s=RETRY_S,
            limit=MOST_WATCHERS,
        )
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_watched(services), media_type="text/event-stream", headers=headers)


class OnePicture(BaseModel):
    """The overview's live part, once."""

    html: str
    readers: int = Field(description="who follow it live now")
    most_readers: int = Field(description="so many may at a time")


@router.get(
    "/live/once",
    summary="The overview's live part, once",
    responses={
        200: {"model": OnePicture},
        **problems.responses(Unauthorized, WrongHost, NotReady, TooManyQueries),
    },
)
async def live_once(request: Request) -> JSONResponse:
    """For readers who found no room at `/live`."""
    services = services_of(request)
    facts = await services.pages.run("/live/once", _now, services)
    html = fragment("pages/now.html", **facts)
    return JSONResponse({"html": html, "readers": services.num_watchers, "most_readers": MOST_WATCHERS})


async def _watched(services: Services) -> AsyncIterator[str]:
    services.num_watchers += 1
    try:
        while not services.is_draining:
            facts = await services.pages.run("/live", _now, services)
            yield f"event: now\ndata: {json.dumps(fragment('pages/now.html', **facts))}\n\n"
            for _ in range(NAPS):
                if not services.is_draining:
                    await asyncio.sleep(LIVE_EVERY_S / NAPS)
    finally:
        services.num_watchers -= 1


def _stored(services: Services) -> dict[str, Any]:
    """What changes slowly."""
    now_ns = time.time_ns()
    stats = services.metrics_page.store_stats()
    runs = services.known_runs().runs()
    return {
        "uptime": _span((now_ns - services.started_ns) / 1e9),
        "store": {
            "url": stats.url,
            "size": _size(stats.bytes),
            "rows": [(kind, f"{stats.rows.get(kind, 0):,}") for kind in KINDS],
            "oldest_ns": stats.oldest_ns,
            "newest_ns": stats.newest_ns,
        },
        "is_empty": not any(stats.rows.values()),
        "runs": list(runs[:_MOST_ROWS]),
        "num_runs": len(runs),
        "sources": [_source(source, now_ns) for source in services.store.sources()[:_MOST_ROWS]],
        "findings": [_finding(finding) for finding in list(reversed(services.findings))[:8]],
    }


def _now(services: Services) -> dict[str, Any]:
    """What goes on, as far as it was told, in words."""
    seen = picture(services)
    totals = seen["totals"]
    return {
        "now_ns": seen["now_ns"],
        "draining": seen["is_draining"],
        "recent_minutes": seen["recent_minutes"],
        "latencies": [_latency(row) for row in seen["latencies"][:_MOST_ROWS]],
        "workers": [
            {
                **state,
                "name": state["worker"] or "(no name)",
                "age": _span(state["age_s"]),
                "hits": _percent(state["hit_ratio"]),
            }
            for state in seen["workers"][:_MOST_ROWS]
        ],
        "num_open": totals["open"],
        "open": [
            {"id": one["request_id"], "for": _span(one["open_s"]), "worker": one["worker"] or "?"}
            for one in seen["open"]
        ],
        "firing": seen["alerts"] or [],
        "totals": {
            "running": totals["num_running"],
            "waiting_prefill": totals["num_waiting_prefill"],
            "waiting_decode": totals["num_waiting_decode"],
            "oldest_wait": None if totals["oldest_wait_s"] is None else _span(totals["oldest_wait_s"]),
            "kv_used": _share(totals["blocks_used"], totals["blocks_total"]),
        },
    }


def _share(part: int | None, whole: int | None) -> str | None:
    return f"{100 * part / whole:.0f} %" if part is not None and whole else None


def _percent(ratio: float | None) -> str | None:
    return None if ratio is None else f"{100 * ratio:.0f} %"


def _latency(row: dict[str, Any]) -> dict[str, Any]:
    cells = [row["metrics"].get(name) for name in METRICS]
    return {
        "vantage": row["vantage"],
        "worker": row["worker"] or "?",
        "model": row["model"] or "?",
        "n": "?" if row["requests"] is None else f"{row['requests']:,}",
        "cells": [None if cell is None else _pair(cell["p50_s"], cell["p99_s"]) for cell in cells],
    }


def _finding(finding: Mapping[str, Any]) -> dict[str, Any]:
    """With the query that asks the diagnosis page for the same windows."""
    judged = finding.get("judged")
    asked = {**judged, "metric": finding["metric"], "quantile": finding["quantile"]} if judged else None
    return {**finding, "made_ns": finding.get("made_ns"), "again": urlencode(asked, safe="/@") if asked else None}


def _source(source: Any, now_ns: int) -> dict[str, str]:
    missing = sum(last - first + 1 for first, last in source.missing)
    offset, error = source.clock_offset_s, source.clock_error_s
    return {
        "name": source.source,
        "heard": _span((now_ns - source.last_received_ns) / 1e9) + " ago",
        "missing": f"{missing:,}" if missing else "none",
        "clock": "not told" if offset is None else f"{offset * 1000:+.1f} ms ± {(error or 0) * 1000:.1f} ms",
    }


def _span(seconds: float) -> str:
    if seconds < 0:
        return f"-{_span(-seconds)}"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _pair(middle_s: float | None, tail_s: float | None) -> str:
    """Median and tail with one unit."""
    if middle_s is None or tail_s is None:
        return "?"
    scale, unit = (1, "s") if tail_s >= 1 else (1000, "ms")
    return f"{_three(middle_s * scale)} / {_three(tail_s * scale)} {unit}"


def _three(value: float) -> str:
    """Three digits, never in powers of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"
