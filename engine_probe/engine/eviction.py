"""In which order unreferenced cached blocks are given up.

Blocks of one request become unreferenced the deepest first, so that under LRU and FIFO tails go before heads: a head is
of use without its tail, a tail is of none without its head. Length-aware: the deepest position of all first, as in
Mooncake's LengthAwareCache (Qin et al. 2024, arXiv 2407.00079). LFU counts uses while resident, ties by LRU.

Orders take and give whole arrays of block numbers: a prompt of 8,192 tokens is 512 blocks, and a fleet in virtual time
moves millions a second.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_probe.errors import UsageError

Blocks = npt.NDArray[np.int64]
"""[n] block numbers."""


_FEW = 4


class EvictionOrder(Protocol):
    """Holds the blocks that may be evicted."""

    def add(self, blocks: Blocks, *, stored: Blocks, depth: Blocks, uses: Blocks) -> None:
        """They became unreferenced, in this order.

        stored: number of each one's storing; depth: its position in its chain; uses: hits so far. All [n].
        """

    def remove(self, blocks: Blocks) -> None:
        """They are referenced again, or gone."""

    def pop(self, count: int) -> Blocks:
        """Take out the next `count` victims; there are as many."""

    def __len__(self) -> int: ...

    def held(self) -> set[int]:
        """All of them."""


class LeastRecentlyUsed:
    """By the moment of the last release.

    A release is one run of blocks with a stamp; a block that left, or was released anew, bears another stamp, and is passed
    over when its old run comes up.
    """

    def __init__(self, num_blocks: int) -> None:
        self._stamp_of = np.zeros(num_blocks, dtype=np.int64)
        self._runs: deque[tuple[int, Blocks]] = deque()
        self._stamp = 0
        self._num_held = self._num_listed = 0

    def add(self, blocks: Blocks, *, stored: Blocks, depth: Blocks, uses: Blocks) -> None:
        self.append(blocks)

    def append(self, blocks: Blocks) -> None:
        """`add`, for one who has nothing but the blocks."""
        self._stamp += 1
        self._stamp_of[blocks] = self._stamp
        self._runs.append((self._stamp, blocks))
        self._num_held += len(blocks)
        self._num_listed += len(blocks)
        if self._num_listed > 1024 + 4 * self._num_held:
            self._tidy()

    def remove(self, blocks: Blocks) -> None:
        self._stamp_of[blocks] = 0
        self._num_held -= len(blocks)

    def pop(self, count: int) -> Blocks:
        if count == 1 and (block := self._pop_one()) is not None:
            return np.array([block])
        found: list[Blocks] = []
        while count > 0:
            stamp, run = self._runs.popleft()
            self._num_listed -= len(run)
            run = run[self._stamp_of[run] == stamp]
            if len(run) > count:
                self._runs.appendleft((stamp, run[count:]))
                self._num_listed += len(run) - count
                run = run[:count]
            if len(run):
                found.append(run)
                self.remove(run)
                count -= len(run)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _pop_one(self) -> int | None:
        """The next victim where it is among the first of its run: without a look at all the others."""
        stamp, run = self._runs[0]
        few: list[int] = run[:_FEW].tolist()
        for position, block in enumerate(few):
            if int(self._stamp_of[block]) == stamp:
                self._stamp_of[block] = 0
                self._num_held -= 1
                self._num_listed -= position + 1
                if len(run) > position + 1:
                    self._runs[0] = (stamp, run[position + 1 :])
                else:
                    self._runs.popleft()
                return block
        return None

    def first(self) -> int | None:
        """The next victim; it stays."""
        while self._runs:
            stamp, run = self._runs[0]
            left = run[self._stamp_of[run] == stamp]
            if len(left):
                return int(left[0])
            self._runs.popleft()
            self._num_listed -= len(run)
        return None

    def __len__(self) -> int:
        return self._num_held

    def held(self) -> set[int]:
        return set(np.flatnonzero(self._stamp_of).tolist())

    def _tidy(self) -> None:
        runs = [(stamp, run[self._stamp_of[run] == stamp]) for stamp, run in self._runs]
        self._runs = deque(entry for entry in runs if len(entry[1]))
        self._num_listed = self._num_held


class _Ranked(ABC):
    """Smallest rank first; a heap whose entries of blocks that left are skipped."""

    def __init__(self, num_blocks: int) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._turn: dict[int, int] = {}
        self._turns = 0

    @abstractmethod
    def rank(self, stored: int, depth: int, uses: int) -> int:
        """Smallest first."""

    def add(self, blocks: Blocks, *, stored: Blocks, depth: Blocks, uses: Blocks) -> None:
        for block, *facts in zip(blocks.tolist(), stored.tolist(), depth.tolist(), uses.tolist(), strict=True):
            self._turns += 1
            self._turn[block] = self._turns
            heapq.heappush(self._heap, (self.rank(*facts), self._turns, block))
        if len(self._heap) > 64 + 2 * len(self._turn):
            self._heap = [entry for entry in self._heap if self._turn.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, blocks: Blocks) -> None:
        for block in blocks.tolist():
            del self._turn[block]

    def pop(self, count: int) -> Blocks:
        found: list[int] = []
        while len(found) < count:
            _, turn, block = heapq.heappop(self._heap)
            if self._turn.get(block) == turn:
                del self._turn[block]
                found.append(block)
        return np.array(found, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._turn)

    def held(self) -> set[int]:
        return set(self._turn)


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


ORDERS: dict[str, Callable[[int], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "length": LengthAware,
}


def eviction_order(name: str, num_blocks: int) -> EvictionOrder:
    """The order called `name`, for blocks numbered below `num_blocks`; UsageError names the known ones."""
    if name not in ORDERS:
        raise UsageError(f"no eviction order '{name}' here; known: {', '.join(ORDERS)}", order=name)
    return ORDERS[name](num_blocks)
