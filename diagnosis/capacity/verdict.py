"""Would more KV blocks have kept the prefixes? A sentence and a curve, from the requests of a suspect window.

Idea: the prompt blocks that requests asked for are replayed at the size the engine has, at more, and without an end.
The replay at its own size stands beside what the engine really reused, so that the replay's error shows: an engine
also needs blocks for generated tokens and for what runs at once, and therefore reuses less than the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diagnosis.capacity.curve import KNEE_SHARE, CapacityPoint, smallest_size_for
from diagnosis.capacity.traces import CacheLoad, cache_loads, common, curve_over

if TYPE_CHECKING:
    import pyarrow as pa

GROWTH = (1.0, 1.25, 1.5, 2.0)
"""Sizes asked for, as multiples of what the engine has."""


@dataclass(frozen=True, slots=True)
class CapacityVerdict:
    """What the replay says.

    status        short (more blocks keep more), enough (they would not), unknown (the engine's size is not known)
    num_blocks    usable blocks of each worker; knee_blocks reach KNEE_SHARE of the ceiling
    engine_ratio  prompt blocks that the engine really reused / blocks asked for; None where it does not say
    lost_blocks   blocks asked for again that a cache without an end would have had and this size has not
    """

    status: str
    sentence: str
    num_blocks: int | None
    knee_blocks: int | None
    ceiling: float | None
    engine_ratio: float | None
    lost_blocks: int | None
    points: tuple[CapacityPoint, ...]


def capacity_verdict(requests: pa.Table, workers: pa.Table, also: Sequence[int] = ()) -> CapacityVerdict:
    """Judge the capacity of the caches that served `requests` (columns as in `cache_loads`, and cached_tokens).

    also   further sizes (blocks of each worker) for the curve
    Raises DiagnosisError where no request names its prompt blocks.
    """
    loads = cache_loads(requests, workers)
    own = common([load.num_blocks for load in loads])
    needs = [smallest_size_for(load.trace, KNEE_SHARE, counted=load.counted) for load in loads]
    knee = max((need for need in needs if need is not None), default=None)
    sizes = {*also, *([] if own is None else [round(own * factor) for factor in GROWTH])}
    if knee is not None:
        sizes.add(knee)
    points = curve_over(loads, "lru", [*sorted(sizes), None])
    ceiling = points[-1].hit_rate
    reused = _engine_ratio(requests, loads)
    if own is None or knee is None or ceiling is None:
        why = "no prompt block is asked for twice" if knee is None else "the engine's number of blocks is not known"
        return CapacityVerdict(
            "unknown", f"Capacity cannot be judged: {why}.", own, knee, ceiling, reused, None, tuple(points)
        )
    at_own = next(point for point in points if point.blocks == own)
    lost = points[-1].hit_blocks - at_own.hit_blocks
    if knee <= own:
        sentence = f"{own:,} blocks are enough: they keep {_of(at_own, ceiling)} of all that any cache could reuse."
        return CapacityVerdict("enough", sentence, own, knee, ceiling, reused, lost, tuple(points))
    sentence = (
        f"{own:,} blocks are too few: they keep {_of(at_own, ceiling)} of the reuse that this traffic offers. "
        f"{knee:,} blocks (+{knee / own - 1:.0%}) would keep {KNEE_SHARE:.0%} of it."
    )
    return CapacityVerdict("short", sentence, own, knee, ceiling, reused, lost, tuple(points))


def _of(point: CapacityPoint, ceiling: float) -> str:
    return f"{(point.hit_rate or 0.0) / ceiling:.0%}"


def _engine_ratio(requests: pa.Table, loads: list[CacheLoad]) -> float | None:
    """Blocks the engine reused / blocks asked for, over the requests that the replay counts."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    block_tokens = common([load.block_tokens for load in loads])
    if block_tokens is None:
        return None
    counted = requests.filter(pc.is_valid(requests.column("prompt_blocks")))
    cached = counted.column("cached_tokens").cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    blocks = pc.list_value_length(counted.column("prompt_blocks")).to_numpy(zero_copy_only=False)
    warm_up = np.array([dict(pairs or ()).get("phase") == "warmup" for pairs in counted.column("labels").to_pylist()])
    known = ~np.isnan(cached) & ~warm_up
    return float((cached[known] // block_tokens).sum() / blocks[known].sum()) if blocks[known].sum() else None
