"""Workers and routing: load against hit rate per worker, regret, hotspots."""

from __future__ import annotations

from typing import Final

from dashboards.frame import Board
from dashboards.infinity import Column
from dashboards.parts import PLAIN, RATIO, REQUESTS_S, SECONDS, SECONDS_S, Query, api_table, bars, lines
from dashboards.promql import largest, mean, quantile, rate, ratio, total
from store import metric_catalogue as names

_TOKEN_HITS: Final = ratio(rate(names.PREFIX_HIT_TOKENS, "worker"), rate(names.CACHE_PROMPT_TOKENS, "worker"))
_REGRET: Final = ratio(rate(names.ROUTING_REGRET, "worker"), rate(names.ROUTES_JUDGED, "worker"))
_SHARE: Final = f"{rate(names.ROUTES, 'worker')} / on () group_left () ({rate(names.ROUTES)} > 0)"

BOARD: Final = Board(
    "routing",
    "workers and routing",
    "Does the router trade waiting for hits, and at what price? Load beside hit rate, regret, hotspots.",
    (
        (
            "Load against hit rate",
            (
                lines(
                    "Share of decisions",
                    "Of the router's decisions, by the worker it chose.",
                    RATIO,
                    Query(_SHARE, "{{worker}}"),
                    stacked=True,
                ),
                lines(
                    "Mean queue",
                    "Waiting for the first schedule.",
                    SECONDS,
                    Query(mean(names.QUEUE, "worker"), "{{worker}}"),
                ),
                lines("Token hit rate", "Of prompt tokens.", RATIO, Query(_TOKEN_HITS, "{{worker}}")),
                lines(
                    "P99 TTFT",
                    "By worker.",
                    SECONDS,
                    Query(quantile("0.99", names.TTFT, "worker"), "{{worker}}"),
                    log=True,
                ),
            ),
        ),
        (
            "What the router's choices cost",
            (
                lines(
                    "Regret",
                    "Seconds lost a second against the best worker there was when a request was routed.",
                    SECONDS_S,
                    Query(rate(names.ROUTING_REGRET, "worker"), "{{worker}}"),
                    stacked=True,
                ),
                lines(
                    "Regret of a decision",
                    "Mean, by the worker that was chosen.",
                    SECONDS,
                    Query(_REGRET, "{{worker}}"),
                ),
                lines(
                    "Hotspots",
                    "Found in the newest minutes, by kind (empty: why cannot be told).",
                    PLAIN,
                    Query(total(names.HOTSPOTS, "worker", "kind"), "{{worker}} {{kind}}"),
                ),
                lines(
                    "Time a decision takes",
                    "P99, by policy.",
                    SECONDS,
                    Query(quantile("0.99", names.ROUTE_DECISION, "policy"), "{{policy}}"),
                    log=True,
                ),
                bars(
                    "Hottest prefix by worker",
                    "Requests a second; one worker with a prefix of its own is where affinity ends.",
                    REQUESTS_S,
                    Query(f"topk(20, {rate(names.HOT_PREFIX_REQUESTS, 'worker', 'prefix')})", "{{worker}} {{prefix}}"),
                ),
                lines(
                    "Open requests",
                    "Routed and without an end, and how long the oldest is open.",
                    PLAIN,
                    Query(names.REQUESTS_OPEN.name, "open"),
                    Query(names.OLDEST_OPEN.name, "oldest, s"),
                ),
            ),
        ),
        (
            "Raw events",
            (
                api_table(
                    "Hotspots of this time",
                    "Which worker got more than it can serve, what that cost, and why; judged when the panel asks, within a few seconds.",
                    "/api/v1/hotspots",
                    "hotspots",
                    Column("kind", "kind"),
                    Column("subject.id", "worker"),
                    Column("interval.start_ns", "from (ns)", "number", is_instant=True),
                    Column("regret_s", "regret", "number", SECONDS),
                    Column("num_requests", "requests", "number"),
                    Column("statement", "statement"),
                    chosen_by=("worker",),
                ),
                api_table(
                    "Open requests",
                    "What is routed and has not ended, the longest first.",
                    "/api/v1/requests",
                    "requests",
                    Column("request_id", "request"),
                    Column("open_s", "open for", "number", SECONDS),
                    Column("worker", "worker"),
                    Column("router", "router"),
                    params={"state": "open"},
                    chosen_by=("worker",),
                    in_window=False,
                ),
            ),
        ),
        (
            "Machines",
            (
                lines(
                    "GPU busy",
                    "Newest step, where the engine tells it.",
                    RATIO,
                    Query(largest(names.GPU_UTILIZATION, "worker"), "{{worker}}"),
                ),
                lines(
                    "GPU memory",
                    "Newest step, where the engine tells it.",
                    RATIO,
                    Query(largest(names.GPU_MEMORY, "worker"), "{{worker}}"),
                ),
            ),
        ),
    ),
    refresh="5m",
)
