"""The load that the router reads of its workers does not move."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Excluded, cause
from diagnosis.claims.hotspot import hotspot


@cause(
    "hotspot_dead_signal",
    needs=("route.candidates_load|sample.router_load",),
    rows=("hotspot_dead_signal",),
)
def hotspot_dead_signal(case: Case) -> Claim | Excluded | None:
    """The router's load signal was dead: it read one constant of every worker, or of the one it went to, while requests queued there.

    Why: a counter that is raised or lowered on one path only (HTTP but not gRPC, streams that never end), or a poll that fails, reads 0
    for all, or what it read last for the one whose endpoint hangs. No imbalance is ever seen then, and all that is left is the prefix, or the place in the list.

    Refuted by: loads that differ between workers or over time; queues that are as short as the loads say.

    Remedy:
    - SGLang router: take a router release in which the path in use counts (gRPC counts since pull request 15473), or send over HTTP
    - Dynamo: let workers publish their load (they do unless metrics are off) and look at it on the router's /metrics
    - router: count a request when it is sent and when its stream ends, on every path; or poll running + waiting from the engines
    - router: alert when its loads stay equal while the engines' gauges differ

    Experiment: send one long request, and read the router's load of its worker before, meanwhile and after; it must go up and down.
    """
    return hotspot(case, "hotspot_dead_signal")
