"""`/`: one page for people, rendered here, without scripts: what is stored, who sends, how it goes, where to look next."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from typing import Any, Final

from fastapi import APIRouter, Request
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from starlette.responses import HTMLResponse

from collector import problems
from collector.durations import METRICS
from collector.services import Services, services_of
from collector.sketches import quantile
from engine_probe.errors import NotReady, TooManyQueries, Unauthorized, WrongHost
from engine_probe.events import KINDS

router = APIRouter(tags=["pages"])

RECENT_MINUTES: Final = 5
_MOST_ROWS: Final = 50


@router.get(
    "/",
    summary="The collector at a glance",
    response_class=HTMLResponse,
    responses=problems.responses(Unauthorized, WrongHost, NotReady, TooManyQueries),
)
async def page(request: Request) -> HTMLResponse:
    """HTML without scripts; reloads itself every 15 s."""
    services = services_of(request)
    nonce = secrets.token_urlsafe(16)
    facts = await services.pages.run("/", _facts, services)
    html = _template().render(facts, nonce=nonce, url=str(request.base_url).rstrip("/"))
    headers = {
        "Content-Security-Policy": f"default-src 'none'; style-src 'nonce-{nonce}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return HTMLResponse(html, headers=headers)


def _facts(services: Services) -> dict[str, Any]:
    now_ns = time.time_ns()
    stats = services.metrics_page.store_stats()
    runs = services.known_runs().runs()
    open_now = services.live.open_requests(now_ns, _MOST_ROWS)
    return {
        "version": metadata.version("kvscope"),
        "now": _clock(now_ns),
        "draining": services.is_draining,
        "uptime": _span((now_ns - services.started_ns) / 1e9),
        "store": {
            "url": stats.url,
            "size": _size(stats.bytes),
            "rows": [(kind, f"{stats.rows.get(kind, 0):,}") for kind in KINDS],
            "oldest": None if stats.oldest_ns is None else _clock(stats.oldest_ns),
            "newest": None if stats.newest_ns is None else _clock(stats.newest_ns),
        },
        "is_empty": not any(stats.rows.values()),
        "runs": list(runs[:_MOST_ROWS]),
        "num_runs": len(runs),
        "sources": [_source(source, now_ns) for source in services.store.sources()[:_MOST_ROWS]],
        "recent_minutes": RECENT_MINUTES,
        "latencies": _latencies(services, now_ns),
        "workers": [
            {"name": name or "(no name)", "age": _span((now_ns - state["at_ns"]) / 1e9), **state}
            for name, state in services.live.workers().items()
        ][:_MOST_ROWS],
        "sees_routes": services.live.sees_routes,
        "num_open": services.live.num_open,
        "open": [
            {"id": one.request_id, "for": _span((now_ns - one.since_ns) / 1e9), "worker": one.worker or "?"}
            for one in open_now[:10]
        ],
        "findings": list(reversed(services.findings))[:5],
    }


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


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("collector", "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("index.html")


def _clock(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


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
