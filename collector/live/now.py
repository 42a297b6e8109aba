"""The live picture in numbers: what runs and waits, how slow the last minutes were, what was found, what fires.

The overview and `kvscope top` show the same numbers from here. What nobody told is null.
"""

from __future__ import annotations

import time
from typing import Any, Final

from collector.live.durations import METRICS
from collector.live.sketches import quantile
from collector.services import Services

RECENT_MINUTES: Final = 5
MOST_ROWS: Final = 200
MOST_OPEN: Final = 10
MOST_FINDINGS: Final = 8
_ADDED: Final = (
    "num_running",
    "num_waiting_prefill",
    "num_waiting_decode",
    "blocks_used",
    "blocks_cached",
    "blocks_total",
)


def picture(services: Services) -> dict[str, Any]:
    """`{now_ns, recent_minutes, is_draining, totals, workers, latencies, open, findings, alerts}`; durations in s.

    workers     newest step of each, with the share of its recent requests that found something cached (`hit_ratio`)
    latencies   vantage, worker, model, requests, and of each metric {p50_s, p99_s}, within 1.6 %
    """
    now_ns = time.time_ns()
    workers = services.live.workers()
    hits = services.latencies.recent_hits(now_ns, RECENT_MINUTES)
    waits = [state["oldest_wait_s"] for state in workers.values() if state["oldest_wait_s"] is not None]
    totals: dict[str, Any] = {column: _added([state[column] for state in workers.values()]) for column in _ADDED}
    return {
        "now_ns": now_ns,
        "recent_minutes": RECENT_MINUTES,
        "is_draining": services.is_draining,
        "totals": totals
        | {
            "oldest_wait_s": max(waits, default=None),
            "open": services.live.num_open if services.live.sees_routes else None,
        },
        "workers": [
            {
                "worker": name,
                "age_s": (now_ns - state["at_ns"]) / 1e9,
                "hit_ratio": _hit_ratio(hits.get(name, {})),
                **state,
            }
            for name, state in workers.items()
        ][:MOST_ROWS],
        "latencies": _latencies(services, now_ns),
        "open": [
            {"request_id": one.request_id, "open_s": (now_ns - one.since_ns) / 1e9, "worker": one.worker}
            for one in services.live.open_requests(now_ns, MOST_OPEN)
        ],
        "findings": list(reversed(services.findings))[:MOST_FINDINGS],
        "alerts": _alerts(services),
    }


def _added(values: list[int | None]) -> int | None:
    """Over the workers that tell it; None where none does."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _hit_ratio(classes: dict[str, int]) -> float | None:
    known = sum(classes.get(name, 0) for name in ("hit", "partial", "miss"))
    return (known - classes.get("miss", 0)) / known if known else None


def _latencies(services: Services, now_ns: int) -> list[dict[str, Any]]:
    rows = []
    for key, counts in services.latencies.recent(now_ns, RECENT_MINUTES)[:MOST_ROWS]:
        metrics = {
            name: {"p50_s": quantile(counts[name], "0.5"), "p99_s": quantile(counts[name], "0.99")}
            for name in METRICS
            if name in counts
        }
        requests = int(counts["ttft"].sum()) if "ttft" in counts else None
        rows.append(
            {
                "vantage": key.vantage,
                "worker": key.worker or None,
                "model": key.model or None,
                "requests": requests,
                "metrics": metrics,
            }
        )
    return rows


def _alerts(services: Services) -> list[dict[str, Any]] | None:
    """Alerts that fire; None where nobody evaluates."""
    if services.alerting is None:
        return None
    return [
        {
            "alert": alert.labels.get("alertname", "alert"),
            "summary": alert.annotations.get("summary", ""),
            "since_ns": alert.fired_ns,
            "labels": dict(alert.labels),
        }
        for alert in services.alerting.book.open_alerts()
        if alert.state == "firing"
    ]
