"""Requests that are open right now, so that the worst ones of an incident are seen before they end.

Read by any thread while the engine's thread goes on writing: each line is right for some moment, the whole is no instant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_probe.recording.request_log import OpenRequest


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """state: queued, running, stalled. wait_s: how long it has not run by now, None while it runs. age_s: since arrival."""

    request_id: str
    state: str
    arrival_ns: int
    age_s: float
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class LiveView:
    """requests: the longest waiting first. oldest_wait_s: None where nothing waits."""

    at_ns: int
    num_queued: int
    num_running: int
    num_stalled: int
    oldest_wait_s: float | None
    requests: list[LiveRequest]


def look(requests: Sequence[OpenRequest], now_ns: int, offset_ns: int) -> LiveView:
    """The picture of open requests. now_ns is monotonic, offset_ns turns it into UTC."""
    found = []
    for request in requests:
        since = request.waiting_since_ns
        wait_s = None if since is None else max(now_ns - since, 0) / 1e9
        age_s = max(now_ns - request.arrival_ns, 0) / 1e9
        arrival_ns = request.arrival_ns + offset_ns
        found.append(LiveRequest(request.request_id, request.state, arrival_ns, age_s, wait_s))
    found.sort(key=lambda line: (-(line.wait_s or 0.0), -line.age_s))
    counts = {state: sum(line.state == state for line in found) for state in ("queued", "running", "stalled")}
    waits = [line.wait_s for line in found if line.wait_s is not None]
    return LiveView(
        now_ns + offset_ns,
        counts["queued"],
        counts["running"],
        counts["stalled"],
        max(waits, default=None),
        found,
    )
