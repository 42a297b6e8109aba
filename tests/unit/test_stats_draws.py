"""What is read off bootstrap draws: diagnosis/draws.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis.draws import false_discoveries, interval_95, p_value


def test_intervals_and_p_values_of_known_draws():
    """Of the draws 0..1000 the middle 95 % is 25..975; 100 of 1,000 draws at or below 0 make p = 0.2."""
    assert interval_95(np.arange(1001.0)) == (25.0, 975.0)
    assert interval_95(np.arange(1001.0), one_sided=True) == (50.0, math.inf)
    assert p_value(np.arange(1000.0) - 99.0) == pytest.approx(0.2)
    assert 0.0 < p_value(np.random.default_rng(0).normal(8.0, 1.0, 200)) < 1e-9
    assert p_value(np.zeros(100)) == 1.0


def test_false_discoveries_by_hand():
    """Of 0.001, 0.02, 0.03, 0.9 the limits are 0.0125, 0.025, 0.0375, 0.05: three stand."""
    assert false_discoveries([0.9, 0.03, 0.001, 0.02]) == [False, True, True, True]
    assert false_discoveries([0.9, 0.8]) == [False, False]
    assert false_discoveries([]) == []
