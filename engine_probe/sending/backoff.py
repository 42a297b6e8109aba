"""When to try again: doubling waits with jitter, longer where the other side asks for it.

Invariant: failures of requests that were under way when the last failure was counted belong to the same outage and are
not counted again, or eight workers would make eight steps of one.
"""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """State of the waits; the caller holds its own lock. Times are seconds of any monotonic clock.

    first_s, limit_s   the first wait, and the longest; each is shortened at random to between a half and the whole
    """

    def __init__(
        self, first_s: float = 0.25, limit_s: float = 30.0, jitter: Callable[[], float] = random.random
    ) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._jitter = jitter
        self._failed_at_s = float("-inf")
        self.failures = 0
        self.resume_at_s = float("-inf")

    def fail(self, started_s: float, now_s: float, at_least_s: float = 0.0) -> None:
        """A request that began at `started_s` failed now; do not try before the wait is over."""
        if self.failures and started_s < self._failed_at_s:
            self.resume_at_s = max(self.resume_at_s, now_s + at_least_s)
            return
        # Far beyond the limit the exponent would overflow, and change nothing.
        wait_s = min(self._limit_s, self._first_s * 2.0 ** min(self.failures, 60)) * (0.5 + self._jitter() / 2)
        self.failures += 1
        self._failed_at_s = now_s
        self.resume_at_s = now_s + max(wait_s, at_least_s)

    def succeed(self) -> None:
        """The other side answered as it should: no waits."""
        self.failures = 0
        self.resume_at_s = float("-inf")

    def hurry(self) -> None:
        """Try once at once, keeping the count of failures."""
        self.resume_at_s = float("-inf")
