"""The prefix cache: three hit rates that are three numbers, by worker and tier, and the prefixes that matter."""

from __future__ import annotations

from typing import Final

from dashboards.frame import Board
from dashboards.parts import PLAIN, RATIO, REQUESTS_S, TOKENS_S, Query, bars, lines, number
from dashboards.promql import rate, ratio
from store import metric_catalogue as names


def _request_hits(*by: str) -> str:
    return ratio(rate(names.CACHE_REQUESTS, *by, reused="some"), rate(names.CACHE_REQUESTS, *by))


def _token_hits(*by: str) -> str:
    return ratio(rate(names.PREFIX_HIT_TOKENS, *by), rate(names.CACHE_PROMPT_TOKENS, *by))


_BY_PREFIX: Final = ratio(rate(names.HOT_PREFIX_HIT_TOKENS, "prefix"), rate(names.HOT_PREFIX_PROMPT_TOKENS, "prefix"))
_BY_TENANT: Final = ratio(rate(names.TENANT_HIT_TOKENS, "tenant"), rate(names.TENANT_PROMPT_TOKENS, "tenant"))

BOARD: Final = Board(
    "prefix_cache",
    "prefix cache",
    "Request hit rate, token hit rate and reused tokens; by worker, tier, prefix and tenant.",
    (
        (
            "Three numbers",
            (
                number(
                    "Request hit rate",
                    "Share of requests with any reuse, of those whose cached tokens are told.",
                    RATIO,
                    _request_hits(),
                    span=8,
                ),
                number(
                    "Token hit rate",
                    "Share of prompt tokens that were served from the cache.",
                    RATIO,
                    _token_hits(),
                    span=8,
                ),
                number(
                    "Reused tokens",
                    "Prompt tokens served from the cache, a second.",
                    TOKENS_S,
                    rate(names.PREFIX_HIT_TOKENS),
                    span=8,
                ),
            ),
        ),
        (
            "Over time",
            (
                lines(
                    "Requests by hit class",
                    "hit, partial, miss; empty: not told.",
                    REQUESTS_S,
                    Query(rate(names.TTFT, "hit", series=names.TTFT.count), "{{hit}}"),
                    stacked=True,
                ),
                lines(
                    "Prompt tokens",
                    "Where they came from: computed, or cached.",
                    TOKENS_S,
                    Query(rate(names.COMPUTED_TOKENS), "computed"),
                    Query(rate(names.PREFIX_HIT_TOKENS), "cached"),
                    stacked=True,
                ),
                lines(
                    "Token hit rate by worker",
                    "A worker that hits more and waits longer is an affinity hotspot.",
                    RATIO,
                    Query(_token_hits("worker"), "{{worker}}"),
                ),
                lines(
                    "Request hit rate by worker",
                    "Share of requests with any reuse.",
                    RATIO,
                    Query(_request_hits("worker"), "{{worker}}"),
                ),
                lines(
                    "Hit tokens by tier",
                    "Where the engine splits them: device, host, remote.",
                    TOKENS_S,
                    Query(rate(names.TIER_HIT_TOKENS, "tier"), "{{tier}}"),
                    stacked=True,
                ),
                lines(
                    "Block events",
                    "Stored, hit, evicted, loaded, offloaded.",
                    "blocks/s",
                    Query(rate(names.BLOCK_CHANGES, "change"), "{{change}}"),
                ),
            ),
        ),
        (
            "Who reuses",
            (
                bars(
                    "Most asked for prefixes",
                    "Requests a second of the hottest prefixes; the rest is `other`.",
                    REQUESTS_S,
                    Query(rate(names.HOT_PREFIX_REQUESTS, "prefix"), "{{prefix}}"),
                ),
                lines("Token hit rate by prefix", "Of the hottest prefixes.", RATIO, Query(_BY_PREFIX, "{{prefix}}")),
                lines("Token hit rate by tenant", "Of the largest tenants.", RATIO, Query(_BY_TENANT, "{{tenant}}")),
                lines(
                    "Share of self hits",
                    "Blocks hit by their own preempted request, of all block hits: not reuse.",
                    PLAIN,
                    Query(rate(names.BLOCK_SELF_HITS, "worker"), "{{worker}}: self hits/s"),
                ),
            ),
        ),
    ),
    variables=("model", "worker", "tenant"),
)
