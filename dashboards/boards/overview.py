"""Is it good now, and if not, whose seconds are they: SLO, goodput, the ledger, findings, alerts, the slowest requests."""

from __future__ import annotations

from typing import Final

from dashboards.frame import Board
from dashboards.infinity import Column
from dashboards.parts import RATIO, REQUESTS_S, SECONDS, SECONDS_S, Query, api_table, lines, number
from dashboards.promql import VARIABLES, largest, quantile, rate, ratio
from store import metric_catalogue as names
from store.metrics import SLO_GOAL

MET: Final = rate(names.SLO_REQUESTS, outcome="met")
ALL: Final = rate(names.SLO_REQUESTS)
BAD: Final = rate(names.REQUESTS, state="failed|aborted|rejected")


def for_goal(slo_goal: float) -> Board:
    """The board; numbers turn red where more than the goal leaves went wrong."""
    return Board(
        "overview",
        "overview",
        "SLO, goodput, errors, the ledger of seconds by cause, and what kvscope found.",
        (
            (
                "Now",
                (
                    number("Goodput", "Requests a second that met every limit of their SLO.", REQUESTS_S, MET),
                    number(
                        "SLO missed",
                        f"Share of ended requests that missed their SLO; {slo_goal * 100:g} % should meet it.",
                        RATIO,
                        f"1 - {ratio(MET, ALL)}",
                        bad_from=round(1 - slo_goal, 6),
                    ),
                    number(
                        "Errors",
                        "Share of ended requests that failed, were aborted or rejected.",
                        RATIO,
                        ratio(BAD, rate(names.REQUESTS)),
                        bad_from=round(1 - slo_goal, 6),
                    ),
                    number(
                        "P99 TTFT",
                        "Arrival to first token, from histogram buckets.",
                        SECONDS,
                        quantile("0.99", names.TTFT),
                    ),
                    number(
                        "P99 TPOT", "Time per output token, one value a request.", SECONDS, quantile("0.99", names.TPOT)
                    ),
                    number(
                        "Oldest wait",
                        "Longest wait in any queue, by the newest steps.",
                        SECONDS,
                        largest(names.OLDEST_WAIT),
                    ),
                ),
            ),
            (
                "Service level",
                (
                    lines(
                        "Requests by SLO",
                        "Goodput is what met its SLO; presets and rules are settings of the collector.",
                        REQUESTS_S,
                        Query(rate(names.SLO_REQUESTS, "slo", "outcome"), "{{slo}}: {{outcome}}"),
                        stacked=True,
                    ),
                    lines(
                        "Ends that are no success",
                        "By HTTP status (where told) and reason.",
                        REQUESTS_S,
                        Query(rate(names.REQUEST_ERRORS, "status", "reason"), "{{reason}} {{status}}"),
                        stacked=True,
                    ),
                ),
            ),
            (
                "Whose seconds",
                (
                    lines(
                        "TTFT seconds by cause",
                        "The ledger as a counter: seconds of TTFT a second, by the cause that owns them. Split in the background by the same rules as a "
                        "diagnosis (docs/method.md); it lags a few seconds.",
                        SECONDS_S,
                        Query(f"{rate(names.CAUSE_SECONDS, 'cause', metric='ttft')} > 0", "{{cause}}"),
                        stacked=True,
                    ),
                    lines(
                        "Mean TTFT of a request, by cause",
                        "The same seconds over the requests that were split: what a request spends on each cause on average.",
                        SECONDS,
                        Query(
                            f"{rate(names.CAUSE_SECONDS, 'cause', metric='ttft')} / on () group_left () ({rate(names.CAUSE_REQUESTS, metric='ttft')} > 0)",
                            "{{cause}}",
                        ),
                        stacked=True,
                    ),
                ),
            ),
            (
                "Raw events",
                (
                    api_table(
                        "Findings",
                        "Verdicts on the whole fleet, newest first; the variables above do not narrow them.",
                        "/api/v1/findings",
                        "findings",
                        Column("made_ns", "made (ns)", "number", is_instant=True),
                        Column("status", "status"),
                        Column("metric", "metric"),
                        Column("verdict", "verdict"),
                        in_window=False,
                        span=12,
                    ),
                    api_table(
                        "Alerts",
                        "What the collector's evaluator and Alertmanager have told, and its state; one that names no worker, model or tenant is about all.",
                        "/api/v1/alerts",
                        "alerts",
                        Column("starts_ns", "since (ns)", "number", is_instant=True),
                        Column("state", "state"),
                        Column("labels.alertname", "alert"),
                        Column("annotations.summary", "summary"),
                        chosen_by=VARIABLES,
                        in_window=False,
                        span=12,
                    ),
                    api_table(
                        "Slowest to the first token",
                        "Requests that arrived in this time; the id leads to the request's timeline.",
                        "/api/v1/requests",
                        "requests",
                        Column("request_id", "request"),
                        Column("arrival_ns", "arrived (ns)", "number", is_instant=True),
                        Column("worker", "worker"),
                        Column("model", "model"),
                        Column("tenant", "tenant"),
                        Column("ttft_s", "TTFT", "number", SECONDS),
                        Column("queue_s", "queue", "number", SECONDS),
                        Column("prefill_s", "prefill", "number", SECONDS),
                        Column("prompt_tokens", "prompt tokens", "number"),
                        Column("cached_tokens", "cached tokens", "number"),
                        params={"sort": "ttft", "order": "desc", "limit": "20"},
                        chosen_by=VARIABLES,
                    ),
                ),
            ),
        ),
        variables=VARIABLES,
    )


BOARD: Final = for_goal(SLO_GOAL)
