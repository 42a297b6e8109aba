"""Nearest-rank percentiles: exact ranks, and intervals that are honest about small samples."""

from __future__ import annotations

import pytest

from engine_probe.errors import UsageError
from store.percentile import nearest_rank, parse_quantile, quantile_sql, rank_index, rank_interval


def test_rank_is_exact_where_binary_floats_are_not():
    """0.07 of 100 is rank 7, though 0.07 * 100 is 7.000000000000001 in floats; 0.29 of 100 is 29, not 28."""
    assert rank_index(100, "0.07") == 7
    assert rank_index(100, "0.29") == 29
    assert rank_index(1000, "0.999") == 999


@pytest.mark.parametrize(
    ("n", "q", "rank"),
    [(1, "0.5", 1), (2, "0.5", 1), (3, "0.5", 2), (100, "0.99", 99), (101, "0.99", 100), (7, "1", 7), (10, "0.001", 1)],
)
def test_rank_rounds_up(n, q, rank):
    """The rank is ceil(q * n), and at least 1."""
    assert rank_index(n, q) == rank


def test_nearest_rank_is_a_value_that_was_seen():
    """The median of 1, 2, 10, 20 is 2, never 6; unknown values are left out."""
    assert nearest_rank([20.0, 1.0, None, 10.0, 2.0], "0.5") == 2.0


def test_nearest_rank_of_nothing_is_unknown():
    """No value, no percentile: None and not zero."""
    assert nearest_rank([], "0.99") is None
    assert nearest_rank([None], "0.99") is None


@pytest.mark.parametrize(
    "bad", ["0", "0.0", "1.01", "-0.5", "99", "p99", "", "0.99e0", "1/2", "nan", "0,99", "0." + "9" * 40]
)
def test_what_is_no_quantile_is_refused_by_name(bad):
    """A text that is not a decimal in (0, 1] raises UsageError that shows it."""
    with pytest.raises(UsageError, match="no quantile"):
        parse_quantile(bad)
    with pytest.raises(UsageError):
        nearest_rank([], bad)


def test_float_quantile_is_refused():
    """A float has lost the exact q already, so it is refused."""
    with pytest.raises(UsageError):
        parse_quantile(0.99)  # type: ignore[arg-type]


def test_quantile_in_sql_carries_q_as_decimal():
    """q reaches DuckDB as DECIMAL, so its rank is computed in integers; nothing but digits gets into the text."""
    assert quantile_sql("x", "0.99") == "quantile_disc(x, 0.99::DECIMAL(3, 2))"
    assert quantile_sql("x", ".5") == "quantile_disc(x, 0.5::DECIMAL(2, 1))"
    assert quantile_sql("x", "1") == "quantile_disc(x, 1.0::DECIMAL(2, 1))"


def test_p99_has_no_upper_bound_below_368_values():
    """0.99 ** 367 is 0.02503 and 0.99 ** 368 is 0.02478: only from 368 values on is the largest a safe upper bound."""
    assert rank_interval(367, "0.99")[1] is None
    assert rank_interval(368, "0.99")[1] == 368


def test_p99_has_a_one_sided_bound_from_299_values():
    """At confidence 0.9 each side may miss 5 %: 0.99 ** 298 is 0.05002, 0.99 ** 299 is 0.04952."""
    assert rank_interval(298, "0.99", "0.9")[1] is None
    assert rank_interval(299, "0.99", "0.9")[1] == 299


def test_median_interval_of_ten_values():
    """Ranks 2 and 9: P(X <= 1) for ten fair coins is 11/1024 = 0.0107, below 0.025, and P(X <= 2) is 56/1024, above."""
    assert rank_interval(10, "0.5") == (2, 9)


def test_largest_value_has_no_interval():
    """The 1-quantile of the distribution cannot be bounded by order statistics."""
    assert rank_interval(1000, "1") == (None, None)
    assert rank_interval(0, "0.5") == (None, None)
