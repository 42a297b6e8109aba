"""Latency by phase and hit class: what users wait for, and in which phase."""

from __future__ import annotations

from typing import Final

from dashboards.frame import Board
from dashboards.parts import SECONDS, Query, heat, lines
from dashboards.promql import mean, quantile, rate, ratio
from store import metric_catalogue as names


def _quantiles(family: names.Family) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, family), f"P{100 * float(q):g}") for q in ("0.5", "0.9", "0.99"))


_HITS: Final = "hit: every reusable block was reused; partial; miss: none; empty: cached tokens or block size not told."
_TENANT_MISSED: Final = ratio(
    rate(names.TENANT_SLO_REQUESTS, "tenant", outcome="missed"), rate(names.TENANT_SLO_REQUESTS, "tenant")
)

BOARD: Final = Board(
    "latency",
    "latency by phase and hit class",
    "TTFT, ITL, TPOT, E2E and the phases they are made of.",
    (
        (
            "What users feel",
            (
                lines("TTFT", "Arrival to first token.", SECONDS, *_quantiles(names.TTFT), log=True),
                lines("ITL", "Gap between neighbouring tokens.", SECONDS, *_quantiles(names.ITL), log=True),
                lines(
                    "TPOT",
                    "(last - first token) / (output tokens - 1), one a request.",
                    SECONDS,
                    *_quantiles(names.TPOT),
                    log=True,
                ),
                lines("E2E", "Arrival to last token.", SECONDS, *_quantiles(names.E2E), log=True),
                heat(
                    "TTFT, spread",
                    "Requests by TTFT; a point is a request (exemplar) and leads to its timeline.",
                    names.TTFT,
                ),
                heat(
                    "E2E, spread",
                    "Requests by E2E; a point is a request (exemplar) and leads to its timeline.",
                    names.E2E,
                ),
            ),
        ),
        (
            "By hit class",
            (
                lines(
                    "P99 TTFT by hit class",
                    _HITS,
                    SECONDS,
                    Query(quantile("0.99", names.TTFT, "hit"), "{{hit}}"),
                    log=True,
                ),
                lines("Mean TTFT by hit class", _HITS, SECONDS, Query(mean(names.TTFT, "hit"), "{{hit}}")),
                lines("Mean prefill by hit class", _HITS, SECONDS, Query(mean(names.PREFILL, "hit"), "{{hit}}")),
                lines("Mean queue by hit class", _HITS, SECONDS, Query(mean(names.QUEUE, "hit"), "{{hit}}")),
            ),
        ),
        (
            "Phases before the first token",
            (
                lines(
                    "Mean of each phase",
                    "Phases that were told; what no engine tells has no line.",
                    SECONDS,
                    Query(mean(names.QUEUE), "queue"),
                    Query(mean(names.CACHE_LOOKUP), "cache lookup"),
                    Query(mean(names.KV_LOAD), "load from a tier"),
                    Query(mean(names.KV_TRANSFER), "transfer"),
                    Query(mean(names.PREFILL), "prefill"),
                ),
                lines(
                    "P99 queue",
                    "Waiting for the first schedule, by worker.",
                    SECONDS,
                    Query(quantile("0.99", names.QUEUE, "worker"), "{{worker}}"),
                    log=True,
                ),
                lines(
                    "P99 prefill",
                    "Computing the prompt, by worker.",
                    SECONDS,
                    Query(quantile("0.99", names.PREFILL, "worker"), "{{worker}}"),
                    log=True,
                ),
                lines(
                    "P99 cache lookup",
                    "Looking the prompt up in the prefix cache, by worker.",
                    SECONDS,
                    Query(quantile("0.99", names.CACHE_LOOKUP, "worker"), "{{worker}}"),
                    log=True,
                ),
            ),
        ),
        (
            "Tenants",
            (
                lines(
                    "P99 TTFT by tenant",
                    "The largest tenants; the rest is `other`.",
                    SECONDS,
                    Query(quantile("0.99", names.TENANT_TTFT, "tenant"), "{{tenant}}"),
                    log=True,
                ),
                lines(
                    "SLO missed by tenant",
                    "Share of a tenant's requests.",
                    "percentunit",
                    Query(_TENANT_MISSED, "{{tenant}}"),
                ),
            ),
        ),
    ),
    variables=("model", "worker", "tenant"),
)
