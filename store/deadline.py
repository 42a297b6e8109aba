"""Until when somebody waits for an answer: an instant of the monotonic clock, and whether they gave up before.

Invariant: what works against a deadline looks at it between two steps, each of which is short or can be interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import Final

LOOK_S: Final = 0.2
"""Longest wait between two looks whether the caller gave up."""


class Late(Exception):
    """The deadline passed, or the caller gave up."""


class Deadline:
    """An instant `at_s` on time.monotonic(); over before it where `cancelled` is set."""

    def __init__(self, at_s: float, cancelled: Event | None = None) -> None:
        self.at_s = at_s
        self._cancelled = cancelled

    @property
    def left_s(self) -> float:
        """Seconds until the instant, below zero past it."""
        return self.at_s - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Nobody waits any more."""
        return self.left_s <= 0 or (self._cancelled is not None and self._cancelled.is_set())

    @property
    def step_s(self) -> float:
        """How long to wait at most before the next look, 0 where it is over."""
        return max(0.0, self.left_s if self._cancelled is None else min(self.left_s, LOOK_S))

    def check(self) -> None:
        """Raises Late where it is over."""
        if self.is_over:
            raise Late


def attempt(once: Callable[[float], bool], until_s: float, deadline: Deadline | None) -> bool:
    """Whether `once`, which waits as many seconds as it is given, came true by `until_s` and by the deadline's instant.

    Raises Late where the caller gave up meanwhile.
    """
    if deadline is None:
        return once(max(0.0, until_s - time.monotonic()))
    until_s = min(until_s, deadline.at_s)
    while not once(min(deadline.step_s, max(0.0, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            return False
        deadline.check()
    return True
