"""Single steps that stood still: which are told, which are the work's own, and that nothing is told of a slow spell."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.facts import F64, Facts, StepFacts
from diagnosis.ledger.pauses import stood_still
from diagnosis.ledger.step_reasons import with_step_extras
from tests.factories import facts, request_facts

STEPS = 200
PAUSES = np.array([20, 50, 80, 110, 140, 170])


def told(beyond_s: F64, prompts: F64 | None = None) -> list[int] | None:
    """Steps of 10 ms of work on one worker; every other one computes a prompt unless said otherwise."""
    worker, work = np.zeros(len(beyond_s), dtype=np.int64), np.full(len(beyond_s), 0.01)
    with_prompt = np.arange(len(beyond_s)) % 2 == 0 if prompts is None else prompts > 0
    still = stood_still(worker, work, beyond_s, with_prompt)
    return None if still is None else np.flatnonzero(still).tolist()


def paused(at: F64 | list[int], seconds: float = 0.3) -> F64:
    beyond = np.zeros(STEPS)
    beyond[at] = seconds
    return beyond


def test_single_steps_of_many_times_their_work_stood_still() -> None:
    """Six of 200 steps took 300 ms beyond their 10: 31 times their work; steps 20, 50, ... of even number, and 81 and 171 of odd."""
    at = [20, 50, 81, 110, 140, 171]
    assert told(paused(at)) == at


@pytest.mark.parametrize("seconds", [0.02, 0.029])
def test_jitter_is_no_pause(seconds: float) -> None:
    """20 and 29 ms beyond 10 ms of work: below the 30 ms that are no jitter of a scheduler's."""
    assert told(paused(PAUSES, seconds)) is None


def test_few_come_by_chance() -> None:
    """Four of 200."""
    assert told(paused([21, 50, 81, 110])) is None


def test_steps_that_follow_one_another_are_a_slow_spell() -> None:
    """Steps 50 to 59 in a row: eight of them have a slow one on both sides, and none has a quick one on both."""
    assert told(paused(list(range(50, 60)))) is None


def test_steps_that_are_long_for_their_prompts_did_not_stand_still() -> None:
    """All six compute a prompt, as half of the steps do: of what pauses, a quarter or more would have had none."""
    assert told(paused(PAUSES)) is None
    assert told(paused(PAUSES), np.ones(STEPS)) == PAUSES.tolist(), "where every step computes one they choose nothing"


def test_what_is_the_pace_of_a_tenth_of_the_steps_is_no_pause() -> None:
    """25 of 200, alone each, is an eighth."""
    assert told(paused(list(range(0, 175, 7)))) is None


def window(pauses: list[int], alloc_s: float = 0.0) -> Facts:
    """200 steps of one worker, 10 ms for a sequence that decodes, and 300 ms more at these; `alloc_s` of it is told to be allocating."""
    duration = np.full(STEPS, 0.01)
    duration[pauses] += 0.3
    alloc = np.where(duration > 0.1, alloc_s, 0.0)
    numbers = {"prefill_tokens": np.zeros(STEPS), "decode_tokens": np.ones(STEPS)}
    numbers |= {"alloc_s": alloc} if alloc_s else {}
    steps = StepFacts(np.zeros(STEPS, dtype=np.int64), ("w0",), np.cumsum(duration), duration, numbers)
    return facts(request_facts([0.0], queue=[0.0], prefill=[0.1]), steps=steps)


def test_what_a_pause_took_beyond_its_work_is_slower_steps() -> None:
    """A step of 310 ms whose work takes 10 has 300 ms of it; the other 194 have none."""
    extras = with_step_extras(window([]), window(PAUSES.tolist()))[1].step_extras
    assert extras["slow_steps"][PAUSES] == pytest.approx(0.3)
    assert float(extras["slow_steps"].sum()) == pytest.approx(6 * 0.3)


def test_what_somebody_tells_is_no_pause() -> None:
    """295 of the 300 ms were allocating: what is left is 5 ms."""
    assert "slow_steps" not in with_step_extras(window([]), window(PAUSES.tolist(), 0.295))[1].step_extras
