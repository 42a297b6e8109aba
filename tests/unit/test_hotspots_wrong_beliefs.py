"""Beliefs of requests that waited say nothing of the index, unless block events tell what was held at the decision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.wrong_beliefs import wrong_beliefs
from tests.simulated_routing import LENGTHS, Fleet, simulate

TOKEN_S = np.array([1e-4, 1e-4])


def _seen(prompts: list[float], waits_s: list[float], believed: float, found: float) -> Observed:
    """Decisions for w0 of two workers, each after a wait of so long."""
    num = len(prompts)
    seen = simulate(
        Fleet(2, lambda number, busy, has, random: 0, LENGTHS["equal"], intervals=1, per_interval=num, use=0.01)
    )
    matched = np.full((num, 2), believed, dtype=np.float32)
    served = replace(
        seen.served,
        first_scheduled_s=seen.served.arrival_s + np.array(waits_s),
        prompt_tokens=np.array(prompts),
        cached_tokens=np.full(num, found),
    )
    return replace(seen, served=served, decisions=replace(seen.decisions, matched=matched))


@pytest.mark.parametrize(("believed", "found"), [(400.0, 0.0), (0.0, 400.0)])
def test_belief_is_not_judged_after_a_wait_in_which_as_much_can_come_or_go(believed: float, found: float) -> None:
    """1,000 tokens: 100 make a belief wrong, which take 10 ms; 320 tokens: 64, which take 6.4 ms. Waits of 9 and 11, 6 and 7 ms."""
    seen = _seen([1000.0, 1000.0, 320.0, 320.0], [0.009, 0.011, 0.006, 0.007], believed, found)
    is_wrong, can_err = wrong_beliefs(seen, TOKEN_S)
    assert is_wrong.tolist() == can_err.tolist() == [True, False, True, False]
    assert wrong_beliefs(seen)[0].all()


def test_what_was_held_is_judged_however_long_it_waited() -> None:
    """Block events say that 400 tokens were there (right) and that none was (wrong); where they say nothing the wait of a second decides."""
    seen = replace(_seen([1000.0] * 3, [1.0] * 3, 400.0, 0.0), held=np.array([400.0, 0.0, np.nan]))
    is_wrong, can_err = wrong_beliefs(seen, TOKEN_S)
    assert is_wrong.tolist() == [False, True, False]
    assert can_err.tolist() == [True, True, False]


def test_unknown_wait_or_pace_is_no_excuse() -> None:
    """Who does not tell when it was scheduled, or how fast its worker is, is judged by what was found."""
    seen = _seen([1000.0] * 2, [np.nan, 1.0], 400.0, 0.0)
    assert wrong_beliefs(seen, TOKEN_S)[0].tolist() == [True, False]
    assert wrong_beliefs(seen, np.full(2, np.nan))[0].all()
