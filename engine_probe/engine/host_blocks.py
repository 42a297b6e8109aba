"""Host memory for the blocks of sequences that gave way by swap. A block here belongs to one sequence, or to none."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine_probe.engine.sequence import Sequence


class HostBlocks:
    """`num_blocks` host blocks; 0: no swap space."""

    def __init__(self, num_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence, count: int) -> list[int] | None:
        """`count` host blocks for it; None where there are too few."""
        if count > len(self._free):
            return None
        sequence.host_blocks = [self._free.pop() for _ in range(count)]
        return sequence.host_blocks

    def free(self, sequence: Sequence) -> None:
        """Give its host blocks back."""
        self._free += reversed(sequence.host_blocks)
        sequence.host_blocks = []

    def check_integrity(self, sequences: Items[Sequence]) -> None:
        """Free and held are all, each once. Raises AssertionError."""
        held = [block for sequence in sequences for block in sequence.host_blocks]
        assert sorted([*self._free, *held]) == list(range(self.num_blocks)), "host blocks were lost or doubled"
