"""The scheduler: batches, the two queues, what they wait for, chunks, and what steps spend their time on."""

from __future__ import annotations

from typing import Final

from dashboards.frame import Board
from dashboards.parts import PLAIN, RATIO, SECONDS, SECONDS_S, TOKENS_S, Query, heat, lines
from dashboards.promql import largest, mean, quantile, rate, ratio, total
from store import metric_catalogue as names

_PROBE: Final = ratio(rate(names.STEP_PART, "worker", part="probe"), rate(names.STEP, "worker", series=names.STEP.sum))
_ACCEPTED: Final = ratio(rate(names.ACCEPTED_TOKENS, "worker"), rate(names.DRAFT_TOKENS, "worker"))

BOARD: Final = Board(
    "scheduler",
    "scheduler",
    "Batches, prefill and decode queues apart, chunks, step times, speculation and what the probe costs.",
    (
        (
            "Queues",
            (
                lines(
                    "Prefill queue",
                    "Requests that wait for their first schedule, newest step.",
                    PLAIN,
                    Query(total(names.REQUESTS_WAITING, "worker", queue="prefill"), "{{worker}}"),
                ),
                lines(
                    "Decode queue",
                    "Admitted requests that wait to go on: preempted, handed over.",
                    PLAIN,
                    Query(total(names.REQUESTS_WAITING, "worker", queue="decode"), "{{worker}}"),
                ),
                lines(
                    "What they wait for",
                    "Blocks, token budget, seats, a dependency.",
                    PLAIN,
                    Query(total(names.WAITING_ON, "on"), "{{on}}"),
                    stacked=True,
                ),
                lines(
                    "Oldest wait",
                    "Longest wait in the queue, newest step.",
                    SECONDS,
                    Query(largest(names.OLDEST_WAIT, "worker"), "{{worker}}"),
                ),
            ),
        ),
        (
            "Batches",
            (
                lines(
                    "Running",
                    "Requests in the batch of the newest step.",
                    PLAIN,
                    Query(total(names.REQUESTS_RUNNING, "worker"), "{{worker}}"),
                ),
                lines(
                    "Requests a batch",
                    "Mean over steps.",
                    PLAIN,
                    Query(mean(names.BATCH_REQUESTS, "worker"), "{{worker}}"),
                ),
                lines(
                    "Tokens a batch",
                    "Mean over steps, prefill and decode.",
                    PLAIN,
                    Query(mean(names.BATCH_TOKENS, "worker"), "{{worker}}"),
                ),
                heat("Prompt tokens a step", "Size of chunks: steps that computed prompts.", names.CHUNK_TOKENS, PLAIN),
                lines(
                    "Tokens by phase",
                    "Prefill, decode, and computed again.",
                    TOKENS_S,
                    Query(rate(names.STEP_TOKENS, "phase"), "{{phase}}"),
                    stacked=True,
                ),
                lines(
                    "Preemptions",
                    "As steps tell them.",
                    "ops",
                    Query(rate(names.STEP_PREEMPTIONS, "worker"), "{{worker}}"),
                ),
            ),
        ),
        (
            "Steps",
            (
                lines(
                    "Step time",
                    "Median and P99.",
                    SECONDS,
                    Query(quantile("0.5", names.STEP, "worker"), "{{worker}} P50"),
                    Query(quantile("0.99", names.STEP, "worker"), "{{worker}} P99"),
                    log=True,
                ),
                lines(
                    "What steps spend their time on",
                    "Parts that the engine tells; they may overlap.",
                    SECONDS_S,
                    Query(rate(names.STEP_PART, "part"), "{{part}}"),
                    stacked=True,
                ),
                lines(
                    "What the probe costs", "Recording, as a share of step time.", RATIO, Query(_PROBE, "{{worker}}")
                ),
                lines(
                    "Accepted drafts",
                    "Speculation: accepted over proposed tokens.",
                    RATIO,
                    Query(_ACCEPTED, "{{worker}}"),
                ),
            ),
        ),
    ),
)
