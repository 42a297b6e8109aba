"""Bookkeeping in virtual time: what each act costs, and a front end of few threads."""

from __future__ import annotations

import pytest

from engine_probe.engine.fleet.front_ends import ThreadPoolFrontEnd
from engine_probe.engine.roofline.hardware import find_hardware
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.engine.virtual_costs import CostSettings, VirtualCosts, charged_hardware
from engine_probe.errors import UsageError


def test_a_look_up_costs_its_blocks_and_an_eviction_its_scan() -> None:
    """1 ms and 100 blocks of 2 us: 1.2 ms; 3 blocks found by scans of 1,000 at 1 us each: 3 ms."""
    clock = VirtualClock()
    costs = VirtualCosts(clock, CostSettings(lookup_s=0.001, lookup_block_s=2e-6, evict_s=0.0, scan_block_s=1e-6))
    costs.lookup(100)
    assert clock.now == 1_200_000
    costs.evict(3, 1000)
    assert clock.now == 4_200_000


def test_a_lock_that_others_hold_makes_some_wait_and_a_seed_says_who() -> None:
    """Held 30 % of the time for 10 ms: of 4,000 look-ups about 30 % wait, about 10 ms each; the same again by seed."""
    waits = []
    for _ in range(2):
        clock = VirtualClock()
        costs = VirtualCosts(clock, CostSettings(lookup_block_s=0, lock_busy_ratio=0.3, lock_hold_s=0.01), seed=4)
        seen = []
        for _ in range(4000):
            before = clock.now
            costs.lookup(1)
            seen.append(clock.now - before)
        waits.append(seen)
    assert waits[0] == waits[1]
    waited = [wait for wait in waits[0] if wait]
    assert 0.27 < len(waited) / 4000 < 0.33
    assert 0.009 < sum(waited) / len(waited) / 1e9 < 0.011


def test_the_recorder_is_charged_with_every_step_and_told() -> None:
    """The step's constant grows by it, and `probe` says it."""
    settings = CostSettings(probe_s=0.003)
    hardware = find_hardware("a100")
    assert charged_hardware(hardware, settings).host_overhead_s == pytest.approx(hardware.host_overhead_s + 0.003)
    assert VirtualCosts(VirtualClock(), settings).probe() == 0.003


@pytest.mark.parametrize("wrong", [{"lookup_s": -1.0}, {"probe_s": float("nan")}, {"lock_busy_ratio": 1.0}])
def test_costs_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    """By the name of the field."""
    with pytest.raises(UsageError, match=next(iter(wrong))):
        CostSettings(**wrong)


def test_calls_wait_for_a_thread_of_the_front_end() -> None:
    """One thread, 10 ms a call and 1 us a token of 1,000: 11 ms; a second call at 5 ms waits for 6 and takes 11."""
    front = ThreadPoolFrontEnd(1, fixed_s=0.01, token_s=1e-6)
    call = Call("r", 0, 1000, 1)
    assert front.delay_s(call, 0) == pytest.approx(0.011)
    assert front.delay_s(call, 5_000_000) == pytest.approx(0.017)
    assert ThreadPoolFrontEnd(2, fixed_s=0.01, token_s=0).delay_s(call, 5_000_000) == pytest.approx(0.01)


@pytest.mark.parametrize(("threads", "fixed_s"), [(0, 0.0), (1, -1.0), (1, float("nan"))])
def test_a_front_end_that_makes_no_sense_is_refused(threads: int, fixed_s: float) -> None:
    """No thread, or time that runs backwards."""
    with pytest.raises(UsageError):
        ThreadPoolFrontEnd(threads, fixed_s=fixed_s)
