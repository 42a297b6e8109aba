"""Calibration: slower steps are told from fuller batches and from drift, by steps, token gaps, or mean gaps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diagnosis.facts import F64, Facts, Gaps, StepFacts
from diagnosis.ledger.pace import decoding_at, quiet_gaps
from diagnosis.ledger.step_costs import fit_nonnegative, step_costs
from diagnosis.ledger.work_model import calibrate
from tests.factories import facts, request_facts, work_model

M = 480


def stepped(speed: Any = 1.0, level: F64 | None = None, prefill: float = 100.0) -> Facts:
    """M steps of 10 ms + 1 ms a sequence + 0.1 ms a prompt token, times `speed`; every fourth computes `prefill` tokens."""
    sequences = 1.0 + np.arange(M) % 8 if level is None else level
    tokens = np.where(np.arange(M) % 4 == 0, prefill, 0.0)
    duration = (0.010 + 0.001 * sequences + 0.0001 * tokens) * speed
    steps = StepFacts(
        np.zeros(M, dtype=np.int64),
        ("w0",),
        np.cumsum(duration),
        duration * (1 + 0.001 * np.sin(np.arange(M) * 1.7)),
        {"num_running": sequences, "decode_tokens": sequences, "prefill_tokens": tokens},
    )
    return facts(request_facts(np.arange(10) * 1.0), steps=steps)


def streamed(gap_s: Any = 0.1, at_once: int = 1, n: int = 60) -> Facts:
    """Groups of `at_once` requests that decode ten tokens side by side; nobody else's prompt is computed meanwhile."""
    start = np.repeat(np.arange(n // at_once) * 10.0, at_once)
    pace = np.broadcast_to(np.asarray(gap_s, dtype=float), n)
    gap = np.repeat(pace[:, None], 9, axis=1) * (1 + 0.01 * np.sin(np.arange(n) * 2.3))[:, None]
    first = start + 0.1
    at = first[:, None] + np.cumsum(gap, axis=1)
    gaps = Gaps(np.repeat(np.arange(n), 9), at.ravel(), gap.ravel(), np.ones(9 * n))
    requests = request_facts(
        start, queue=[0.0] * n, prefill=[0.1] * n, decode=gap.sum(axis=1), output_tokens=[10.0] * n, gaps=gaps
    )
    return facts(requests)


def test_steps_tell_how_much_slower_the_same_work_was() -> None:
    """1.5 times as long at every batch size and prompt: 1.5, and half of the faster time is a third of the slower."""
    model = calibrate(stepped(), stepped(1.5))
    assert model.source == "steps"
    assert model.slow_factor == pytest.approx(1.5, rel=0.01)
    assert model.slow_share(suspect=True) == pytest.approx(1 / 3, abs=0.01)
    assert model.slow_share(suspect=False) == 0.0


def test_costs_are_those_of_the_baseline() -> None:
    """0.1 ms a prompt token, 1 ms a sequence, 11 ms a step with one of them."""
    model = calibrate(stepped(), stepped(1.5))
    assert model.prefill_s_per_token == pytest.approx(0.0001, rel=0.02)
    assert model.decode_s_per_seq == pytest.approx(0.001, rel=0.02)
    assert model.step_s == pytest.approx(0.011, rel=0.02)


def test_a_fuller_batch_is_not_a_slower_machine() -> None:
    """Twice the sequences on average (levels 5 to 8 against 1 to 8): steps are longer, the same work is not."""
    model = calibrate(stepped(), stepped(level=5.0 + np.arange(M) % 4))
    assert model.slow_factor == 1.0
    assert model.slow_raw == pytest.approx(1.0, abs=0.01)


def test_a_faster_suspect_is_the_baselines_slowness() -> None:
    """The other way round: the share of slower steps stands in the baseline."""
    model = calibrate(stepped(1.5), stepped())
    assert model.slow_factor == pytest.approx(1 / 1.5, rel=0.01)
    assert model.slow_share(suspect=True) == 0.0
    assert model.slow_share(suspect=False) == pytest.approx(1 / 3, abs=0.01)


def test_drift_inside_the_windows_is_not_called_slow() -> None:
    """Step time swings by 30 % from minute to minute in both windows; 12 % more on average does not stand out."""
    swing = np.where(np.arange(M) // 60 % 2, 1.3, 1.0)
    model = calibrate(stepped(swing), stepped(1.12 * swing))
    assert model.slow_raw == pytest.approx(1.12, rel=0.01)
    assert model.slow_noise is not None
    assert model.slow_noise > np.log(1.12)
    assert model.slow_factor == 1.0


def test_the_same_difference_stands_out_where_nothing_drifts() -> None:
    """12 % is above the floor of 10 % and above the noise."""
    assert calibrate(stepped(), stepped(1.12)).slow_factor == pytest.approx(1.12, rel=0.01)


def test_less_than_a_tenth_is_never_called_slow() -> None:
    """9 %, however sure."""
    assert calibrate(stepped(), stepped(1.09)).slow_factor == 1.0


def test_steps_outside_the_baselines_work_are_not_compared() -> None:
    """The suspect's prompts are ten times longer: those steps say nothing about the same work."""
    model = calibrate(stepped(), stepped(prefill=1000.0))
    assert model.num_compared == M - M // 4
    assert model.slow_factor == 1.0


def test_token_gaps_tell_it_at_equal_concurrency() -> None:
    """Alone: 100 ms, then 160 ms a token."""
    model = calibrate(streamed(0.1), streamed(0.16))
    assert model.source == "token gaps"
    assert model.slow_factor == pytest.approx(1.6, rel=0.02)


def test_gaps_of_other_batch_sizes_are_not_compared() -> None:
    """One at a time against two at a time: no level of concurrency is in both windows."""
    model = calibrate(streamed(0.1), streamed(0.16, at_once=2))
    assert (model.source, model.slow_raw, model.slow_factor) == (None, None, None)
    assert model.slow_share(suspect=True) == 0.0


def test_mean_gaps_stand_in_where_single_gaps_are_not_recorded() -> None:
    """Decode time over tokens, 40 requests alone in each window."""
    base, suspect = (replace(f, requests=replace(f.requests, gaps=None)) for f in (streamed(0.1), streamed(0.16)))
    model = calibrate(base, suspect)
    assert model.source == "mean gap per request"
    assert model.slow_factor == pytest.approx(1.6, rel=0.02)


def test_too_little_to_compare() -> None:
    """29 gaps are fewer than a level needs; no steps: nothing is claimed."""
    model = calibrate(streamed(0.1, n=3), streamed(0.16, n=3))
    assert (model.slow_factor, model.slow_raw, model.num_compared) == (None, None, 0)
    assert model.prefill_s_per_token is None


def test_gaps_with_a_prompt_in_them_are_not_quiet() -> None:
    """A decodes from 0.1 to 1.0 s in nine gaps; B's first token falls into the fifth: eight are pure decode."""
    gap = np.full(9, 0.1)
    gaps = Gaps(np.zeros(9, dtype=np.int64), 0.1 + np.cumsum(gap), gap, np.ones(9))
    requests = request_facts([0.0, 0.45], queue=[0.0, 0.0], prefill=[0.1, 0.1], decode=[0.9, 0.1], gaps=gaps)
    pace = quiet_gaps(requests)
    assert len(pace) == 8
    assert pace.step_s.tolist() == pytest.approx([0.1] * 8)
    # B decodes from 0.55 to 0.65: the gap that ends at 0.7 has its middle, 0.65, at B's last token
    assert pace.running.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0]
    assert pace.at_s[4] == pytest.approx(0.7)


def test_several_tokens_in_a_gap_share_it() -> None:
    """300 ms for three tokens are 100 ms each."""
    gaps = Gaps(np.array([0]), np.array([0.4]), np.array([0.3]), np.array([3.0]))
    requests = request_facts([0.0], queue=[0.0], prefill=[0.1], decode=[0.3], gaps=gaps)
    assert quiet_gaps(requests).step_s.tolist() == pytest.approx([0.1])


def test_running_counts_first_to_last_token_of_one_worker() -> None:
    """Two on w0 overlap between 1.1 and 2; the one on w1 does not count there."""
    requests = request_facts(
        [0.0, 1.0, 0.0],
        queue=[0.0] * 3,
        prefill=[0.1] * 3,
        decode=[2.0] * 3,
        worker=[0, 0, 1],
        worker_names=("w0", "w1"),
    )
    mine = requests.by_worker()[0]
    assert mine.tolist() == [0, 1]
    assert decoding_at(requests, mine, np.array([0.05, 0.5, 1.5, 2.5, 9.0])).tolist() == [0, 1, 2, 1, 0]


def test_a_fit_never_goes_below_zero() -> None:
    """Time falls with the second column: it is left out, and the first takes the mean."""
    design = np.stack([np.ones(4), np.array([1.0, 2.0, 3.0, 4.0])], axis=1)
    assert fit_nonnegative(design, np.array([4.0, 3.0, 2.0, 1.0])).tolist() == pytest.approx([2.5, 0.0])


def test_exchanged_windows_turn_the_ratio() -> None:
    """What took 1.6 times as long takes 1/1.6 seen from the other side; unknown stays unknown."""
    model = work_model(slow_factor=1.6, slow_raw=1.6).exchanged()
    assert model.slow_factor == pytest.approx(0.625)
    assert work_model().exchanged() == work_model()


def test_what_a_sequence_costs_is_told_by_steps_without_prompts() -> None:
    """Six seats that are full but while a prompt is computed; prompts cost more than in proportion: 0.65 ms a sequence, and the same machine.

    Steps with a prompt have one sequence less and take 100 ms more, so a fit of both at once takes small batches for dear ones.
    """
    pure, mixed = np.r_[np.full(900, 6.0), np.full(40, 5.0), np.full(40, 4.0)], np.full(100, 5.0)
    tokens = np.r_[np.zeros(len(pure)), 1000.0 + 10.0 * np.arange(100)]
    sequences = np.r_[pure, mixed]
    base = at_levels(sequences, tokens)
    few = at_levels(1.0 + np.arange(600) % 6, np.zeros(600))
    model = calibrate(base, few)
    assert model.decode_s_per_seq == pytest.approx(0.00065, rel=0.02)
    assert model.slow_raw == pytest.approx(1.0, abs=0.01)
    assert model.slow_factor == 1.0
    assert step_costs(stepped().steps or pytest.fail("no steps")).tolist() == pytest.approx(
        [0.010, 0.0001, 0.001], rel=0.02
    )


def at_levels(sequences: F64, tokens: F64) -> Facts:
    """Steps of 9.4 ms + 0.65 ms a sequence + 30 us a prompt token + 10 ns for each pair of them, in an order drawn by lot."""
    order = np.random.default_rng(1).permutation(len(sequences))
    sequences, tokens = sequences[order], tokens[order]
    duration = 0.0094 + 0.00065 * sequences + 3e-5 * tokens + 1e-8 * tokens**2
    told = {"num_running": sequences, "decode_tokens": sequences, "prefill_tokens": tokens}
    steps = StepFacts(np.zeros(len(order), dtype=np.int64), ("w0",), np.cumsum(duration), duration, told)
    return facts(request_facts(np.arange(10) * 1.0), steps=steps)
