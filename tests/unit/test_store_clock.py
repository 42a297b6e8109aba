"""The estimate of a sender's clock from one way of travel."""

from __future__ import annotations

import pytest

from store.clock import WINDOW, SenderClock

MS = 1_000_000


def test_fastest_batch_tells_the_offset():
    """A clock 1 s ahead and transits of 4, 2 and 8 ms: the offset is seen as 0.998 s, with an error of 2 ms."""
    clock = SenderClock()
    for transit in (4, 2, 8):
        clock.saw(sent_ns=1_000 * MS, received_ns=transit * MS)
    assert clock.offset_s == pytest.approx(0.998)
    assert clock.error_s == pytest.approx(0.002)


def test_nothing_seen_is_unknown():
    """No batch, no offset: None and not zero."""
    assert SenderClock().offset_s is None
    assert SenderClock().error_s is None


def test_old_batches_are_forgotten():
    """A clock that was set back is believed after a window of batches."""
    clock = SenderClock()
    clock.saw(sent_ns=5_000 * MS, received_ns=0)
    for _ in range(WINDOW):
        clock.saw(sent_ns=-1 * MS, received_ns=0)
    assert clock.offset_s == pytest.approx(-0.001)


def test_error_is_never_below_the_resolution():
    """Equal transits do not make the estimate perfect: 0.1 ms is left."""
    clock = SenderClock()
    clock.saw(0, 0)
    clock.saw(0, 0)
    assert clock.error_s == 1e-4
