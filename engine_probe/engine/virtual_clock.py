"""A clock that moves only when it is told: the time of a simulated fleet, reproducible to the nanosecond."""

from __future__ import annotations

from engine_probe.clock import Clock

EPOCH_NS = 1_780_000_000 * 10**9
"""Where virtual time begins on the UTC axis unless something else is said: a fixed instant, so that runs can be compared."""


class VirtualClock(Clock):
    """Monotonic nanoseconds from 0; `start_utc_ns` is their origin on the UTC axis."""

    def __init__(self, start_utc_ns: int = EPOCH_NS) -> None:
        self.now = 0
        super().__init__(lambda: self.now, lambda: start_utc_ns + self.now)

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.now += round(seconds * 1e9)

    def advance_to(self, monotonic_ns: int) -> None:
        """Time passes until this instant; never back."""
        if monotonic_ns > self.now:
            self.now = monotonic_ns
