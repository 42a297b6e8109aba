"""Who is next: first come first served, shortest first, or by priority - and nobody waits for ever.

A sequence that gave its blocks back goes before all that never ran. One that waited longer than `max_wait_ns` goes before
everything its policy would prefer, so the wait of any is bounded by that and what is running. Entries that left are skipped
when they come up.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator

from engine_probe.engine.sequence import Sequence, State
from engine_probe.errors import UsageError

Key = Callable[[Sequence], tuple[int, ...]]

POLICIES: dict[str, Key] = {
    "fcfs": lambda s: (s.waits_since_ns, s.number),
    "shortest": lambda s: (s.num_known, s.waits_since_ns, s.number),
    "priority": lambda s: (-s.priority, s.waits_since_ns, s.number),
}
"""Smallest first. priority: a larger number goes first."""


class WaitingQueue:
    """Sequences that wait, in the order of a policy."""

    def __init__(self, policy: str = "fcfs", max_wait_ns: int = 30 * 10**9) -> None:
        if policy not in POLICIES:
            raise UsageError(f"no scheduling policy '{policy}' here; known: {', '.join(POLICIES)}", policy=policy)
        self.policy = policy
        self.max_wait_ns = max_wait_ns
        self._key = POLICIES[policy]
        self._heap: list[tuple[tuple[int, ...], Sequence]] = []
        self._oldest: deque[Sequence] = deque()
        self._again: list[tuple[tuple[int, int], Sequence]] = []
        self.num_new = 0
        self.num_again = 0

    def __len__(self) -> int:
        return self.num_new + self.num_again

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no order."""
        yield from (s for _, s in self._again if s.state in (State.PREEMPTED, State.SWAPPED))
        yield from (s for _, s in self._heap if s.state is State.WAITING)

    def push(self, sequence: Sequence) -> None:
        """It came in."""
        heapq.heappush(self._heap, (self._key(sequence), sequence))
        since_ns = sequence.waits_since_ns
        if self._oldest and self._oldest[-1].waits_since_ns > since_ns:
            insort(self._oldest, sequence, key=_since)  # it waited for a sibling before, and waits on for itself
        else:
            self._oldest.append(sequence)
        self.num_new += 1
        if len(self._heap) > 64 + 2 * self.num_new:
            # Those that left from the middle, and would come up only when all before them did.
            self._heap = [entry for entry in self._heap if entry[1].state is State.WAITING]
            heapq.heapify(self._heap)

    def push_again(self, sequence: Sequence) -> None:
        """It ran, and gave way; its state is PREEMPTED or SWAPPED."""
        heapq.heappush(self._again, ((sequence.arrival_ns, sequence.number), sequence))
        self.num_again += 1

    def next(self, now_ns: int) -> Sequence | None:
        """The sequence to admit next; it stays here until `left` is said."""
        while self._again and self._again[0][1].state not in (State.PREEMPTED, State.SWAPPED):
            heapq.heappop(self._again)
        if self._again:
            return self._again[0][1]
        oldest = self.oldest()
        if oldest is not None and now_ns - oldest.waits_since_ns > self.max_wait_ns:
            return oldest
        while self._heap and self._heap[0][1].state is not State.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def oldest(self) -> Sequence | None:
        """Of those that never ran, the one that waits longest."""
        while self._oldest and self._oldest[0].state is not State.WAITING:
            self._oldest.popleft()
        return self._oldest[0] if self._oldest else None

    def is_overdue(self, sequence: Sequence, now_ns: int) -> bool:
        """It waited past the bound."""
        return now_ns - sequence.waits_since_ns > self.max_wait_ns

    def left(self, was: State) -> None:
        """A sequence that was in this state was admitted, or ended; its state has changed already."""
        if was is State.WAITING:
            self.num_new -= 1
        else:
            self.num_again -= 1


def _since(sequence: Sequence) -> int:
    return sequence.waits_since_ns
