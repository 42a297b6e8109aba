"""Stop strings: text goes out as soon as it cannot be the beginning of one any more.

Invariant: the pieces joined are the text up to the first stop string (with it, where that is asked for), whatever the
pieces in which the text came; of two that begin earlier and later the earlier counts, of two at one place the shorter.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text. include: the stop string itself is part of the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(sorted(stops, key=len))
        self._include = include
        self._held = ""

    def take(self, piece: str) -> tuple[str, bool]:
        """(what may go out now, whether a stop string is complete: nothing is taken afterwards)."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda one: one[0])
            self._held = ""
            return text[: at + len(stop) if self._include else at], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back: the text ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
