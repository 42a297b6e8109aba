"""Instants that are UTC and still never run backwards: a monotonic clock, anchored to the wall clock once a minute.

Idea: a recorder keeps monotonic nanoseconds and turns them into UTC only when rows are made, all instants of a row
with one anchor, so durations and order within a row are right whatever the wall clock does meanwhile. When a new anchor
differs from the old one by more than 1 ms, rows before and after do not fit on one axis: a `mark` of `clock` says so.
Source: design section 3.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

EVERY_NS: Final = 60 * 10**9
TOLERANCE_NS: Final = 1_000_000
_READINGS: Final = 5


@dataclass(frozen=True, slots=True)
class Move:
    """The wall clock moved against the monotonic one.

    at_ns      when it was seen, by the new anchor, ns since 1970-01-01 UTC
    offset_ns  new minus old: positive where the wall clock was put forward
    """

    at_ns: int
    offset_ns: int

    def to_mark(self, worker: str | None) -> dict[str, Any]:
        """The `mark` row that says so."""
        offset_s = self.offset_ns / 1e9
        return {
            "worker": worker,
            "at_ns": self.at_ns,
            "mark": "clock",
            "subject": worker,
            "text": f"The clock moved by {offset_s:+.6f} s; instants before and after do not compare.",
            "attrs": {"offset_s": f"{offset_s:.9f}"},
        }


class Clock:
    """Monotonic nanoseconds, and their place on the wall clock.

    monotonic_ns, wall_ns   where the time comes from; a test gives its own
    """

    def __init__(
        self,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.monotonic_ns = monotonic_ns
        self._wall_ns = wall_ns
        self._lock = threading.Lock()
        self._anchored_ns = monotonic_ns()
        self.offset_ns = self._measure()

    def now_ns(self) -> int:
        """The present, ns since 1970-01-01 UTC, by the current anchor."""
        return self.monotonic_ns() + self.offset_ns

    def to_utc_ns(self, monotonic_ns: int) -> int:
        """A monotonic instant as ns since 1970-01-01 UTC, by the current anchor."""
        return monotonic_ns + self.offset_ns

    def reanchor(self, *, force: bool = False) -> Move | None:
        """Take a new anchor if the old one is 60 s old (or at once by `force`); tell a move of more than 1 ms."""
        with self._lock:
            now = self.monotonic_ns()
            if not force and now - self._anchored_ns < EVERY_NS:
                return None
            offset = self._measure()
            moved = offset - self.offset_ns
            self._anchored_ns, self.offset_ns = now, offset
        return Move(now + offset, moved) if abs(moved) > TOLERANCE_NS else None

    def _measure(self) -> int:
        """Wall minus monotonic, from the reading that was least disturbed (the shortest bracket of several)."""
        best, shortest = 0, None
        for _ in range(_READINGS):
            before = self.monotonic_ns()
            wall = self._wall_ns()
            after = self.monotonic_ns()
            if shortest is None or after - before < shortest:
                best, shortest = wall - (before + after) // 2, after - before
        return best
