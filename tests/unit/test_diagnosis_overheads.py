"""Bookkeeping inside steps: whose it is, how much of a step it can be, and that it is no slower step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.causes.cache_lock_contention import rise_beyond_chance
from diagnosis.causes.eviction_overhead import change_point
from diagnosis.facts import Facts, StepFacts
from diagnosis.ledger.overheads import overheads, share_of_loading, without_overheads
from diagnosis.ledger.work_model import calibrate
from tests.factories import facts, request_facts


def steps(duration: list[float], **numbers: list[float]) -> StepFacts:
    """Steps of w0 that follow each other from 0 s on."""
    lasted = np.asarray(duration, dtype=float)
    columns = {name: np.asarray(values, dtype=float) for name, values in numbers.items()}
    return StepFacts(np.zeros(len(lasted), dtype=np.int64), ("w0",), np.cumsum(lasted), lasted, columns)


def window(told: StepFacts, arrival: list[float] | None = None, **numbers: list[float]) -> Facts:
    at = arrival or [0.0]
    return facts(request_facts(at, queue=[0.0] * len(at), prefill=[0.1] * len(at), **numbers), steps=told)


def test_a_look_up_is_of_the_step_that_begins_with_it() -> None:
    """The second request is scheduled at 1 s, when the first step ends: its 0.2 s are the second step's."""
    found = overheads(window(steps([1.0, 1.0]), [0.5, 1.0], cache_lookup_s=[0.1, 0.2]))
    assert found["lookup_overhead"].tolist() == [0.1, 0.2]


def test_making_room_is_what_the_scheduler_took_more() -> None:
    """Scheduling takes 1 ms in steps that evict nothing and 21 in one that evicts: 20 ms."""
    told = steps([0.1] * 4, schedule_s=[0.001, 0.001, 0.021, 0.001], blocks_evicted=[0, 0, 5, 0])
    assert overheads(window(told))["eviction_overhead"] == pytest.approx([0.0, 0.0, 0.02, 0.0])


def test_the_engine_s_own_word_on_allocating_comes_first() -> None:
    """Where alloc_s is told, schedule_s is not asked."""
    told = steps([0.1] * 2, schedule_s=[0.05, 0.05], alloc_s=[0.01, 0.02], blocks_evicted=[0, 5])
    assert overheads(window(told))["eviction_overhead"].tolist() == [0.01, 0.02]


def test_nothing_told_is_nothing_found() -> None:
    """Without steps, and with steps that tell none of it."""
    assert overheads(facts(request_facts([0.0]))) == {}
    assert overheads(window(steps([0.1], num_running=[1.0]))) == {}
    known = window(steps([0.1], num_running=[1.0]))
    assert without_overheads(known) is known


def test_scheduling_without_counted_evictions_is_nobody_s() -> None:
    """Scheduling got long, and nobody says that a block was evicted."""
    assert overheads(window(steps([0.1], schedule_s=[0.05]))) == {}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=20))
def test_overheads_are_never_more_than_the_step(rows: list[tuple[float, float, float]]) -> None:
    """Whatever is told of a step, what is left of it is not negative."""
    duration, alloc, probe = (list(column) for column in zip(*rows, strict=True))
    known = window(steps(duration, alloc_s=alloc, probe_s=probe))
    net = without_overheads(known).steps
    assert net is not None
    assert (net.duration_s >= -1e-12).all()
    total = sum(overheads(known).values()) + net.duration_s
    assert total == pytest.approx(np.asarray(duration))


def test_a_probe_that_takes_half_of_each_step_makes_no_slow_steps() -> None:
    """Steps take 10 ms, then 20 of which the probe took 10: the work itself is as fast as before."""
    tokens = [float(10 + i % 3) for i in range(200)]
    work = {"prefill_tokens": tokens, "decode_tokens": [1.0] * 200}
    base = window(steps([0.010] * 200, probe_s=[0.0] * 200, **work))
    suspect = window(steps([0.020] * 200, probe_s=[0.010] * 200, **work))
    assert calibrate(base, suspect).slow_factor == 1.0
    blind = window(steps([0.020] * 200, **work))
    assert calibrate(base, blind).slow_factor == pytest.approx(2.0)


