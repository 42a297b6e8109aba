"""Slow steps in a part of a window: found with their part, not mistaken for drift, and not found where there is only drift."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.drift import BLOCKS, Drift, compare, drift
from diagnosis.facts import F64
from diagnosis.ledger import write
from diagnosis.spent import Context
from diagnosis.work_model import calibrate
from tests.factories import facts, request_facts, work_model
from tests.unit.test_diagnosis_work_model import stepped, streamed


def spans(*effect: float) -> Drift:
    """A window of 80 s whose spans have these effects, each a little off in turn."""
    wobble = 0.004 * np.where(np.arange(len(effect)) % 2, 1.0, -1.0)
    return Drift(np.asarray(effect) + wobble, np.arange(len(effect) + 1) * 10.0)


QUIET = spans(*[0.0] * BLOCKS)


def test_a_slow_half_is_a_spell() -> None:
    """The last four of eight spans at 0.47 (1.6 times): the ratio of the spell, from 40 s to 80 s, not 1.26 of the whole."""
    ratio = compare(QUIET, spans(0, 0, 0, 0, 0.47, 0.47, 0.47, 0.47))
    assert ratio is not None
    assert ratio.value == pytest.approx(1.6, rel=0.01)
    assert ratio.spell is not None
    assert (ratio.spell.start_s, ratio.spell.end_s) == (40.0, 80.0)
    assert np.log(ratio.value) > ratio.noise
    assert ratio.spell.holds(np.array([39.9, 40.0, 79.9, 80.0, np.nan])).tolist() == [False, True, True, False, False]


def test_a_spell_of_the_baseline_is_one_of_the_other_side() -> None:
    """What was slow in the middle of the baseline is over: a ratio below 1, and the baseline's part."""
    ratio = compare(spans(0, 0, 0.47, 0.47, 0.47, 0, 0, 0), QUIET)
    assert ratio is not None
    assert ratio.value == pytest.approx(1 / 1.6, rel=0.01)
    assert ratio.spell is not None
    assert (ratio.spell.start_s, ratio.spell.end_s) == (20.0, 50.0)


@pytest.mark.parametrize(
    "suspect",
    [
        spans(*[0.3] * BLOCKS),  # all of it
        spans(0.1, -0.1, 0.2, -0.2, 0.1, -0.1, 0.2, -0.2),  # scatter
        spans(0, 0, 0, 0.6, 0, 0, 0, 0),  # one span
        spans(0, 0, 0, 0, 0.15, 0.15, 0.15, 0.15),  # too little
    ],
)
def test_what_is_no_spell(suspect: Drift) -> None:
    """A slow whole, scatter, one bad span, a small rise."""
    ratio = compare(QUIET, suspect)
    assert ratio is not None
    assert ratio.spell is None


def test_quiet_windows_have_no_spell() -> None:
    """Of 2,000 pairs whose spans drift by 5 % at most two have one."""
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(2000):
        ratio = compare(*(Drift(rng.normal(0.0, 0.05, BLOCKS), np.arange(BLOCKS + 1) * 1.0) for _ in range(2)))
        found += ratio is not None and ratio.spell is not None
    assert found <= 2


def test_spans_hold_as_many_steps_each() -> None:
    """80 steps, the first half slower, unknown ones left out: eight spans of ten, edges at the tenths."""
    relative = np.where(np.arange(80) < 40, 0.5, 0.0)
    relative[3] = np.nan
    found = drift(relative, np.arange(80.0))
    assert found.effect.tolist() == [0.5] * 4 + [0.0] * 4
    assert len(found.edges) == BLOCKS + 1
    assert drift(np.array([np.nan]), np.array([1.0])).effect.size == 0


def test_too_few_spans_say_nothing() -> None:
    """Three spans are no scatter."""
    assert compare(spans(0, 0, 0), QUIET) is None


def halves(n: int) -> F64:
    """1 in the first half, 1.6 in the second."""
    return np.where(np.arange(n) < n // 2, 1.0, 1.6)


def test_steps_that_got_slow_half_way_are_found_by_steps_and_by_gaps() -> None:
    """1.6 times from the middle on: the factor of the part, and which part."""
    by_steps = calibrate(stepped(), stepped(halves(480)))
    assert by_steps.slow_factor == pytest.approx(1.6, rel=0.02)
    assert by_steps.spell is not None
    by_gaps = calibrate(streamed(), streamed(0.1 * halves(60)))
    assert by_gaps.source == "token gaps"
    assert by_gaps.slow_factor == pytest.approx(1.6, rel=0.02)
    assert by_gaps.spell is not None
    assert by_gaps.spell.start_s == pytest.approx(300.0, abs=20.0)
    assert by_gaps.slow_shares(np.array([0.0, 500.0]), suspect=True).tolist() == pytest.approx([0.0, 0.375], abs=0.01)
    assert by_gaps.slow_shares(np.array([0.0, 500.0]), suspect=False).tolist() == [0.0, 0.0]


def test_only_requests_of_the_spell_pay_for_it() -> None:
    """Steps were 1.6 times as slow from 300 s on: 0.375 of a prefill of 160 ms there are slow steps, none before."""
    model = calibrate(streamed(), streamed(0.1 * halves(60)))
    requests = request_facts([100.0, 400.0], queue=[0.0, 0.0], prefill=[0.1, 0.16])
    ledger = write(facts(requests), "ttft", Context(model, 8, 1e9, None, False, 0.0, True))
    assert ledger.column("slow_steps").tolist() == pytest.approx([0.0, 0.06], abs=0.001)
    whole = work_model(slow_factor=1.6)
    ledger = write(facts(requests), "ttft", Context(whole, 8, 1e9, None, False, 0.0, True))
    assert ledger.column("slow_steps").tolist() == pytest.approx([0.0375, 0.06], abs=0.001)
