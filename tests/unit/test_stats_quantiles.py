"""Ranks, tails and effective sizes: diagnosis/statistics/quantiles.py."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.statistics.quantiles import (
    allowed_above,
    expected_shortfall,
    kish,
    nearest_rank,
    rank_order,
    tail_index,
    tail_indices,
)
from engine_probe.errors import DiagnosisError, UsageError


def test_ninety_nine_fast_requests_and_one_slow_one_have_a_fast_p99():
    """P99 of 99 requests of 100 ms and one of 10 s is 100 ms, the 99th of 100; P100 is 10 s."""
    values = np.array([0.1] * 99 + [10.0])
    assert nearest_rank(values, "0.99") == 0.1
    assert nearest_rank(values, "1") == 10.0


def test_rank_is_exact_where_a_float_would_round_up():
    """0.07 * 100 is 7.000000000000001 in floats; the 7th value is right, the 8th is wrong."""
    assert nearest_rank(np.arange(1.0, 101.0), "0.07") == 7.0
    assert allowed_above(100, "0.07") == 93
    assert allowed_above(1250, "0.99") == 12  # ceil(1237.5) = 1238
    assert allowed_above(0, "0.99") == 0


@pytest.mark.parametrize("weight", [0.1, 1.0 / 3.0, 1e-9, 7.0, 1e12])
@pytest.mark.parametrize("n", [1, 7, 100, 1000, 12345])
def test_equal_weights_rank_like_no_weights(weight: float, n: int):
    """Cumulative sums of equal weights round, yet the rank stays the exact one."""
    values = np.random.default_rng(n).permutation(np.arange(float(n)))
    for q in ("0.01", "0.07", "0.5", "0.95", "0.99", "0.999", "1"):
        assert nearest_rank(values, q, np.full(n, weight)) == nearest_rank(values, q)
        # The same through the path for unequal weights, which check_values spares equal ones.
        assert tail_indices(np.full((1, n), weight), q)[0] == allowed_above(n, q)


def test_weighted_quantile_is_the_smallest_value_that_reaches_the_mass():
    """Values 1, 2, 3 with weights 0.5, 0.2, 0.3: cumulative 0.5, 0.7, 1.0."""
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([0.3, 0.5, 0.2])
    assert nearest_rank(values, "0.5", weights) == 1.0
    assert nearest_rank(values, "0.51", weights) == 2.0
    assert nearest_rank(values, "0.7", weights) == 2.0
    assert nearest_rank(values, "0.71", weights) == 3.0


def test_a_weight_of_zero_means_not_there():
    """The largest value, weighted 0, is neither the maximum nor in the tail."""
    values, weights = np.array([1.0, 2.0, 99.0]), np.array([1.0, 1.0, 0.0])
    assert nearest_rank(values, "1", weights) == 2.0
    assert expected_shortfall(values, "0.5", weights) == 2.0
    assert kish(weights) == 2.0


def test_nothing_there_is_nan():
    """No value, or only values of weight 0, have no quantile."""
    assert np.isnan(nearest_rank(np.empty(0), "0.99"))
    assert np.isnan(expected_shortfall(np.empty(0), "0.99"))
    assert np.isnan(nearest_rank(np.ones(3), "0.99", np.zeros(3)))
    assert kish(np.zeros(3)) == 0.0


def test_shortfall_counts_the_border_request_by_its_fraction():
    """The worst 15 % of 1..10 are 10 and half of 9: (10 + 4.5) / 1.5."""
    values = np.arange(1.0, 11.0)
    assert expected_shortfall(values, "0.85") == pytest.approx(14.5 / 1.5, rel=1e-15)
    assert expected_shortfall(values, "0.9") == 10.0
    assert expected_shortfall(values, "0.999") == 10.0  # less than one request above: the maximum
    assert expected_shortfall(values, "1") == 10.0


def test_weighted_shortfall_by_hand():
    """Masses 1, 2, 1 on 1, 2, 4, worst half = mass 2: all of 4 and one of the two at 2, mean 3."""
    assert expected_shortfall(np.array([1.0, 2.0, 4.0]), "0.5", np.array([1.0, 2.0, 1.0])) == 3.0


def test_kish_effective_size():
    """Weights 1, 1, 2: 16 / 6. Scale does not matter, down to where squares would vanish."""
    assert kish(np.array([1.0, 1.0, 2.0])) == pytest.approx(16 / 6)
    assert kish(np.array([1e-300, 1e-300, 2e-300])) == pytest.approx(16 / 6)


def test_order_of_equal_values_is_the_one_asked_for():
    """Ties go by position, or by the permutation given, never by the processor's sort."""
    values = np.array([1.0, 0.0, 1.0, 0.0, 0.0])
    assert rank_order(values).tolist() == [1, 3, 4, 0, 2]
    assert rank_order(values, np.array([4, 2, 3, 0, 1])).tolist() == [4, 3, 1, 2, 0]


def test_a_cut_off_tail_is_reported_and_not_guessed():
    """Of 100 values only the 3 largest are given: the 5 that may lie above P95 reach beyond them, the 2 of P98 do not."""
    largest = np.ones((1, 3), dtype=np.int64)
    assert tail_indices(largest, "0.95", np.array([100]))[0] == 3
    assert tail_indices(largest, "0.98", np.array([100]))[0] == 2
    assert tail_index(np.ones(100), "0.98") == 2


@pytest.mark.parametrize("q", ["", "nan", "0", "-0.5", "1.01", "99%", "p99"])
def test_a_quantile_that_is_none_is_refused(q: str):
    """Whatever is not a decimal in (0, 1] is a usage error that names it."""
    with pytest.raises(UsageError, match="such as"):
        nearest_rank(np.ones(3), q)


@pytest.mark.parametrize(
    ("values", "weights"),
    [
        ([1.0, np.nan], None),
        ([[1.0], [2.0]], None),
        ([1.0, 2.0], [1.0]),
        ([1.0, 2.0], [1.0, -1.0]),
        ([1.0, 2.0], [1.0, np.inf]),
        ([1.0, 2.0], [1.0, np.nan]),
    ],
)
def test_unknown_values_and_bad_weights_are_refused(values: list, weights: list | None):
    """NaN is never ranked, and a weight is a finite number >= 0 for each value."""
    with pytest.raises(DiagnosisError):
        nearest_rank(np.array(values), "0.5", None if weights is None else np.array(weights))
