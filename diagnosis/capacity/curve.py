"""Hit rate against cache size: what more (or fewer) KV blocks would change, replayed over the blocks asked for.

Hit rate = blocks of contiguous resident prefixes / blocks requested, as `block_cache` defines them. The ceiling is the
rate of a cache that never evicts; the knee is the size from which more blocks hardly help.

What a replay leaves out: blocks of generated tokens, and that running requests pin theirs. An engine of the same size
therefore hits less; the distance is smallest where prompts are long and few requests run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnosis.capacity.block_cache import (
    NEVER,
    BlockTrace,
    Ints,
    block_trace,
    needed_sizes,
    simulate_fifo,
    simulate_lfu,
)
from diagnosis.statistics.quantiles import nearest_rank
from engine_probe.errors import DiagnosisError

POLICIES = ("lru", "lfu", "fifo")
KNEE_SHARE = 0.9
"""The knee: fewest blocks that reach this share of the hits of an infinite cache."""
REUSE_GAP_QUANTILES = ("0.50", "0.80", "0.90", "0.99")

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """One size of the cache. blocks None: infinite. hit_rate None: no block was counted."""

    blocks: int | None
    hit_rate: float | None
    hit_blocks: int
    requested_blocks: int


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What a trace asks of a cache, before any size is chosen. Unknown is None.

    reuse_gap_s   quantile ("0.50", "0.80", "0.90", "0.99") -> seconds between two uses of the same block, nearest rank
    """

    requests: int
    blocks: int
    unique_blocks: int
    used_once_share: float | None
    reuse_share_of_top_tenth: float | None
    mean_input_tokens: float | None
    reuse_gap_s: dict[str, float | None]


def hit_rate_curve(
    requests: Any, policy: str, sizes: Sequence[int | None], *, counted: npt.ArrayLike | None = None
) -> list[CapacityPoint]:
    """Hit rate of each size (blocks; None = infinite), in the order of `sizes`.

    requests  BlockTrace, iterable of hash lists, or Arrow list column, in order of arrival
    policy    lru, lfu or fifo
    counted   [num_requests] bool: requests that count; the others (a warm-up) only fill the cache. Default: all

    Raises DiagnosisError on an unknown policy or a size below 1.
    """
    if policy not in POLICIES:
        raise DiagnosisError(f"no eviction policy '{policy}' here; known: {', '.join(POLICIES)}", policy=policy)
    for size in sizes:
        if size is not None and size < 1:
            raise DiagnosisError(f"a cache of {size} blocks holds nothing; give 1 or more", blocks=size)
    trace = requests if isinstance(requests, BlockTrace) else block_trace(requests)
    counts = np.ones(trace.num_requests, dtype=bool) if counted is None else np.asarray(counted, dtype=bool)
    if len(counts) != trace.num_requests:
        raise DiagnosisError(f"counted names {len(counts)} requests, the trace has {trace.num_requests}")
    requested = int(np.diff(trace.offsets)[counts].sum())
    hits = _hits_of_sizes(trace, policy, sizes, counts)
    return [
        CapacityPoint(size, hit / requested if requested else None, hit, requested)
        for size, hit in zip(sizes, hits, strict=True)
    ]


def smallest_size_for(requests: Any, share: float, *, counted: npt.ArrayLike | None = None) -> int | None:
    """Fewest blocks with which LRU reaches `share` (0 < share <= 1) of an infinite cache's hits; None: it has none."""
    trace = requests if isinstance(requests, BlockTrace) else block_trace(requests)
    needed = needed_sizes(trace)
    if counted is not None:
        needed = needed[np.asarray(counted, dtype=bool)[trace.request_of_block]]
    needed = np.sort(needed[needed != NEVER])
    if not len(needed):
        return None
    return int(needed[min(len(needed) - 1, int(np.ceil(share * len(needed))) - 1)])


def trace_facts(trace: BlockTrace, arrival_s: F64 | None, input_tokens: F64 | None) -> TraceFacts:
    """Describe `trace`.

    arrival_s [num_requests] seconds from any origin, ascending; input_tokens [num_requests], NaN where unknown.
    """
    uses = np.bincount(trace.ids, minlength=trace.num_unique)
    reuses = np.sort(uses - 1)[::-1]
    top_tenth = reuses[: max(1, len(reuses) // 10)].sum()
    known = np.array([]) if input_tokens is None else input_tokens[~np.isnan(input_tokens)]
    gaps = np.array([]) if arrival_s is None else _reuse_gaps(trace, arrival_s)
    return TraceFacts(
        requests=trace.num_requests,
        blocks=len(trace.ids),
        unique_blocks=trace.num_unique,
        used_once_share=float((uses == 1).mean()) if len(uses) else None,
        reuse_share_of_top_tenth=float(top_tenth / reuses.sum()) if reuses.sum() else None,
        mean_input_tokens=float(known.mean()) if len(known) else None,
        reuse_gap_s={q: nearest_rank(gaps, q) if len(gaps) else None for q in REUSE_GAP_QUANTILES},
    )


def _reuse_gaps(trace: BlockTrace, arrival_s: F64) -> F64:
    """[num_reuses] seconds between two uses of the same block, one after the other."""
    order = np.argsort(trace.ids, kind="stable")
    at = arrival_s[trace.request_of_block][order]
    same = np.diff(trace.ids[order]) == 0
    gaps: F64 = np.diff(at)[same]
    return gaps


def _hits_of_sizes(
    trace: BlockTrace, policy: str, sizes: Sequence[int | None], counts: npt.NDArray[np.bool_]
) -> list[int]:
    # Nothing is evicted from a cache that holds every block: all policies are one there.
    is_ceiling = [size is None or size >= trace.num_unique for size in sizes]
    needed: Ints = np.empty(0, dtype=np.int64)
    if policy == "lru" or any(is_ceiling):
        needed = np.sort(needed_sizes(trace)[counts[trace.request_of_block]])
    simulate = simulate_lfu if policy == "lfu" else simulate_fifo
    hits = []
    for size, ceiling in zip(sizes, is_ceiling, strict=True):
        if policy == "lru" or ceiling:
            limit = NEVER - 1 if size is None else size
            hits.append(int(np.searchsorted(needed, limit, side="right")))
        else:
            hits.append(simulate(trace, size or 0, counts.tolist()))
    return hits
