"""KV capacity: is there room, what is pushed out, and does it come back."""

from __future__ import annotations

from typing import Final

from dashboards.frame import Board
from dashboards.parts import BLOCKS_S, PLAIN, RATIO, SECONDS, SECONDS_S, TOKENS_S, Query, heat, lines
from dashboards.promql import INTERVAL, largest, quantile, rate, ratio, select, total
from store import metric_catalogue as names

_EVICTIONS: Final = f"max by (worker) (rate({select(names.BLOCK_EVICTIONS)}[{INTERVAL}]))"
_STORED: Final = rate(names.BLOCK_CHANGES, "worker", change="stored", tier="|device")
_WASTED: Final = f"{rate(names.CAUSE_SECONDS, 'cause', metric='ttft', cause='premature_eviction|preemption_recompute|admission_blocked_on_blocks|eviction_overhead')}"

BOARD: Final = Board(
    "kv_capacity",
    "KV capacity",
    "Blocks by state, evictions, residence against reuse gap, preemption: is there room for what comes back?",
    (
        (
            "Room",
            (
                lines(
                    "Blocks by state",
                    "Newest step of each worker: used by live requests, cached and reusable, free.",
                    PLAIN,
                    Query(total(names.KV_BLOCKS, "state"), "{{state}}"),
                    Query(total(names.KV_CAPACITY), "capacity"),
                    stacked=False,
                ),
                lines(
                    "Usage by worker",
                    "Blocks of live requests over all usable ones.",
                    RATIO,
                    Query(largest(names.KV_USAGE, "worker"), "{{worker}}"),
                ),
                lines(
                    "Free blocks by worker",
                    "Neither used nor cached; 0 is normal for a warm cache, used = capacity is not.",
                    PLAIN,
                    Query(total(names.KV_BLOCKS, "worker", state="free"), "{{worker}}"),
                ),
                lines(
                    "Fragmentation by worker",
                    "Token slots allocated and unused, over the slots of used blocks.",
                    RATIO,
                    Query(largest(names.KV_FRAGMENTATION, "worker"), "{{worker}}"),
                ),
            ),
        ),
        (
            "Eviction",
            (
                lines(
                    "Evictions by worker",
                    "Cached blocks reclaimed; steps and block events may both tell them, the larger is shown.",
                    BLOCKS_S,
                    Query(_EVICTIONS, "{{worker}}"),
                ),
                lines(
                    "Premature evictions by worker",
                    "Evicted blocks that the same worker had to compute and store again.",
                    BLOCKS_S,
                    Query(rate(names.PREMATURE_EVICTIONS, "worker"), "{{worker}}"),
                ),
                lines(
                    "Tokens computed twice",
                    "Tokens in blocks that were evicted too early, and tokens computed again after a preemption.",
                    TOKENS_S,
                    Query(rate(names.PREMATURE_EVICTION_TOKENS), "premature eviction"),
                    Query(rate(names.RECOMPUTED_TOKENS), "preemption"),
                ),
                lines(
                    "Share of stored blocks that came back",
                    "Premature evictions over blocks stored: what the cache computes only because it forgot.",
                    RATIO,
                    Query(ratio(rate(names.PREMATURE_EVICTIONS, "worker"), _STORED), "{{worker}}"),
                ),
            ),
        ),
        (
            "Residence against reuse gap",
            (
                lines(
                    "How long it keeps, how long it would have to",
                    "Where the reuse gap lies above the residence, blocks are gone when they are asked for again.",
                    SECONDS,
                    Query(quantile("0.5", names.BLOCK_RESIDENCE), "residence, median"),
                    Query(quantile("0.1", names.BLOCK_RESIDENCE), "residence, P10"),
                    Query(quantile("0.5", names.BLOCK_REUSE_GAP), "reuse gap of hits, median"),
                    Query(quantile("0.9", names.BLOCK_REUSE_GAP), "reuse gap of hits, P90"),
                    log=True,
                ),
                heat("Age of blocks when evicted", "Residence in the cache.", names.BLOCK_RESIDENCE),
            ),
        ),
        (
            "Preemption and cost",
            (
                lines(
                    "Preemptions by worker",
                    "Running requests that gave their blocks back.",
                    "ops",
                    Query(rate(names.PREEMPTIONS, "worker"), "{{worker}}"),
                ),
                lines(
                    "Self hits",
                    "Tokens of its own that a preempted request found again; never prefix hits.",
                    TOKENS_S,
                    Query(rate(names.SELF_HIT_TOKENS, "worker"), "{{worker}}"),
                ),
                lines(
                    "Finding room",
                    "Time of steps spent on allocating and evicting blocks.",
                    SECONDS_S,
                    Query(rate(names.STEP_PART, "worker", part="alloc"), "{{worker}}"),
                ),
                lines(
                    "TTFT seconds that blocks cost",
                    "Rows of the ledger that more blocks would take away.",
                    SECONDS_S,
                    Query(f"{_WASTED} > 0", "{{cause}}"),
                    stacked=True,
                ),
            ),
        ),
    ),
)
