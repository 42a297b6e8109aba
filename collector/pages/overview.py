"""`/`: what goes on now, how it went in the last hour, what was found, who sends. Its live part is sent again while it is watched."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, StreamingResponse

from collector import problems
from collector.durations import METRICS
from collector.pages.frame import fragment, page
from collector.services import Services, services_of
from collector.sketches import quantile
from engine_probe.errors import NotReady, TooManyQueries, Unauthorized, WrongHost
from engine_probe.events import KINDS

router = APIRouter(tags=["pages"])

RECENT_MINUTES: Final = 5
LIVE_EVERY_S: Final = 2.0
NAPS: Final = 8
"""Between two pictures: a collector that stops is noticed within a nap."""
MOST_WATCHERS: Final = 32
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
        **problems.responses(Unauthorized, WrongHost, NotReady, TooManyQueries),
    },
)
async def live(request: Request) -> StreamingResponse:
    """Server-sent events: `now` is the HTML of the live part, as a JSON text, every 2 s until the reader goes or the collector stops."""
    services = services_of(request)
    if services.num_watchers >= MOST_WATCHERS:
        raise TooManyQueries(
            f"{MOST_WATCHERS} readers watch the overview already", retry_after_s=30, limit=MOST_WATCHERS
        )
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_watched(services), media_type="text/event-stream", headers=headers)


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
        "findings": list(reversed(services.findings))[:8],
    }


def _now(services: Services) -> dict[str, Any]:
    """What goes on, as far as it was told."""
    now_ns = time.time_ns()
    workers = services.live.workers()
    open_now = services.live.open_requests(now_ns, 10)
    waits = [state["oldest_wait_s"] for state in workers.values() if state["oldest_wait_s"] is not None]
    return {
        "now_ns": now_ns,
        "draining": services.is_draining,
        "recent_minutes": RECENT_MINUTES,
        "latencies": _latencies(services, now_ns),
        "workers": [
            {"name": name or "(no name)", "age": _span((now_ns - state["at_ns"]) / 1e9), **state}
            for name, state in workers.items()
        ][:_MOST_ROWS],
        "sees_routes": services.live.sees_routes,
        "num_open": services.live.num_open,
        "open": [
            {"id": one.request_id, "for": _span((now_ns - one.since_ns) / 1e9), "worker": one.worker or "?"}
            for one in open_now
        ],
        "totals": {
            "running": _sum(workers, "num_running"),
            "waiting_prefill": _sum(workers, "num_waiting_prefill"),
            "waiting_decode": _sum(workers, "num_waiting_decode"),
            "oldest_wait": None if not waits else _span(max(waits)),
            "kv_used": _share(_sum(workers, "blocks_used"), _sum(workers, "blocks_total")),
        },
    }


def _sum(workers: dict[str, dict[str, Any]], column: str) -> int | None:
    """Over the workers that tell it; None where none does."""
    known = [state[column] for state in workers.values() if state[column] is not None]
    return sum(known) if known else None


def _share(part: int | None, whole: int | None) -> str | None:
    return f"{100 * part / whole:.0f} %" if part is not None and whole else None


def _source(source: Any, now_ns: int) -> dict[str, str]:
    missing = sum(last - first + 1 for first, last in source.missing)
    offset, error = source.clock_offset_s, source.clock_error_s
    return {
        "name": source.source,
        "heard": _span((now_ns - source.last_received_ns) / 1e9) + " ago",
        "missing": f"{missing:,}" if missing else "none",
        "clock": "not told" if offset is None else f"{offset * 1000:+.1f} ms ± {(error or 0) * 1000:.1f} ms",
    }


def _latencies(services: Services, now_ns: int) -> list[dict[str, Any]]:
    rows = []
    for key, counts in services.latencies.recent(now_ns, RECENT_MINUTES)[:_MOST_ROWS]:
        cells = [
            (quantile(counts[name], "0.5"), quantile(counts[name], "0.99")) if name in counts else None
            for name in METRICS
        ]
        rows.append(
            {
                "vantage": key.vantage,
                "worker": key.worker or "?",
                "model": key.model or "?",
                "n": f"{int(counts['ttft'].sum()):,}" if "ttft" in counts else "?",
                "cells": [None if cell is None else _pair(*cell) for cell in cells],
            }
        )
    return rows


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
