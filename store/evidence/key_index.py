"""Where 64-bit keys stand among distinct ones: millions looked up at once, without a search for each.

Idea: a table of slots by the upper bits of a product, one key a slot. Few slots are shared, and only what falls into those
is searched for. Keys come in chunks, so that what a lookup takes stays in the cache of a core.

Source: Knuth, The Art of Computer Programming 3, section 6.4 (multiplicative hashing).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
CHUNK: Final = 1 << 17
"""Keys looked up at a time."""
_FEWEST_BITS, _MOST_BITS = 10, 22


class KeyIndex:
    """Distinct keys [k], rising, and how to find them."""

    def __init__(self, keys: U64) -> None:
        self.keys = keys
        bits = max(_FEWEST_BITS, min(_MOST_BITS, (16 * len(keys)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._place = np.zeros(1 << bits, dtype=np.int32)
        self._shared = np.zeros(1 << bits, dtype=np.bool_)
        slot, place = self._slots(keys), np.arange(len(keys))
        self._place[slot] = place
        self._shared[slot[self._place[slot] != place]] = True

    def find(self, keys: U64) -> tuple[I64, I64]:
        """(which of `keys` [n] are here, rising; their place here)."""
        found = list(self.each(keys))
        none = np.empty(0, dtype=np.int64)
        return np.concatenate([none, *(rows for rows, _ in found)]), np.concatenate([none, *(at for _, at in found)])

    def each(self, keys: U64) -> Iterator[tuple[I64, I64]]:
        """The same in parts, one after the other: nothing as long as `keys` is made."""
        for first in range(0, len(keys) if len(self.keys) else 0, CHUNK):
            chunk = keys[first : first + CHUNK]
            slot = self._slots(chunk)
            place = self._place[slot]
            here = self.keys[place] == chunk  # an empty slot leads to the first key, which is none of its own
            again = np.flatnonzero(self._shared[slot] & ~here)
            if len(again):
                place[again] = np.minimum(np.searchsorted(self.keys, chunk[again]), len(self.keys) - 1)
                here[again] = self.keys[place[again]] == chunk[again]
            rows = np.flatnonzero(here)
            yield rows + first, place[rows].astype(np.int64)

    def _slots(self, keys: U64) -> I64:
        return ((keys * _SPREAD) >> self._shift).view(np.int64)
