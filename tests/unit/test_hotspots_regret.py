"""Regret by hand: two workers, round numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.hotspots.advice import break_even
from diagnosis.hotspots.observed import Decisions, Observed, Served, Steps
from diagnosis.hotspots.regret import regret_of, seconds_a_token
from store.interface import Window

NAN = float("nan")


def seen(
    *,
    steps: list[tuple[int, float, float, float, float]] | None = None,
    served: list[tuple[int, float, float, float, float, float]] = (),  # type: ignore[assignment]
    decided: list[tuple[float, int, int, list[float]]],
    workers: int = 2,
) -> Observed:
    """steps: (worker, end, seconds, prefill tokens, waiting); served: (worker, arrival, scheduled, first token, prompt, cached);
    decided: (instant, chosen, row of served, believed matches)."""
    num = len(decided)
    rows = np.array(served, dtype=np.float64).reshape(-1, 6)
    worker, arrival, begun, done, prompt, cached = rows.T
    unknown = np.full((num, workers), np.nan, dtype=np.float32)
    table = None
    if steps is not None:
        column = np.array(sorted(steps), dtype=np.float64).T
        zeros = np.zeros(len(steps))
        table = Steps(column[0].astype(np.int64), column[1], column[2], column[3], zeros, column[4], zeros)
    return Observed(
        Window(),
        0,
        10.0,
        tuple(f"w{i}" for i in range(workers)),
        (),
        (),
        ("any",),
        Decisions(
            [f"r{i}" for i in range(num)],
            np.array([d[0] for d in decided]),
            np.array([d[1] for d in decided]),
            np.array([d[2] for d in decided]),
            np.full(num, -1),
            np.full(num, -1),
            np.zeros(num, dtype=np.bool_),
            np.array([d[3] for d in decided], dtype=np.float32),
            unknown,
            unknown,
        ),
        Served(
            [f"r{i}" for i in range(len(rows))],
            worker.astype(np.int64),
            arrival,
            begun,
            done,
            prompt,
            cached,
            prompt - cached,
            done - begun,
        ),
        table,
        True,
        "engine",
    )


RATE = [(worker, 0.1 * (i + 1), 0.1, 1000.0, 0.0) for worker in (0, 1) for i in range(5)]
"""Both computed 1,000 tokens in 0.1 s, five times: 100 us a token. The last of these steps ends at 0.5 s."""


def test_queue_and_prefix_are_weighed_against_each_other() -> None:
    """w0 holds 800 of 1,000 tokens but three wait there, w1 is idle and holds nothing: 0.2 s were lost.

    Three that wait, each of the mean 1,000 tokens: 3,000 tokens = 0.3 s, and 200 tokens = 0.02 s; w1: 1,000 tokens = 0.1 s.
    Of the chosen one counts what was found, 0 of the 800: 0.3 + 0.1 - 0.1 = 0.3 s.
    """
    steps = [*RATE, (0, 1.0, 0.1, 1000.0, 3.0)]
    hoped = regret_of(seen(steps=steps, served=[(0, 2.0, 2.4, 2.5, 1000, 800)], decided=[(2.0, 0, 0, [800, 0])]))
    # the mean of its requests is 200 tokens here: 3 * 200 + 200 = 800 tokens = 0.08 s, less than 0.1 s
    assert hoped.seconds[0] == pytest.approx(0.0)
    found_nothing = regret_of(seen(steps=steps, served=[(0, 2.0, 2.4, 2.5, 1000, 0)], decided=[(2.0, 0, 0, [800, 0])]))
    assert found_nothing.seconds[0] == pytest.approx(0.3)
    assert found_nothing.best.tolist() == [1]
    assert found_nothing.waiting.tolist() == [[3.0, 0.0]]


def test_queue_is_that_of_the_last_step_that_had_ended() -> None:
    """Two waited from 1.0 s on, none from 3.0 s on: a decision at 2.9 s saw two, one at 3.0 s none, one at 0.9 s none."""
    steps = [*RATE, (0, 1.0, 0.1, 1000.0, 2.0), (0, 3.0, 0.1, 1000.0, 0.0)]
    decided = [(at, 0, -1, [0.0, 0.0]) for at in (0.9, 1.0, 2.9, 3.0)]
    assert regret_of(seen(steps=steps, decided=decided)).waiting[:, 0].tolist() == [0.0, 2.0, 2.0, 0.0]


def test_prompt_under_computation_goes_down_evenly() -> None:
    """1,000 tokens from 1 s to 2 s: at 1.25 s 750 of them stand before whoever comes, at 2 s nothing does."""
    regret = regret_of(
        seen(
            steps=RATE,
            served=[(0, 1.0, 1.0, 2.0, 1000, 0)],
            decided=[(1.25, 0, -1, [0.0, 0.0]), (2.5, 0, -1, [0.0, 0.0])],
        )
    )
    assert regret.ahead[:, 0] == pytest.approx([750.0, 0.0])
    assert regret.wait_s[:, 0] == pytest.approx([0.075, 0.0])
    assert regret.pending[:, 0].tolist() == [1.0, 0.0]


def test_a_request_does_not_stand_in_its_own_way() -> None:
    """What arrives at an instant is not queued before the decision of that instant."""
    regret = regret_of(
        seen(served=[(0, 1.0, 3.0, 4.0, 1000, 0)], steps=RATE, decided=[(1.0, 0, 0, [0.0, 0.0]), (1.5, 1, -1, [0, 0])])
    )
    assert regret.waiting[:, 0].tolist() == [0.0, 1.0]


def test_speed_is_the_workers_own() -> None:
    """w0: 1,000 tokens in 0.1 s; w1: 500 in 0.1 s, twice as slow; w2 computed nothing: the median of the two, 150 us."""
    steps = [(w, 0.1 * i, 0.1, tokens, 0.0) for w, tokens in ((0, 1000.0), (1, 500.0)) for i in range(5)]
    found = seconds_a_token(seen(steps=steps, decided=[(1.0, 0, -1, [0, 0, 0])], workers=3))
    assert found == pytest.approx([100e-6, 200e-6, 150e-6])


def test_without_a_measured_speed_nothing_is_known() -> None:
    """No step and no prefill: regret is NaN, not zero."""
    alone = seen(served=[(0, 1.0, NAN, NAN, 1000, 0)], decided=[(1.0, 0, 0, [0.0, 0.0])])
    regret = regret_of(replace(alone, steps=None))
    assert np.isnan(regret.seconds).all()
    assert regret.best.tolist() == [-1]


def test_break_even_is_recompute_over_wait() -> None:
    """800 tokens found at w0, computed elsewhere in 0.08 s; each request there computes 200 tokens, 0.02 s: four may wait."""
    state = seen(steps=RATE, served=[(0, 2.0, 2.4, 2.5, 1000, 800)], decided=[(2.0, 0, 0, [800, 0])])
    assert break_even(state, regret_of(state), np.array([0]), 0) == pytest.approx((0.08, 0.02))
