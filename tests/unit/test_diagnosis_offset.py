"""A fixed time that no phase tells of: told from queues by how close together it lies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.ledger.offset import Offset, offset_between

N = 200
QUIET = 0.001 + 0.0001 * np.sin(np.arange(N))


def test_half_of_the_requests_have_it() -> None:
    """100 of 200 take 40 ms more: two modes."""
    found = offset_between(QUIET, QUIET + np.where(np.arange(N) % 2 == 0, 0.04, 0.0))
    assert found is not None
    assert found.seconds == pytest.approx(0.04, abs=0.0003)
    assert (found.num_requests, found.two_modes) == (100, True)


def test_all_of_them_have_it() -> None:
    """A shift of everything by 0.3 s: one mode, which has to be narrow."""
    found = offset_between(QUIET, QUIET + 0.3)
    assert found is not None
    assert (found.num_requests, found.two_modes) == (N, False)


def test_a_queue_in_front_is_none() -> None:
    """Waits that are 0.3 s on average and scatter by 5 % are a queue: too wide for one mode."""
    waits = 0.3 * np.random.default_rng(1).uniform(0.95, 1.05, N)
    assert offset_between(QUIET, QUIET + waits) is None
    assert offset_between(QUIET, QUIET + np.random.default_rng(1).exponential(0.1, N)) is None


@pytest.mark.parametrize("before", [np.where(np.arange(N) % 2 == 0, 0.04, 0.0), np.full(N, 0.04)])
def test_what_the_baseline_had_too_is_no_change(before: np.ndarray) -> None:
    """As many of its requests had it."""
    assert offset_between(QUIET + before, QUIET + before) is None


def test_scatter_and_too_few_are_none() -> None:
    """2 ms are scatter; 5 requests are an accident; a window that tells nothing tells nothing."""
    assert offset_between(QUIET, QUIET + 0.002) is None
    assert offset_between(QUIET, QUIET + np.where(np.arange(N) < 5, 1.0, 0.0)) is None
    assert offset_between(QUIET, np.full(N, np.nan)) is None


@settings(max_examples=50)
@given(
    residual=st.lists(st.floats(-0.1, 10.0) | st.just(float("nan")), min_size=1, max_size=30),
    seconds=st.floats(0.005, 5.0),
)
def test_nobody_is_given_more_than_it_has(residual: list[float], seconds: float) -> None:
    """Seconds are 0 or the offset, and never above the request's own."""
    values = np.array(residual)
    given_away = Offset(0.0, seconds, 1, True).of(values)
    assert (given_away >= 0).all()
    assert (given_away <= np.maximum(np.nan_to_num(values), 0.0)).all()
    assert (given_away <= seconds).all()
