"""A fixed time that no phase tells of: told from queues by how close together it lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.facts import F64, HandoverFacts
from diagnosis.ledger.offset import Offset, offset_between, residual_s
from tests.factories import facts, request_facts
from tests.moves_scenarios import handover

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


def of_two(wire_s: float, told_s: float | None, *, before_first: bool = True, **numbers: list[float]) -> F64:
    """What no phase tells of a request whose first token took 1 s: 0.1 s of queue and 0.2 s of prefill at the worker that prefilled it."""
    requests = replace(request_facts([0.0], queue=[0.1], prefill=[0.2], **numbers), first_token_s=np.array([1.0]))
    one = handover(transfer_wire=wire_s)
    moves: HandoverFacts = replace(
        one,
        parts={name: seconds[:1] for name, seconds in one.parts.items()},
        before_first=np.array([before_first]),
        told_s=None if told_s is None else np.array([told_s]),
    )
    return residual_s(replace(facts(requests), handover=moves))


def test_what_the_decode_worker_s_own_row_holds_is_outside_of_no_phase() -> None:
    """Its queue and prefill took 0.6 of the 0.7 s that are left; a transfer of 0.65 s tells more, and is not counted beside them."""
    assert of_two(0.0, None) == pytest.approx([0.7])
    assert of_two(0.0, 0.6) == pytest.approx([0.1])
    assert of_two(0.65, 0.6) == pytest.approx([0.05])
    assert of_two(0.65, 0.6, before_first=False) == pytest.approx([0.7]), (
        "after the first token it is none of the first token's time"
    )


def test_a_hand_over_that_its_request_tells_too_is_taken_off_once() -> None:
    """0.3 s on the wire, by the request and by the hand-over: 0.4 of the 0.7 s are left."""
    assert of_two(0.3, None, kv_transfer_s=[0.3]) == pytest.approx([0.4])
