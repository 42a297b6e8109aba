"""Sets of sequence numbers kept as disjoint inclusive ranges with neighbours merged.

Invariant: `first <= last` in every range, ranges ascend, and between two ranges at least one number is missing. So a
sender that loses nothing is one range for ever, and what is missing can be told.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class SeqRanges:
    """A set of integers >= 0, stored as ranges."""

    __slots__ = ("_first", "_last")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """ValueError where two of the ranges overlap."""
        self._first: list[int] = []
        self._last: list[int] = []
        for first, last in sorted(ranges):
            self.add_range(first, last)

    def __contains__(self, seq: int) -> bool:
        at = bisect_right(self._first, seq) - 1
        return at >= 0 and seq <= self._last[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._first, self._last, strict=True)))

    def __len__(self) -> int:
        """Number of ranges."""
        return len(self._first)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeqRanges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # changes, so it is no key

    def add(self, seq: int) -> None:
        """Put one number into the set; ValueError where it is there already."""
        self.add_range(seq, seq)

    def add_range(self, first: int, last: int) -> None:
        """Put `first..last` into the set; ValueError where one of them is there already or they run backwards."""
        at = bisect_right(self._first, first)
        overlaps = (at > 0 and first <= self._last[at - 1]) or (at < len(self._first) and self._first[at] <= last)
        if first > last or first < 0 or overlaps:
            raise ValueError(f"{first}..{last} runs backwards or overlaps what is in the set")
        touches_left = at > 0 and self._last[at - 1] == first - 1
        touches_right = at < len(self._first) and self._first[at] == last + 1
        if touches_left and touches_right:
            self._last[at - 1] = self._last[at]
            del self._first[at], self._last[at]
        elif touches_left:
            self._last[at - 1] = last
        elif touches_right:
            self._first[at] = first
        else:
            self._first.insert(at, first)
            self._last.insert(at, last)

    @property
    def last(self) -> int:
        """The highest number; -1 of an empty set."""
        return self._last[-1] if self._last else -1

    def missing(self) -> list[tuple[int, int]]:
        """Inclusive ranges from 0 up to the highest number that are not in the set."""
        gaps, expected = [], 0
        for first, last in self:
            if first > expected:
                gaps.append((expected, first - 1))
            expected = last + 1
        return gaps
