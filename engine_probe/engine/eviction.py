"""In which order unreferenced cached blocks are given up.

Blocks of one request become unreferenced the deepest first, so that under LRU and FIFO tails go before heads: a head is
of use without its tail, a tail is of none without its head. Length-aware: the deepest position of all first, as in
Mooncake's LengthAwareCache (Qin et al. 2024, arXiv 2407.00079). LFU counts uses while resident, ties by LRU.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from engine_probe.errors import UsageError


class EvictionOrder(Protocol):
    """Holds the blocks that may be evicted."""

    def add(self, block: int, *, stored: int, depth: int, uses: int) -> None:
        """`block` became unreferenced. stored: number of its storing; depth: its position in its chain; uses: hits so far."""

    def remove(self, block: int) -> None:
        """It is referenced again, or gone."""

    def pop(self) -> int:
        """Take out the next victim."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class LeastRecentlyUsed:
    """By the moment of the last release."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, *, stored: int, depth: int, uses: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks


class _Ranked:
    """Smallest rank first; a heap whose entries of blocks that left are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._turn: dict[int, int] = {}
        self._turns = 0

    def rank(self, stored: int, depth: int, uses: int) -> int:
        raise NotImplementedError

    def add(self, block: int, *, stored: int, depth: int, uses: int) -> None:
        self._turns += 1
        self._turn[block] = self._turns
        heapq.heappush(self._heap, (self.rank(stored, depth, uses), self._turns, block))
        if len(self._heap) > 64 + 2 * len(self._turn):
            self._heap = [entry for entry in self._heap if self._turn.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, block: int) -> None:
        del self._turn[block]

    def pop(self) -> int:
        while True:
            _, turn, block = heapq.heappop(self._heap)
            if self._turn.get(block) == turn:
                del self._turn[block]
                return block

    def __len__(self) -> int:
        return len(self._turn)

    def __contains__(self, block: object) -> bool:
        return block in self._turn


class FirstInFirstOut(_Ranked):
    """By the moment of storing, whatever was used since."""

    def rank(self, stored: int, depth: int, uses: int) -> int:
        return stored


class LeastFrequentlyUsed(_Ranked):
    """By uses while resident, then by LRU."""

    def rank(self, stored: int, depth: int, uses: int) -> int:
        return uses


class LengthAware(_Ranked):
    """The deepest position first, then by LRU."""

    def rank(self, stored: int, depth: int, uses: int) -> int:
        return -depth


ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "length": LengthAware,
}


def eviction_order(name: str) -> EvictionOrder:
    """The order called `name`; UsageError names the known ones."""
    if name not in ORDERS:
        raise UsageError(f"no eviction order '{name}' here; known: {', '.join(ORDERS)}", order=name)
    return ORDERS[name]()
