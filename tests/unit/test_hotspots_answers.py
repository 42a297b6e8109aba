"""A straggler whose answers alone are slower, with steps recorded: what it costs them, and fuller batches that have no like elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnosis.hotspots.beyond import usual_beyond
from diagnosis.hotspots.detection import detect, stays
from diagnosis.hotspots.harm import did_harm_to_answers
from diagnosis.hotspots.judge import find
from diagnosis.hotspots.observed import Observed, Steps
from diagnosis.hotspots.regret import regret_of
from tests.simulated_routing import LENGTHS, POLICIES, Fleet, simulate


def _steps(sequences: list[int], slow: float, span_s: float = 20.0, since_s: float = 0.0) -> Steps:
    """Workers that only decode: a step of n sequences takes 10 ms + n x 1 ms, at the last worker `slow` times as long from since_s on."""
    rows = []
    for worker, size in enumerate(sequences):
        at = 0.0
        while at < span_s:
            took = (0.010 + 0.001 * size) * (slow if worker == len(sequences) - 1 and at >= since_s else 1.0)
            at += took
            rows.append((worker, at, took, size))
    worker, at_s, took_s, size_of = np.array(rows).T
    nothing = np.zeros(len(rows))
    return Steps(worker.astype(np.int64), at_s, took_s, nothing, size_of, nothing, size_of)


def _fleet(steps: Steps, intervals: int = 2) -> Observed:
    """Four workers with next to no prompts, so that nothing is lost before the first token."""
    fleet = Fleet(4, POLICIES["round_robin"], LENGTHS["equal"], intervals, 40, use=0.001, noise=0.0)
    return replace(simulate(fleet), steps=steps)


def test_answers_that_take_twice_as_long_are_a_straggler() -> None:
    """5 sequences, 15 ms a step and 30 ms at w3: each loses 15 ms of what usually takes 15 ms. No prompt waits."""
    seen = _fleet(_steps([5, 5, 5, 5], 2.0))
    [spot] = find(seen).hotspots
    assert (spot.kind, spot.subject["id"], spot.regret_s) == ("straggler", "w3", pytest.approx(0.0, abs=1e-3))
    assert spot.evidence[0].value == pytest.approx(2.0, rel=0.01)
    assert spot.interval == {"start_ns": 0, "end_ns": 20_000_000_000}


def test_harm_to_answers_is_a_tenth_of_their_time() -> None:
    """Steps 1.09 times as long cost 9 %, which is no harm; 1.11 times as long 11 %. Without answers nobody is harmed."""
    slow = np.ones((2, 4), dtype=bool)
    assert not did_harm_to_answers(_fleet(_steps([5, 5, 5, 5], 1.09)), slow).any()
    assert did_harm_to_answers(_fleet(_steps([5, 5, 5, 5], 1.11)), slow)[:, 3].all()
    steps = _steps([5, 5, 5, 5], 2.0)
    prompts = replace(steps, prefill_tokens=np.full(len(steps.at_s), 512.0), decode_tokens=np.zeros(len(steps.at_s)))
    assert not did_harm_to_answers(_fleet(prompts), slow).any()


def test_fuller_batch_than_anybody_has_needs_time_in_proportion_at_most() -> None:
    """The others have 1 to 4 sequences: 8 are taken for twice the 14 ms of 4, 2 for 12 ms, 1 for the 11.75 ms of the least quarter's 1.75."""
    theirs = [_steps([size], 1.0, 0.5) for size in (1, 2, 3, 4)]
    took = np.concatenate([each.duration_s[:30] for each in theirs] + [np.full(3, 0.050)])
    size = np.concatenate([each.decode_tokens[:30] for each in theirs] + [np.array([8.0, 2.0, 1.0])])
    worker = np.where(np.arange(len(took)) < 120, 0, 1)
    nothing = np.zeros(len(took))
    steps = Steps(worker, nothing, took, nothing, size, nothing, size)
    usual = usual_beyond(steps, np.ones(len(took), dtype=bool), np.zeros(2, dtype=np.int64), np.array([False, True]))
    assert np.isnan(usual[:120]).all()
    assert usual[120:].tolist() == pytest.approx([0.028, 0.012, 0.01175])


@pytest.mark.parametrize(("slow", "is_found"), [(1.0, False), (2.0, True)])
def test_worker_whose_batches_have_no_like_is_judged_all_the_same(slow: float, is_found: bool) -> None:
    """w3 has 10 sequences, the others 5: 20 ms where nobody is slow, below the 30 ms that twice the work takes at most; 40 ms where it is."""
    seen = _fleet(_steps([5, 5, 5, 10], slow))
    detected = detect(seen, regret_of(seen))
    assert detected.slow[:, 3].all() == is_found
    assert not detected.slow[:, :3].any()
    if is_found:
        # 40 ms over 30 ms: the bound is all that is known
        assert detected.slowness[:, 3].tolist() == pytest.approx([4 / 3, 4 / 3], rel=0.01)


def test_what_was_found_holds_on_while_it_looks_so() -> None:
    """Found in the third of six: also in the second and the fourth, which look alike, and not in the sixth, which the fifth parts from it."""
    found = np.array([[0, 0, 1, 0, 0, 0]], dtype=bool).T
    looks = np.array([[0, 1, 0, 1, 0, 1]], dtype=bool).T
    assert stays(found, looks).T.astype(int).tolist() == [[0, 1, 1, 1, 0, 0]]
