"""What a router believes of the workers' prefix caches: which worker holds which block.

Fed by the workers' block events, which may come late or not at all (`EventFeed`), so it can be wrong in the ways that a
real index is: blocks it has not heard of yet, blocks that are gone, branches it lost. A stored block whose parent it does
not know at that worker cannot be placed: it is counted and left out, as Dynamo's radix tree does.
Invariant: `match` is the contiguous run from the first block, per worker. Blocks are chain hashes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from operator import indexOf
from typing import Any, Protocol

from engine_probe.errors import UsageError


class PrefixIndex:
    """Blocks of `num_workers` workers, numbered from 0."""

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise UsageError(f"an index of {num_workers} workers knows nobody; give 1 or more", workers=num_workers)
        self.num_workers = num_workers
        self._held: list[set[int]] = [set() for _ in range(num_workers)]
        self.num_orphans = 0
        """Stored blocks that came without their parent, and were left out."""
        self.num_unknown = 0
        """Removed blocks that it did not know of."""

    def num_blocks(self, worker: int) -> int:
        """Blocks that this worker is believed to hold."""
        return len(self._held[worker])

    def match(self, hashes: Sequence[int]) -> list[int]:
        """[num_workers] leading blocks that each is believed to hold."""
        return [_leading(held, hashes) for held in self._held]

    def stored(self, worker: int, hashes: Sequence[int], parents: Sequence[int | None]) -> None:
        """`worker` holds these from now on. parents: of each; None for a first block."""
        if not hashes:
            return
        held = self._held[worker]
        is_chain = list(parents[1:]) == list(hashes[:-1])
        if is_chain and (parents[0] is None or parents[0] in held):
            held.update(hashes)
            return
        for block_hash, parent in zip(hashes, parents, strict=True):
            if parent is None or parent in held:
                held.add(block_hash)
            else:
                self.num_orphans += 1

    def removed(self, worker: int, hashes: Sequence[int]) -> None:
        """It gave them up. What hangs below them stays known, and counts again when they come back."""
        held = self._held[worker]
        before = len(held)
        held.difference_update(hashes)
        self.num_unknown += len(hashes) - (before - len(held))

    def cleared(self, worker: int) -> None:
        """It forgot all."""
        self._held[worker] = set()

    def reset(self) -> None:
        """The index itself forgets all (a restart of the router). Counts stay."""
        self._held = [set() for _ in range(self.num_workers)]


def _leading(held: set[int], hashes: Sequence[int]) -> int:
    """How many of the first of `hashes` are held, up to the first that is not."""
    try:
        return indexOf(map(held.__contains__, hashes), False)
    except ValueError:
        return len(hashes)


class Index(Protocol):
    """A `PrefixIndex`, or what answers like one; how it names blocks is between it and who feeds it."""

    def match(self, hashes: Any) -> list[int]: ...

    def stored(self, worker: int, hashes: Any, parents: Any) -> None: ...

    def removed(self, worker: int, hashes: Any) -> None: ...

    def cleared(self, worker: int) -> None: ...


_Event = tuple[int, int, int, str, Any, Any]
"""Due, number (so that no two are equal), worker, change, hashes, parents."""


class EventFeed:
    """Between the workers and the index: each event arrives `delay_s` later, or with probability `loss_ratio` never.

    What is lost is chosen by `seed` alone. Events of one instant arrive in the order in which they were told.
    """

    def __init__(self, index: Index, *, delay_s: float = 0.0, loss_ratio: float = 0.0, seed: int = 0) -> None:
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

    def pending(self) -> Iterator[tuple[Any, Any]]:
        """(hashes, parents) of the events under way."""
        return ((hashes, parents) for _, _, _, _, hashes, parents in self._pending)

    def stored(self, at_ns: int, worker: int, hashes: Any, parents: Any) -> None:
        """`worker` stored these blocks at this instant."""
        self._tell(at_ns, worker, "stored", hashes, parents)

    def removed(self, at_ns: int, worker: int, hashes: Any) -> None:
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

    def _tell(self, at_ns: int, worker: int, change: str, hashes: Any, parents: Any) -> None:
        if self.loss_ratio and self._random.random() < self.loss_ratio:
            self.num_lost += 1
            return
        self._number += 1
        heappush(self._pending, (at_ns + self.delay_ns, self._number, worker, change, hashes, parents))
