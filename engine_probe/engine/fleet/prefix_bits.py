"""`PrefixIndex` for a fleet whose workers share one `NameBook`: a bit for each worker at each number of a name.

Same verbs, same answers (`prefix_index.py` says what they mean; a property test holds both side by side), by whole arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_probe.engine.name_book import NOBODY, Numbers
from engine_probe.errors import UsageError

_WORD = 63
"""Workers in one word of bits."""


class PrefixBits:
    """Blocks of `num_workers` workers, by the numbers of their names."""

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise UsageError(f"an index of {num_workers} workers knows nobody; give 1 or more", workers=num_workers)
        self.num_workers = num_workers
        self._words = [np.zeros(1 << 10, dtype=np.int64) for _ in range(-(-num_workers // _WORD))]
        self.num_orphans = self.num_unknown = 0

    def num_blocks(self, worker: int) -> int:
        """Blocks that this worker is believed to hold."""
        word, bit = self._at(worker)
        return int(np.count_nonzero(word & bit))

    def match(self, names: Numbers) -> list[int]:
        """[num_workers] leading blocks that each is believed to hold."""
        if not len(names):
            return [0] * self.num_workers
        self._reach(names)
        found: list[int] = []
        for number, word in enumerate(self._words):
            workers = min(_WORD, self.num_workers - number * _WORD)
            held = np.bitwise_and.accumulate(word[names])
            # Bits only go: they are the same between two places where some went.
            borders = [0, *(np.flatnonzero(held[1:] != held[:-1]) + 1).tolist()]
            leading = [0] * workers
            for index, begin in enumerate(borders):
                bits = held.item(begin)
                stop = borders[index + 1] if index + 1 < len(borders) else len(names)
                while bits:
                    lowest = bits & -bits
                    leading[lowest.bit_length() - 1] = stop
                    bits ^= lowest
            found += leading
        return found

    def stored(self, worker: int, names: Numbers, parents: Numbers) -> None:
        """`worker` holds these from now on. parents: of each; NOBODY for a first block."""
        if not len(names):
            return
        self._reach(names)
        word, bit = self._at(worker)
        starts = [0, *(np.flatnonzero(parents[1:] != names[:-1]) + 1).tolist()]
        for index, begin in enumerate(starts):
            stop = starts[index + 1] if index + 1 < len(starts) else len(names)
            chain = names[begin:stop]
            parent = parents.item(begin)
            if parent != NOBODY and not (parent < len(word) and word.item(parent) & bit):
                # Who follows one that is known can be placed; those up to there cannot.
                known = np.flatnonzero(word[chain] & bit)
                placed = int(known[0]) + 1 if len(known) else len(chain)
                self.num_orphans += placed
                chain = chain[placed:]
            word[chain] |= bit

    def removed(self, worker: int, names: Numbers) -> None:
        """It gave them up. What hangs below them stays known, and counts again when they come back."""
        if not len(names):
            return
        self._reach(names)
        word, bit = self._at(worker)
        before = word[names]
        self.num_unknown += len(names) - int(np.count_nonzero(before & bit))
        word[names] = before & ~bit

    def cleared(self, worker: int) -> None:
        """It forgot all."""
        word, bit = self._at(worker)
        word &= ~bit

    def reset(self) -> None:
        """The index itself forgets all (a restart of the router). Counts stay."""
        for word in self._words:
            word[:] = 0

    def holds(self, num_names: int) -> npt.NDArray[np.bool_]:
        """[num_names] whether anybody is believed to hold the name of this number."""
        self._reach(np.array([num_names - 1]))
        held: npt.NDArray[np.bool_] = self._words[0][:num_names] != 0
        for word in self._words[1:]:
            held |= word[:num_names] != 0
        return held

    def _at(self, worker: int) -> tuple[Numbers, int]:
        return self._words[worker // _WORD], 1 << worker % _WORD

    def _reach(self, names: Numbers) -> None:
        most = int(names.max())
        if most >= len(self._words[0]):
            more = np.zeros(most + 2, dtype=np.int64)
            self._words = [np.concatenate((word, more)) for word in self._words]
