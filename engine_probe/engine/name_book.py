"""Small whole numbers for the names of blocks, so that pools and indexes look them up by position and not by hash.

A name is the chain hash of a prompt up to and including its block, so prompts that share a beginning share a *stretch* of names;
a stretch has numbers that follow each other. A prompt is numbered by walking its stretches, a look-up for each of them and
not for each block. Numbers that nobody holds any more are given again (`forget`); until then a name keeps its number.
Invariant: of prompts whose names are chain hashes, a name has one number; a stretch stays while one that goes on from it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.uint64]
"""[n] names of blocks."""
Numbers = npt.NDArray[np.int64]
"""[n] their numbers."""

NOBODY = -1
FULL = 1 << 18
"""Numbers given out, from which on those that nobody holds are looked for."""


_GRAIN = 16
"""Stretches get room for so many names or a multiple, so that what one gave back fits another."""


class _Stretch:
    """Names that follow each other in a chain: `numbers` of them, after those of `above` (None: from the beginning)."""

    __slots__ = ("above", "first", "numbers", "room")

    def __init__(self, first: int, numbers: Numbers, room: int, above: _Stretch | None) -> None:
        self.first = first
        self.numbers = numbers
        self.room = room
        self.above = above


class NameBook:
    """Numbers from 0 on."""

    def __init__(self) -> None:
        self._names: Names = np.zeros(1 << 10, dtype=np.uint64)
        self._by_first: dict[int, _Stretch] = {}
        self._free: dict[int, list[int]] = {}
        self._full = FULL
        self.num_given = 0
        """Every number is below."""

    @property
    def is_full(self) -> bool:
        """So many numbers were given that it is time to `forget`."""
        return self.num_given >= self._full

    def number(self, chain: Sequence[int] | Names) -> Numbers:
        """[n] the numbers of a prompt's names, from its first block on."""
        names = np.asarray(chain, dtype=np.uint64)
        found: list[Numbers] = []
        at, count, above = 0, len(names), None
        while at < count:
            first = names.item(at)
            stretch = self._by_first.get(first)
            if stretch is None:
                stretch = self._add(first, names[at:], above)
            most = min(len(stretch.numbers), count - at)
            same = self.names(stretch.numbers[:most]) == names[at : at + most]
            part = stretch.numbers[: most if same.all() else int(same.argmin())]
            found.append(part)
            at += len(part)
            above = stretch
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def names(self, numbers: Numbers) -> Names:
        """[n] names of these numbers."""
        return self._names[numbers]

    def forget(self, is_held: npt.NDArray[np.bool_]) -> int:
        """Take numbers back that nobody holds. Returns how many.

        is_held   [num_given]
        """
        kept: set[int] = set()
        for stretch in self._by_first.values():
            if is_held[stretch.numbers].any():
                holder: _Stretch | None = stretch
                while holder is not None and holder.first not in kept:
                    kept.add(holder.first)
                    holder = holder.above
        taken = 0
        for first, stretch in list(self._by_first.items()):
            if first not in kept:
                del self._by_first[first]
                self._free.setdefault(stretch.room, []).append(int(stretch.numbers[0]))
                taken += len(stretch.numbers)
        self._full = max(FULL, 2 * (self.num_given - taken))
        return taken

    def _add(self, first: int, names: Names, above: _Stretch | None) -> _Stretch:
        count = len(names)
        room = -(-count // _GRAIN) * _GRAIN
        free = self._free.get(room)
        begin = free.pop() if free else self.num_given
        if begin == self.num_given:
            self.num_given += room
            if self.num_given > len(self._names):
                grown = np.zeros(2 * self.num_given, dtype=np.uint64)
                grown[: len(self._names)] = self._names
                self._names = grown
        numbers = np.arange(begin, begin + count)
        self._names[numbers] = names
        stretch = self._by_first[first] = _Stretch(first, numbers, room, above)
        return stretch