def test_evictions_that_turn_dear_have_their_instant() -> None:
    """30 steps of 0.1 s at 0.1 ms a block, then 30 at 5 ms: the first dear step ends at 3.1 s."""
    cost = [0.001] * 30 + [0.05] * 30
    known = window(steps([0.1] * 60, alloc_s=cost, blocks_evicted=[10.0] * 60))
    assert change_point(known, 0.0001) == pytest.approx(3.1)
    assert change_point(known, 0.005) is None, "dear before too"
    steady = window(steps([0.1] * 60, alloc_s=[0.05] * 60, blocks_evicted=[10.0] * 60))
    assert change_point(steady, 0.0001) is None, "dear from the first step on"
    assert change_point(window(steps([0.1] * 5, alloc_s=cost[:5], blocks_evicted=[1.0] * 5)), 0.0001) is None


@pytest.mark.parametrize(("waiting", "rise_s"), [(slice(0, 20), 0.0), (slice(0, None, 20), 0.0025)])
def test_waits_of_one_burst_are_no_lock_that_is_held_more_often(waiting: slice, rise_s: float) -> None:
    """20 of 400 look-ups wait 50 ms, 2.5 ms in the mean: all in one twentieth of the window chance explains it, one in each it does not."""
    before, waited = np.zeros(400), np.zeros(400)
    waited[waiting] = 0.05
    assert rise_beyond_chance(waited, before)[0] == pytest.approx(rise_s)
    assert rise_beyond_chance(before, waited)[0] == 0.0


def test_one_look_up_tells_no_rise() -> None:
    """One wait of a second: nobody knows how often such a one comes."""
    assert rise_beyond_chance(np.array([1.0]), np.zeros(400))[0] == 0.0


def loading(stalls: float, pairs: int = 30, requests_s: float = 0.05) -> Facts:
    """Steps of 10 ms of work, every other one of which loads for 50 ms and is longer by `stalls` of that."""
    loads = np.tile([0.0, 0.05], pairs)
    told = steps(
        list(0.01 + stalls * loads),
        kv_load_s=list(loads),
        prefill_tokens=[0.0] * len(loads),
        decode_tokens=list(np.tile([1.0, 1.0, 2.0, 2.0], pairs)[: len(loads)]),
    )
    return window(told, kv_load_s=[requests_s])


def test_a_step_that_stands_still_for_a_load_was_not_working() -> None:
    """50 ms of it are the load's, and 10 ms of work are left in every step; of a load that half runs beside the work, half."""
    known = loading(1.0)
    assert overheads(known)["tier_load"].tolist() == pytest.approx([0.0, 0.05] * 30)
    net = without_overheads(known).steps
    assert net is not None
    assert net.duration_s == pytest.approx([0.01] * 60)
    assert overheads(loading(0.6))["tier_load"].tolist() == pytest.approx([0.0, 0.03] * 30)


@pytest.mark.parametrize(
    "known",
    [loading(0.0), loading(0.3), loading(1.0, pairs=29), loading(1.0, requests_s=0.0)],
    ids=["goes on meanwhile", "mostly goes on", "29 steps", "no request loads"],
)
def test_loads_that_steps_do_not_stand_still_for_are_none_of_theirs(known: Facts) -> None:
    """As long as the others, or hardly longer; too few to tell; or blocks of who was preempted, for no request waits for a tier."""
    assert "tier_load" not in overheads(known)


def test_how_much_of_the_steps_time_went_into_loads() -> None:
    """30 steps of 10 ms and 30 of 60: 1.5 of 2.1 s. None of it where they go on meanwhile."""
    assert share_of_loading(loading(1.0)) == pytest.approx(1.5 / 2.1)
    assert share_of_loading(loading(0.0)) == 0.0
