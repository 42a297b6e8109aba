"""What routing does to the prefix caches of several workers: a trace replayed, request after request, under one policy.

Each worker has an LRU cache of its own, as `block_cache` defines it: a hit is the contiguous run of resident blocks from
the first one; on access the deepest block is touched first. The router knows every cache exactly and at once. Load is the
blocks that a worker had to compute so far, summed up: nothing ends, so the ratio of the largest to the mean says how evenly
the *work* was spread. With one worker the replay is the one of `capacity`. Pooled is the ceiling: one cache of all blocks.

What it leaves out: time, and that running requests hold blocks. Source of the method: ground truth of the Mooncake trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from diagnosis.capacity.block_cache import BlockTrace
from diagnosis.capacity.curve import hit_rate_curve
from engine_probe.engine.fleet.policies import Candidates, make_policy, prefix_key
from engine_probe.engine.fleet.prefix_index import PrefixIndex
from engine_probe.errors import DiagnosisError


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker after the replay. hit_rate None: no block was asked of it.

    load_blocks      blocks it computed, warm-up included; load_ratio: that / the mean of all workers (None: nobody did)
    resident_blocks  in its cache at the end
    """

    worker: int
    requests: int
    requested_blocks: int
    hit_blocks: int
    hit_rate: float | None
    load_blocks: int
    load_ratio: float | None
    resident_blocks: int


@dataclass(frozen=True, slots=True)
class RoutingReplay:
    """The whole fleet. Unknown is None: no block was counted, or nothing was computed.

    blocks           of each worker; None: without an end
    pooled_hit_rate  of one cache with the blocks of all workers
    """

    routing: str
    blocks: int | None
    hit_rate: float | None
    hit_blocks: int
    requested_blocks: int
    max_over_mean_load: float | None
    pooled_hit_rate: float | None
    workers: tuple[WorkerLoad, ...]


def replay_routing(
    trace: BlockTrace,
    routing: str,
    num_workers: int,
    blocks: int | None,
    *,
    seed: int = 0,
    ties: str = "random",
    counted: Sequence[bool] | None = None,
    sessions: Sequence[Hashable] | None = None,
    block_tokens: int = 512,
    watch: Callable[[int], None] | None = None,
) -> RoutingReplay:
    """Replay `trace` over `num_workers` caches of `blocks` blocks.

    ties      how the policy breaks them: random or lowest
    counted   [num_requests] requests that count in the rates; the others (a warm-up) fill caches and load workers. Default: all
    sessions  [num_requests] what `sticky` sticks to; None where unknown: then the request's own prefix
    block_tokens   tokens in a block: what `sticky` goes by is a matter of tokens
    watch     hears how many requests are done
    Raises DiagnosisError on no worker, no block, lists that do not fit; UsageError on an unknown policy.
    """
    if num_workers < 1:
        raise DiagnosisError(f"{num_workers} workers serve nobody; give 1 or more", workers=num_workers)
    if blocks is not None and blocks < 1:
        raise DiagnosisError(f"a cache of {blocks} blocks holds nothing; give 1 or more", blocks=blocks)
    for name, given in (("counted", counted), ("sessions", sessions)):
        if given is not None and len(given) != trace.num_requests:
            raise DiagnosisError(f"{name} names {len(given)} requests, the trace has {trace.num_requests}")
    policy = make_policy(routing, seed=seed, ties=ties)
    fleet = _Fleet(num_workers, blocks)
    queue = [0] * num_workers
    for number, hashes in enumerate(trace.lists()):
        matched = fleet.index.match(hashes)
        session = None if sessions is None else sessions[number]
        key = session if session is not None else prefix_key(hashes, block_tokens)
        chosen = policy.choose(Candidates(matched, fleet.load, queue, len(hashes), key)).index
        fleet.serve(chosen, hashes, matched[chosen], counts=counted is None or counted[number])
        if watch is not None:
            watch(number + 1)
    pooled_size = None if blocks is None else blocks * num_workers
    [pooled] = hit_rate_curve(trace, "lru", [pooled_size], counted=counted)
    hits, requested = sum(fleet.hits), sum(fleet.requested)
    mean = sum(fleet.load) / num_workers
    return RoutingReplay(
        policy.name,
        blocks,
        hits / requested if requested else None,
        hits,
        requested,
        max(fleet.load) / mean if mean else None,
        pooled.hit_rate,
        tuple(fleet.worker(number, mean) for number in range(num_workers)),
    )


class _Fleet:
    """The caches, and what each worker did."""

    def __init__(self, num_workers: int, size: int | None) -> None:
        self.index = PrefixIndex(num_workers)
        self.load = [0] * num_workers
        self.requests = [0] * num_workers
        self.requested = [0] * num_workers
        self.hits = [0] * num_workers
        self._caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_workers)]
        self._size = size

    def serve(self, chosen: int, hashes: list[int], matched: int, *, counts: bool) -> None:
        """`chosen` answers a request of which it holds the first `matched` blocks."""
        self.requests[chosen] += 1
        self.load[chosen] += len(hashes) - matched
        if counts:
            self.requested[chosen] += len(hashes)
            self.hits[chosen] += matched
        cache, size = self._caches[chosen], self._size
        stored, evicted = [], []
        for block_hash in reversed(hashes):
            if block_hash in cache:
                cache.move_to_end(block_hash)
                continue
            if len(cache) == size:
                evicted.append(cache.popitem(last=False)[0])
            cache[block_hash] = None
            stored.append(block_hash)
        # In a full cache a prompt may evict its own tail, or its own head before that is touched and stored again: the
        # router hears what is true in the end.
        kept = [block_hash for block_hash in stored if block_hash in cache]
        self.index.removed(chosen, [block_hash for block_hash in evicted if block_hash not in cache])
        self.index.stored(chosen, kept, [None] * len(kept))

    def worker(self, number: int, mean_load: float) -> WorkerLoad:
        requested, hits, load = self.requested[number], self.hits[number], self.load[number]
        return WorkerLoad(
            number,
            self.requests[number],
            requested,
            hits,
            hits / requested if requested else None,
            load,
            load / mean_load if mean_load else None,
            len(self._caches[number]),
        )
