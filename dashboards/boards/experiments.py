"""Experiments: two runs (or windows) beside each other, as a diagnosis judges them; raw events alone."""

from __future__ import annotations

from typing import Final

from dashboards.frame import Board
from dashboards.infinity import Column
from dashboards.parts import RATIO, SECONDS, api_table

_PAIR: Final = {"baseline": "$baseline", "suspect": "$suspect"}

BOARD: Final = Board(
    "experiments",
    "experiments",
    "Two runs or windows: type their names (or START/END) above. Runs are history and not in Prometheus, so all of this is raw events.",
    (
        (
            "Baseline against suspect",
            (
                api_table(
                    "Verdict",
                    "Which causes own the change; judged when the panel asks.",
                    "/api/v1/diagnosis",
                    "causes",
                    Column("cause", "cause"),
                    Column("subject.id", "subject"),
                    Column("share_p99", "share of P99", "number", RATIO),
                    Column("confidence_word", "confidence"),
                    Column("remedy", "remedy"),
                    params=_PAIR,
                    in_window=False,
                ),
                api_table(
                    "Attribution",
                    "Rows sum to the change.",
                    "/api/v1/diagnosis",
                    "attribution",
                    Column("cause", "cause"),
                    Column("mean_s", "mean", "number", SECONDS),
                    Column("p99_s", "P99", "number", SECONDS),
                    Column("es_s", "expected shortfall", "number", SECONDS),
                    params=_PAIR,
                    in_window=False,
                    span=12,
                ),
                api_table(
                    "Side effects",
                    "What happened to the other metrics meanwhile.",
                    "/api/v1/diagnosis",
                    "side_effects",
                    Column("metric", "metric"),
                    Column("baseline", "baseline", "number"),
                    Column("suspect", "suspect", "number"),
                    params=_PAIR,
                    in_window=False,
                    span=12,
                ),
                api_table(
                    "Quality",
                    "Do counters, events and clocks agree?",
                    "/api/v1/diagnosis",
                    "quality",
                    Column("check", "check"),
                    Column("status", "status"),
                    Column("statement", "statement"),
                    params=_PAIR,
                    in_window=False,
                ),
            ),
        ),
        (
            "Slowest requests of the suspect",
            (
                api_table(
                    "Slowest to the first token",
                    "The id leads to the request's timeline.",
                    "/api/v1/requests",
                    "requests",
                    Column("request_id", "request"),
                    Column("worker", "worker"),
                    Column("ttft_s", "TTFT", "number", SECONDS),
                    Column("queue_s", "queue", "number", SECONDS),
                    Column("prefill_s", "prefill", "number", SECONDS),
                    Column("num_preemptions", "preemptions", "number"),
                    params={"window": "$suspect", "sort": "ttft", "order": "desc", "limit": "20"},
                    in_window=False,
                ),
                api_table(
                    "Capacity of the suspect",
                    "Hit rate against the number of blocks, by replay of what its prompts asked for.",
                    "/api/v1/capacity",
                    "points",
                    Column("blocks", "blocks", "number"),
                    Column("hit_rate", "hit rate", "number", RATIO),
                    params={"window": "$suspect"},
                    in_window=False,
                ),
            ),
        ),
        (
            "Marks of this time",
            (
                api_table(
                    "Marks",
                    "Experiments, deployments, faults, changes.",
                    "/api/v1/marks",
                    "marks",
                    Column("at_ns", "at (ns)", "number", is_instant=True),
                    Column("mark", "mark"),
                    Column("subject", "subject"),
                    Column("text", "text"),
                ),
            ),
        ),
    ),
    variables=(),
    typed=(("baseline", "baseline: run or START/END"), ("suspect", "suspect: run or START/END")),
    refresh="",
)
