"""How long a cache would have to keep a block: the time from one use to the next, also where it was evicted in between.

Engines tell what was stored and hit, but rarely how long a hit block had lain unused, so that is worked out from the instants of the
rows: of one block in SAMPLE, chosen by its hash, which therefore is seen whole. Their gaps stand for SAMPLE times as many.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

SAMPLE: Final = 8
SLOTS: Final = 1 << 17
_CHOSEN_BITS: Final = np.uint64(64 - 3)
_SLOT_BITS: Final = np.uint64(64 - 17)
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xC2B2AE3D27D4EB4F)

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class ReuseGaps:
    """Last use of the sampled blocks. Its caller sees to it that one thread at a time comes in."""

    def __init__(self) -> None:
        self._keys: U64 = np.zeros(SLOTS, dtype=np.uint64)
        self._used_ns: I64 = np.full(SLOTS, -1, dtype=np.int64)

    def observe(self, key: U64, at_ns: I64, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
        """(rows, s) of the gaps that end with the uses `rows` (numbers of rows of `key` and `at_ns`, in their order)."""
        # by bits that mixing made of all others: hashes of some sources have their low bits in common
        rows = rows[(key[rows] * _SPREAD) >> _CHOSEN_BITS == 0]
        if len(rows) == 0:
            return rows, np.zeros(0)
        rows = rows[np.argsort(key[rows], kind="stable")]
        keys, used_ns = key[rows], at_ns[rows]
        is_first = np.ones(len(rows), dtype=np.bool_)
        is_first[1:] = keys[1:] != keys[:-1]
        before_ns = np.empty(len(rows), dtype=np.int64)
        before_ns[1:] = used_ns[:-1]
        place = (keys * _MIX) >> _SLOT_BITS
        before_ns[is_first] = self._used_ns[place[is_first]]
        known = ~is_first
        known[is_first] = (self._keys[place[is_first]] == keys[is_first]) & (before_ns[is_first] >= 0)
        last = np.append(np.flatnonzero(is_first)[1:] - 1, len(rows) - 1)
        self._keys[place[last]], self._used_ns[place[last]] = keys[last], used_ns[last]
        return rows[known], np.maximum(used_ns[known] - before_ns[known], 0) * 1e-9
