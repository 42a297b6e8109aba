"""What a router believes of the workers' prefix caches: which worker holds which block.

Fed by the workers' block events, which may come late or not at all (`EventFeed`), so it can be wrong in the ways that a
real index is: blocks it has not heard of yet, blocks that are gone, branches it lost. A stored block whose parent it does
not know at that worker cannot be placed: it is counted and left out, as Dynamo's radix tree does.
Invariant: `match` is the contiguous run from the first block, per worker. Blocks are chain hashes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush

from engine_probe.errors import UsageError


class PrefixIndex:
    """Blocks of `num_workers` workers, numbered from 0."""

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise UsageError(f"an index of {num_workers} workers knows nobody; give 1 or more", workers=num_workers)
        self.num_workers = num_workers
        self._holders: dict[int, int] = {}  # block hash -> bit w is set where worker w holds it
        self._all = (1 << num_workers) - 1
        self._num_blocks = [0] * num_workers
        self.num_orphans = 0
        """Stored blocks that came without their parent, and were left out."""
        self.num_unknown = 0
        """Removed blocks that it did not know of."""

    def num_blocks(self, worker: int) -> int:
        """Blocks that this worker is believed to hold."""
        return self._num_blocks[worker]

    def match(self, hashes: Sequence[int]) -> list[int]:
        """[num_workers] leading blocks that each is believed to hold."""
        matched = [0] * self.num_workers
        holders, left = self._holders, self._all
        for depth, block_hash in enumerate(hashes):
            still = left & holders.get(block_hash, 0)
            if still != left:
                _write(matched, left & ~still, depth)
                left = still
                if not left:
                    return matched
        _write(matched, left, len(hashes))
        return matched

    def stored(self, worker: int, hashes: Sequence[int], parents: Sequence[int | None]) -> None:
        """`worker` holds these from now on. parents: of each; None for a first block."""
        bit, holders = 1 << worker, self._holders
        get, added = holders.get, 0
        placed = None  # the one before, which is the parent of nearly every one
        for block_hash, parent in zip(hashes, parents, strict=True):
            if parent is not None and parent != placed and not get(parent, 0) & bit:
                self.num_orphans += 1
                continue
            before = get(block_hash, 0)
            if not before & bit:
                holders[block_hash] = before | bit
                added += 1
            placed = block_hash
        self._num_blocks[worker] += added

    def removed(self, worker: int, hashes: Sequence[int]) -> None:
        """It gave them up. What hangs below them stays known, and counts again when they come back."""
        bit, holders = 1 << worker, self._holders
        for block_hash in hashes:
            before = holders.get(block_hash, 0)
            if not before & bit:
                self.num_unknown += 1
                continue
            self._num_blocks[worker] -= 1
            if before == bit:
                del holders[block_hash]
            else:
                holders[block_hash] = before & ~bit

    def cleared(self, worker: int) -> None:
        """It forgot all."""
        bit = 1 << worker
        self._holders = {key: rest for key, bits in self._holders.items() if (rest := bits & ~bit)}
        self._num_blocks[worker] = 0

    def reset(self) -> None:
        """The index itself forgets all (a restart of the router). Counts stay."""
        self._holders.clear()
        self._num_blocks = [0] * self.num_workers

    def check_integrity(self) -> None:
        """Raise AssertionError where the counts and the blocks disagree."""
        for worker in range(self.num_workers):
            held = sum(1 for bits in self._holders.values() if bits >> worker & 1)
            assert held == self._num_blocks[worker], f"worker {worker} holds {held}, counted {self._num_blocks[worker]}"
        assert all(0 < bits <= self._all for bits in self._holders.values())


_Event = tuple[int, int, int, str, Sequence[int], Sequence[int | None]]
"""(due_ns, number, worker, change, hashes, parents): numbers differ, so that order never looks further."""


class EventFeed:
    """Between the workers and the index: each event arrives `delay_s` later, or with probability `loss_ratio` never.

    What is lost is chosen by `seed` alone. Events of one instant arrive in the order in which they were told.
    """

    def __init__(self, index: PrefixIndex, *, delay_s: float = 0.0, loss_ratio: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= delay_s < float("inf"):
            raise UsageError(f"delay_s is {delay_s}; expected 0 or more")
        if not 0.0 <= loss_ratio <= 1.0:
            raise UsageError(f"loss_ratio is {loss_ratio}; expected 0 to 1")
        self.index = index
        self.delay_ns = round(delay_s * 1e9)
        self.loss_ratio = loss_ratio
        self._random = random.Random(seed)
        self._pending: list[_Event] = []
        self._number = 0
        self.num_lost = 0
        """Events that never arrived."""

    @property
    def num_pending(self) -> int:
        """Events under way."""
        return len(self._pending)

    def stored(self, at_ns: int, worker: int, hashes: Sequence[int], parents: Sequence[int | None]) -> None:
        """`worker` stored these blocks at this instant."""
        self._tell(at_ns, worker, "stored", hashes, parents)

    def removed(self, at_ns: int, worker: int, hashes: Sequence[int]) -> None:
        """It evicted them."""
        self._tell(at_ns, worker, "removed", hashes, ())

    def cleared(self, at_ns: int, worker: int) -> None:
        """It forgot all of its cache."""
        self._tell(at_ns, worker, "cleared", (), ())

    def advance(self, now_ns: int) -> None:
        """What is due by now reaches the index."""
        pending = self._pending
        while pending and pending[0][0] <= now_ns:
            _, _, worker, change, hashes, parents = heappop(pending)
            if change == "stored":
                self.index.stored(worker, hashes, parents)
            elif change == "removed":
                self.index.removed(worker, hashes)
            else:
                self.index.cleared(worker)

    def _tell(self, at_ns: int, worker: int, change: str, hashes: Sequence[int], parents: Sequence[int | None]) -> None:
        if self.loss_ratio and self._random.random() < self.loss_ratio:
            self.num_lost += 1
            return
        self._number += 1
        heappush(self._pending, (at_ns + self.delay_ns, self._number, worker, change, hashes, parents))


def _write(matched: list[int], workers: int, depth: int) -> None:
    """The matches of these workers (bits) end at `depth`."""
    while workers:
        lowest = workers & -workers
        matched[lowest.bit_length() - 1] = depth
        workers ^= lowest
