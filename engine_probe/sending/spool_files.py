"""What a spool needs of the place where its batches lie, and that place in this process's memory.

The place on disk is `spool_disk.py`. Invariant: a batch read is the batch put, or `Damaged` is raised.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_probe.sending.parcels import Gap, Key, Segment, SegmentInfo


class Damaged(Exception):
    """A batch whose bytes are not what was written."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A batch as the index knows it.

    halves, half_of   batches that were cut off it, and the one that it was cut off
    is_tale           it tells a loss, and is not itself dropped to make room
    """

    key: Key
    infos: tuple[SegmentInfo, ...]
    halves: tuple[str, ...] = ()
    half_of: str | None = None
    is_tale: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes it takes, its header included (about)."""
        return 256 + sum(info.num_bytes for info in self.infos)


class Files(Protocol):
    """What a spool needs of its store. `load` is called once, first."""

    epoch: str
    next_seq: int

    def load(self) -> tuple[list[Stored], list[Key], list[Gap]]:
        """Batches left by an earlier process (oldest first), damaged ones, and losses not told yet."""
        ...

    def put(self, stored: Stored, segments: Sequence[Segment]) -> None:
        """Keep a batch, or put it in place of its earlier self. Raises OSError."""
        ...

    def read(self, stored: Stored) -> tuple[Segment, ...]:
        """The batch's segments. Raises Damaged."""
        ...

    def remove(self, key: Key) -> None:
        """Forget a batch."""
        ...

    def set_aside(self, key: Key, reason: str) -> None:
        """Take a batch out of the way, where a person can look at it."""
        ...

    def save_gaps(self, gaps: Sequence[Gap]) -> None:
        """Remember losses until they are told."""
        ...

    def close(self) -> None:
        """Let another process have the store."""
        ...


class MemoryFiles:
    """Batches in memory: nothing survives the process."""

    def __init__(self) -> None:
        self.epoch = new_epoch()
        self.next_seq = 0
        self._batches: dict[Key, tuple[Segment, ...]] = {}

    def load(self) -> tuple[list[Stored], list[Key], list[Gap]]:
        return [], [], []

    def put(self, stored: Stored, segments: Sequence[Segment]) -> None:
        self._batches[stored.key] = tuple(segments)

    def read(self, stored: Stored) -> tuple[Segment, ...]:
        return self._batches[stored.key]

    def remove(self, key: Key) -> None:
        self._batches.pop(key, None)

    def set_aside(self, key: Key, reason: str) -> None:
        self.remove(key)

    def save_gaps(self, gaps: Sequence[Gap]) -> None:
        return

    def close(self) -> None:
        self._batches.clear()


def new_epoch() -> str:
    """A random id that sorts by the time it was made."""
    return f"{int(time.time()):010x}{secrets.token_hex(8)}"
