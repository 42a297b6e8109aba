"""How far a sender's clock is from ours, from the instants its batches were sent and received.

Invariant: a batch is never received before it was sent, so sender - ours is at least the largest `sent - received`
seen. The estimate is that bound over the last batches (the fastest one travelled hardly at all); its error is how far
the usual batch lies from the fastest, because the fastest can have lost about as much on its way. One way of travel
gives no better bound.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 64
_RESOLUTION_S = 1e-4


class SenderClock:
    """Sliding estimate over the last `WINDOW` batches of one sender."""

    __slots__ = ("_leads",)

    def __init__(self) -> None:
        self._leads: deque[int] = deque(maxlen=WINDOW)

    def saw(self, sent_ns: int, received_ns: int) -> None:
        """Take in one batch."""
        self._leads.append(sent_ns - received_ns)

    @property
    def offset_s(self) -> float | None:
        """Sender's clock minus ours (s); None before the first batch."""
        return max(self._leads) / 1e9 if self._leads else None

    @property
    def error_s(self) -> float | None:
        """The true offset is at most this far above the estimate (s); None before the first batch."""
        if not self._leads:
            return None
        return max(_RESOLUTION_S, (max(self._leads) - median(self._leads)) / 1e9)
