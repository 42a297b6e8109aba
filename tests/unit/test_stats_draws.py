"""What is read off bootstrap draws: diagnosis/statistics/draws.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis.statistics.draws import false_discoveries, interval_95, p_value, student_p


def test_intervals_and_p_values_of_known_draws():
    """Of the draws 0..1000 the middle 95 % is 25..975; 100 of 1,000 draws at or below 0 make p = 0.2."""
    assert interval_95(np.arange(1001.0)) == (25.0, 975.0)
    assert interval_95(np.arange(1001.0), one_sided=True) == (50.0, math.inf)
    assert p_value(np.arange(1000.0) - 99.0) == pytest.approx(0.2)
    assert 0.0 < p_value(np.random.default_rng(0).normal(8.0, 1.0, 200)) < 1e-9
    assert p_value(np.zeros(100)) == 1.0


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042)]
)
def test_students_tail_is_the_tables(freedom: int, t: float):
    """Two-sided 5 % points of the printed table; none, and endless, are 1 and 0."""
    assert student_p(t, freedom) == pytest.approx(0.05, abs=1e-4)
    assert student_p(-t, freedom) == student_p(t, freedom)
    assert (student_p(0.0, freedom), student_p(math.inf, freedom)) == (1.0, 0.0)


def test_false_discoveries_by_hand():
    """Of 0.001, 0.02, 0.03, 0.9 the limits are 0.0125, 0.025, 0.0375, 0.05: three stand."""
    assert false_discoveries([0.9, 0.03, 0.001, 0.02]) == [False, True, True, True]
    assert false_discoveries([0.9, 0.8]) == [False, False]
    assert false_discoveries([]) == []
