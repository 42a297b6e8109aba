"""The collector's health: can what the other dashboards say be believed?"""

from __future__ import annotations

from typing import Final

from dashboards.frame import Board
from dashboards.parts import BYTES, PLAIN, RATIO, SECONDS, SECONDS_S, Query, lines, number
from dashboards.promql import quantile, rate, total
from store import metric_catalogue as names

_FULL: Final = f"{names.INGEST_QUEUE.name} / {names.INGEST_QUEUE_LIMIT.name}"

BOARD: Final = Board(
    "health",
    "collector health",
    "Ingest, queue, commits, senders' lag and clocks, gaps, refusals, disk, and how current the ledger is.",
    (
        (
            "Now",
            (
                number("Rows", "Committed a second.", "rows/s", rate(names.INGEST_ROWS)),
                number(
                    "Queue",
                    "Batches on their way to disk, of those that fit; full means 429.",
                    RATIO,
                    _FULL,
                    bad_from=0.8,
                ),
                number(
                    "P99 commit",
                    "From handing a batch to the store to its commit.",
                    SECONDS,
                    quantile("0.99", names.INGEST_COMMIT),
                    bad_from=1.0,
                ),
                number(
                    "Worst lag",
                    "Receipt of a sender's latest batch minus its newest row.",
                    SECONDS,
                    f"max({names.SOURCE_LAG.name})",
                    bad_from=30.0,
                ),
                number(
                    "Contradictions",
                    "Checks of the telemetry that contradict each other now.",
                    PLAIN,
                    total(names.CONTRADICTIONS),
                    bad_from=1.0,
                ),
                number(
                    "Ledger is behind",
                    "Time since the newest instant up to which ended requests were split.",
                    SECONDS,
                    f"time() - {names.LEDGER_NEWEST.name}",
                    bad_from=180.0,
                ),
            ),
        ),
        (
            "Ingest",
            (
                lines(
                    "Rows by kind",
                    "Committed.",
                    "rows/s",
                    Query(rate(names.INGEST_ROWS, "kind"), "{{kind}}"),
                    stacked=True,
                ),
                lines(
                    "Batches",
                    "By how they ended.",
                    "ops",
                    Query(rate(names.INGEST_BATCHES, "result"), "{{result}}"),
                    stacked=True,
                ),
                lines(
                    "Commit time",
                    "Median and P99.",
                    SECONDS,
                    Query(quantile("0.5", names.INGEST_COMMIT), "P50"),
                    Query(quantile("0.99", names.INGEST_COMMIT), "P99"),
                    log=True,
                ),
                lines(
                    "Queue and memory",
                    "Share of what fits.",
                    RATIO,
                    Query(_FULL, "batches"),
                    Query(f"{names.INGEST_MEMORY.name} / {names.INGEST_MEMORY_LIMIT.name}", "bytes"),
                ),
                lines(
                    "Bytes received", "Bodies of batches, as sent.", "Bps", Query(rate(names.INGEST_BYTES), "bodies")
                ),
                lines(
                    "Time spent on counting",
                    "For this page, a second: what these metrics cost.",
                    SECONDS_S,
                    Query(rate(names.INGEST_COUNTING), "counting"),
                ),
                lines(
                    "Refused",
                    "Rows of refused batches, and batches, by reason.",
                    PLAIN,
                    Query(rate(names.INGEST_REJECTED, "reason"), "batches/s: {{reason}}"),
                    Query(rate(names.INGEST_REJECTED_ROWS, "kind", "reason"), "{{kind}} rows/s: {{reason}}"),
                ),
                lines(
                    "Ignored columns",
                    "Rows that carried a column not in the contract.",
                    "rows/s",
                    Query(rate(names.INGEST_IGNORED, "column"), "{{column}}"),
                ),
                lines(
                    "OTLP",
                    "Spans and points by what became of them.",
                    PLAIN,
                    Query(rate(names.INGEST_SPANS, "result"), "spans/s: {{result}}"),
                    Query(rate(names.INGEST_POINTS, "result"), "points/s: {{result}}"),
                ),
                lines(
                    "Read queries",
                    "P99 by route.",
                    SECONDS,
                    Query(quantile("0.99", names.QUERY, "route"), "{{route}}"),
                    log=True,
                ),
            ),
        ),
        (
            "Senders",
            (
                lines(
                    "Lag",
                    "Receipt of the latest batch minus its newest row.",
                    SECONDS,
                    Query(f"max by (source) ({names.SOURCE_LAG.name})", "{{source}}"),
                ),
                lines(
                    "Silent for",
                    "Time since a sender's latest batch.",
                    SECONDS,
                    Query(f"time() - max by (source) ({names.SOURCE_RECEIVED.name})", "{{source}}"),
                ),
                lines(
                    "Newest row",
                    "Age of the newest row of each sender.",
                    SECONDS,
                    Query(f"time() - max by (source) ({names.SOURCE_NEWEST.name})", "{{source}}"),
                ),
                lines(
                    "Clock",
                    "A sender's clock minus the collector's, and how far off that may be.",
                    SECONDS,
                    Query(f"max by (source) ({names.SOURCE_OFFSET.name})", "{{source}} offset"),
                    Query(f"max by (source) ({names.SOURCE_ERROR.name})", "{{source}} error"),
                ),
                lines(
                    "Missing batches",
                    "Numbers skipped by a sender's newest epoch so far.",
                    PLAIN,
                    Query(f"max by (source) ({names.SOURCE_MISSING.name})", "{{source}}"),
                ),
                lines(
                    "Gaps",
                    "Senders that said that they lost rows, and how many.",
                    PLAIN,
                    Query(rate(names.GAP_MARKS, "source"), "{{source}} gaps/s"),
                    Query(rate(names.GAP_ROWS, "source"), "{{source}} rows/s"),
                ),
                lines(
                    "Oldest step",
                    "Age of each worker's newest step: its gauges are as old.",
                    SECONDS,
                    Query(f"time() - max by (worker) ({names.NEWEST_STEP.name})", "{{worker}}"),
                ),
                lines(
                    "Contradictions by check",
                    "1 while counters, events, client and engine contradict each other.",
                    PLAIN,
                    Query(f"max by (check) ({names.CONTRADICTIONS.name})", "{{check}}"),
                ),
            ),
        ),
        (
            "Store and ledger",
            (
                lines(
                    "Disk",
                    "Bytes of the store, its budget (where there is one), and what is free beside it.",
                    BYTES,
                    Query(names.STORE_BYTES.name, "store"),
                    Query(names.STORE_BUDGET.name, "budget"),
                    Query(names.STORE_FREE.name, "free on the disk"),
                ),
                lines(
                    "Rows stored",
                    "Rows in the store, by kind.",
                    PLAIN,
                    Query(f"max by (kind) ({names.STORE_ROWS.name})", "{{kind}}"),
                    log=True,
                ),
                lines(
                    "Requests split by the ledger",
                    "A second, by metric.",
                    "reqps",
                    Query(rate(names.CAUSE_REQUESTS, "metric", worker=".*"), "{{metric}}"),
                ),
                lines(
                    "Left out of the ledger",
                    "Requests that were too long or too many, and passes that failed.",
                    PLAIN,
                    Query(rate(names.LEDGER_SKIPPED, "reason"), "{{reason}}"),
                ),
                lines(
                    "Diagnoses", "Made, by their status.", "ops", Query(rate(names.FINDINGS, "result"), "{{result}}")
                ),
                lines(
                    "Memory of the collector",
                    "Resident.",
                    BYTES,
                    Query("process_resident_memory_bytes", "{{instance}}"),
                ),
            ),
        ),
    ),
    variables=(),
)
