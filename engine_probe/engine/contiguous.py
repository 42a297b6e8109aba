"""The naive baseline: every request gets one contiguous run of slots for the longest it might become.

What paging was invented against: slots reserved and never written (internal fragmentation), and gaps too small for the next
request (external). Published systems of this kind hold tokens in 20 to 38 % of their KV memory (Kwon et al. 2023, figure 2).
Invariant: free runs are disjoint, in order, and never touch each other; free + reserved = all.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from engine_probe.errors import UsageError


@dataclass(slots=True)
class Reservation:
    """Slots [start, start + size) of one request, of which the first `num_tokens` are written."""

    start: int
    size: int
    num_tokens: int = 0


class ContiguousPool:
    """`num_slots` token slots, given out in runs: the first free run that is long enough."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise UsageError(f"a pool of {num_slots} slots holds nothing; give 1 or more", num_slots=num_slots)
        self.num_slots = num_slots
        self._free: list[tuple[int, int]] = [(0, num_slots)]
        self._reserved: dict[str, Reservation] = {}

    def reserve(self, request_id: str, max_tokens: int) -> Reservation | None:
        """A run of `max_tokens` slots; None where no free run is that long."""
        if max_tokens < 1:
            raise UsageError(f"request {request_id} wants {max_tokens} slots; expected 1 or more")
        for index, (start, size) in enumerate(self._free):
            if size >= max_tokens:
                rest = (start + max_tokens, size - max_tokens)
                self._free[index : index + 1] = [rest] if rest[1] else []
                found = self._reserved[request_id] = Reservation(start, max_tokens)
                return found
        return None

    def release(self, request_id: str) -> None:
        """Give the run back; neighbouring free runs become one."""
        gone = self._reserved.pop(request_id)
        insort(self._free, (gone.start, gone.size))
        merged: list[tuple[int, int]] = []
        for start, size in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    @property
    def longest_free(self) -> int:
        """The longest request that could come now."""
        return max((size for _, size in self._free), default=0)

    @property
    def num_written(self) -> int:
        """Slots that hold a token."""
        return sum(reservation.num_tokens for reservation in self._reserved.values())

    def check_integrity(self) -> None:
        """Raise AssertionError where runs overlap, touch, or do not add up."""
        runs = sorted([*self._free, *((r.start, r.size) for r in self._reserved.values())])
        at = 0
        for start, size in runs:
            assert start == at, "runs overlap, or slots were lost"
            at = start + size
        assert at == self.num_slots
        for (start, size), (following, _) in zip(self._free, self._free[1:], strict=False):
            assert start + size < following, "two free runs touch"
        assert all(0 <= r.num_tokens <= r.size for r in self._reserved.values())
