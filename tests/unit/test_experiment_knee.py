"""Where P99 starts to break, and which load is tried next; limits worked by hand."""

from __future__ import annotations

import pytest

from diagnosis.experiments.knee import Level, find_knee, next_level
from tests.experiment_rows import Call, arm, observed


def level(load: float, ttft_s: float, *, n: int = 140, spread_s: float = 0.0) -> Level:
    """A load whose requests all take that long; repeats differ by `spread_s`."""
    return Level(
        load,
        arm("D", lambda repeat: observed(f"D/{repeat}", [Call(i * 0.1, ttft_s + spread_s * repeat) for i in range(n)])),
    )


def test_knee_is_the_last_load_before_p99_doubles() -> None:
    """100 ms at the lowest load, so the limit is 200 ms: 190 ms at 4 keeps it, 210 ms at 8 breaks it."""
    levels = [level(8, 0.21), level(1, 0.1), level(4, 0.19), level(2, 0.11)]
    knee = find_knee(levels, None, "requests/s")
    assert (knee.load, knee.breaks_at) == (4, 8)
    assert knee.limit_s == pytest.approx(0.2)
    assert knee.is_sure
    assert "The knee is at 4 requests/s: P99 TTFT is 190 ms there and 210 ms at 8 (limit 200 ms)." in knee.sentence


def test_with_an_slo_the_limit_is_the_slo() -> None:
    """300 ms are allowed, so 210 ms at 8 is fine and 310 ms at 16 is not."""
    knee = find_knee([level(1, 0.1), level(8, 0.21), level(16, 0.31)], 0.3, "requests/s")
    assert (knee.load, knee.breaks_at, knee.limit_s) == (8, 16, 0.3)
    assert "SLO of 0.3 s" in knee.rule


def test_a_load_that_recovers_after_the_break_is_not_the_knee() -> None:
    """2 breaks; that 4 does not is luck, and the knee stays 1."""
    knee = find_knee([level(1, 0.1), level(2, 0.5), level(4, 0.15)], None, "in flight")
    assert (knee.load, knee.breaks_at) == (1, 2)


def test_no_break_says_that_the_knee_lies_higher() -> None:
    """Nothing above 200 ms up to 4."""
    knee = find_knee([level(1, 0.1), level(4, 0.12)], None, "in flight")
    assert knee.load is None
    assert knee.breaks_at is None
    assert "up to 4 in flight" in knee.sentence


def test_a_break_at_the_lowest_load_says_to_begin_lower() -> None:
    """Only an SLO can do that."""
    knee = find_knee([level(1, 0.4), level(2, 0.5)], 0.3, "in flight")
    assert knee.load is None
    assert knee.breaks_at == 1
    assert "begin lower" in knee.sentence


def test_a_knee_whose_intervals_hold_the_limit_is_not_sure() -> None:
    """Repeats at 210, 240 and 270 ms: three of them say little about 200 ms."""
    knee = find_knee([level(1, 0.1), level(2, 0.21, spread_s=0.03)], None, "in flight")
    assert knee.load == 1
    assert not knee.is_sure
    assert "more requests or repeats" in knee.sentence


def test_a_load_at_which_nothing_came_back_breaks() -> None:
    """An unknown P99 is no good one."""
    nothing = Level(
        4, arm("D", lambda repeat: observed(f"D/{repeat}", [Call(0.1 * i, 0.1, {"state": "failed"}) for i in range(9)]))
    )
    assert find_knee([level(1, 0.1), nothing], None, "in flight").breaks_at == 4
    assert find_knee([nothing], None, "in flight").limit_s is None
    assert next_level([nothing], None, whole=True) is None


def test_calls_without_an_answer_break_p99_however_fast_the_others_are() -> None:
    """Two of 140 are more than one of a hundred; one is not."""

    def losing(load: float, lost: int) -> Level:
        calls = [Call(0.1 * i, 0.1, {"state": "rejected"} if i < lost else {}) for i in range(140)]
        return Level(load, arm("D", lambda repeat: observed(f"D/{repeat}", calls)))

    assert find_knee([level(1, 0.1), losing(2, 1)], None, "in flight").breaks_at is None
    knee = find_knee([level(1, 0.1), losing(2, 2)], None, "in flight")
    assert knee.breaks_at == 2
    assert "where 6 of 420 calls got no answer" in knee.sentence


def test_loads_double_until_p99_breaks_then_the_gap_is_halved() -> None:
    """1, 2, 4 fine, 8 breaks: then sqrt(32) = 5.66; it breaks too: sqrt(4 * 5.66) = 4.76; 4.76 / 4 is still above 1.15; 4.36
    is tried, and 4.36 / 4 = 1.09 ends it."""
    levels = [level(1, 0.1), level(2, 0.11), level(4, 0.12)]
    assert next_level(levels[:1], None, whole=False) == 2
    assert next_level(levels, None, whole=False) == 8
    levels.append(level(8, 0.9))
    assert next_level(levels, None, whole=False) == 5.66
    levels.append(level(5.66, 0.8))
    assert next_level(levels, None, whole=False) == 4.76
    levels.append(level(4.76, 0.7))
    assert next_level(levels, None, whole=False) == 4.36
    levels.append(level(4.36, 0.6))
    assert next_level(levels, None, whole=False) is None


def test_requests_in_flight_are_whole() -> None:
    """Between 2 and 3 there is none."""
    assert next_level([level(2, 0.1), level(4, 0.9)], None, whole=True) == 3
    assert next_level([level(2, 0.1), level(3, 0.9)], None, whole=True) is None
