"""Intervals from repeats: numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.experiments.resampling import difference, draws_of, estimate, of_numbers


def _repeats(*values: list[float]) -> list[np.ndarray]:
    return [np.array(some) for some in values]


def test_two_repeats_are_drawn_in_four_ways() -> None:
    """Both the first, both the second, or one of each, which comes about twice."""
    draws = draws_of(2)
    assert draws.counts.tolist() == [[2, 0], [1, 1], [0, 2]]
    assert draws.ways.tolist() == [1, 2, 1]


def test_three_repeats_are_drawn_in_twenty_seven_ways_ten_of_them_different() -> None:
    """3^3 ways; 3 of them draw one repeat alone, 6 draw all three."""
    draws = draws_of(3)
    assert len(draws.ways) == 10
    assert draws.ways.sum() == 27
    by_counts = {tuple(counts): ways for counts, ways in zip(draws.counts.tolist(), draws.ways.tolist(), strict=True)}
    assert by_counts[(3, 0, 0)] == 1
    assert by_counts[(2, 1, 0)] == 3
    assert by_counts[(1, 1, 1)] == 6


def test_many_repeats_are_drawn_by_seed() -> None:
    """7 repeats have 823,543 ways: 2,000 stand for them, always the same."""
    draws = draws_of(7)
    assert draws.counts.shape == (2000, 7)
    assert (draws.counts.sum(axis=1) == 7).all()
    assert (draws.counts == draws_of(7).counts).all()


def test_interval_of_a_mean_is_spread_by_student() -> None:
    """Repeats 1 and 3: draws 1, 2, 2, 3; one degree of freedom spreads them 9.7107 / 1.959964 * sqrt(2) = 7.0068 times
    about 2: -5.0068, 2, 2, 9.0068. The 2.5 % point lies 0.075 of the way from the first to the second: -4.4813."""
    found = of_numbers([1.0, 3.0])
    assert found.value == 2.0
    assert found.interval_95 == pytest.approx((-4.4813, 8.4813), abs=1e-3)


def test_p_value_is_students() -> None:
    """1, 2, 3: mean 2, deviation 1, t = 2 sqrt(3) = 3.4641 of two degrees of freedom: 1 - t / sqrt(t^2 + 2) = 0.0742.
    Equal numbers have no spread: certain, or nothing."""
    assert of_numbers([1.0, 2.0, 3.0]).p_value == pytest.approx(0.0742, abs=1e-4)
    assert of_numbers([0.1, 0.1, 0.1]).p_value == 0.0
    assert of_numbers([0.0, 0.0, 0.0]).p_value == 1.0
    assert estimate([np.arange(100, dtype=float)] * 3, "0.99").p_value is None  # a lower bound alone


def test_quantile_is_of_all_requests_together() -> None:
    """P50 of 1..10 over two repeats is the fifth: 5."""
    found = estimate(_repeats([1, 3, 5, 7, 9], [2, 4, 6, 8, 10]), "0.5")
    assert found.value == 5


def test_p99_has_no_interval_below_299_requests_and_a_lower_bound_from_there() -> None:
    """297 requests: none, and why; 300: a lower bound alone; 369: both ends."""
    of = lambda n: estimate([np.arange(n, dtype=float)] * 3, "0.99")  # noqa: E731
    assert of(99).interval_95 is None
    assert of(99).reason == "297 requests; quantile 0.99 needs 299"
    bound = of(100).interval_95
    assert bound is not None
    assert np.isfinite(bound[0])
    assert bound[1] == np.inf
    both = of(123).interval_95
    assert both is not None
    assert np.isfinite(both).all()


def test_p99_9_is_told_from_2995_requests_on() -> None:
    """The issue's bound: 0.999^2995 is the first below 5 %."""
    assert estimate([np.arange(998.0)] * 3, "0.999").interval_95 is None  # 2,994
    assert estimate([np.arange(998.0), np.arange(998.0), np.arange(999.0)], "0.999").interval_95 is not None


def test_one_repeat_has_no_interval() -> None:
    """Nothing tells how far another would lie."""
    found = estimate(_repeats([1.0] * 50), None)
    assert found.value == 1.0
    assert found.interval_95 is None
    assert "1 repeat" in str(found.reason)


def test_no_request_is_unknown_and_not_zero() -> None:
    """An arm in which nothing came back has no mean."""
    assert estimate(_repeats([], []), None).value is None
    assert difference(_repeats([1.0]), _repeats([]), None).value is None
    assert of_numbers([]).value is None


def test_what_a_hard_trace_does_to_both_arms_is_no_difference() -> None:
    """Repeats 1, 5, 9 s against 2, 6, 10 s differ by 1 s in every draw, so the interval is that alone."""
    base = [np.full(20, value) for value in (1.0, 5.0, 9.0)]
    found = difference(base, [values + 1.0 for values in base], None)
    assert found.value == pytest.approx(1.0)
    assert found.interval_95 == pytest.approx((1.0, 1.0))
    assert found.is_above_0


def test_a_difference_that_changes_sign_between_repeats_holds_zero() -> None:
    """-1, 0, +1 s: nothing is known."""
    base = [np.full(20, 5.0)] * 3
    found = difference(base, [values + step for values, step in zip(base, (-1.0, 0.0, 1.0), strict=True)], None)
    assert found.interval_95 is not None
    assert found.interval_95[0] < 0 < found.interval_95[1]
    assert not found.is_above_0
    assert not found.is_below_0


@given(st.lists(st.lists(st.floats(0, 1e3), min_size=20, max_size=40), min_size=2, max_size=4))
def test_equal_arms_differ_by_zero_in_every_draw(repeats: list[list[float]]) -> None:
    """Whatever the values: an arm against itself is 0, and its interval is 0."""
    arrays = [np.array(values) for values in repeats]
    for q in (None, "0.5"):
        found = difference(arrays, arrays, q)
        assert found.value == 0
        assert found.interval_95 == (0.0, 0.0)


@given(st.lists(st.lists(st.floats(0, 1e3), min_size=20, max_size=40), min_size=2, max_size=4))
def test_arms_that_change_places_change_the_sign(repeats: list[list[float]]) -> None:
    """B to D is minus D to B, ends included."""
    base = [np.array(values) for values in repeats]
    suspect = [np.sqrt(values) for values in base]
    there, back = difference(base, suspect, None), difference(suspect, base, None)
    assert there.interval_95 is not None
    assert back.interval_95 is not None
    assert there.interval_95 == pytest.approx((-back.interval_95[1], -back.interval_95[0]), abs=1e-6)


def test_arms_of_one_process_are_rarely_called_different() -> None:
    """300 pairs of arms that differ in nothing, four repeats each, hard and easy traces shared by both: at a nominal 5 % fewer than
    one in ten intervals leaves 0 out."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(300):
        traces = rng.normal(0.0, 0.2, 4)
        base, suspect = (
            [np.exp(trace + rng.normal(0.0, 0.05)) * rng.exponential(1.0, 100) for trace in traces] for _ in range(2)
        )
        found = difference(base, suspect, None).interval_95
        assert found is not None
        wrong += not found[0] <= 0 <= found[1]
    assert wrong < 30
