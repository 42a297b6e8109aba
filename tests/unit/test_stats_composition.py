"""What the requests around a quantile are made of: diagnosis/attribution/composition.py."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.attribution.composition import compose, kernel_half_width
from engine_probe.errors import DiagnosisError


def test_kernel_width_is_half_the_smaller_tail_and_at_least_three_ranks():
    """P99 of 1,250 looks 6.25 ranks to each side, P50 of 100 looks 25, P99 of 100 looks 3."""
    assert kernel_half_width(1250, "0.99") == 6.25
    assert kernel_half_width(100, "0.5") == 25.0
    assert kernel_half_width(100, "0.99") == 3.0


def test_composition_by_hand():
    """P50 of totals 1..5 is 3; three ranks wide the kernel is 5/9, 8/9, 1, 8/9, 5/9 over all five."""
    parts = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0], [1.0, 4.0]])
    rows, smoothing = compose(parts, "0.5")
    assert rows[0] == pytest.approx(1.0)
    assert rows[1] == pytest.approx((8 / 9 * 1 + 2 + 8 / 9 * 3 + 5 / 9 * 4) / (35 / 9))
    assert smoothing == pytest.approx(0.0, abs=1e-15)


def test_what_smoothing_left_over_is_said():
    """P75 of 1, 2, 3, 100 is 3, but the smoothed parts hold some of the 100: the rest is negative."""
    rows, smoothing = compose(np.array([[1.0], [2.0], [3.0], [100.0]]), "0.75")
    assert rows[0] > 3.0
    assert rows[0] + smoothing == pytest.approx(3.0, abs=1e-12)


def test_requests_with_equal_totals_count_alike():
    """Two requests of 3 s, one all queue and one all prefill, are described half and half, in either order."""
    parts = np.array([[0.5, 0.5], [3.0, 0.0], [0.0, 3.0], [9.0, 9.0]])
    for order in ([0, 1, 2, 3], [2, 1, 3, 0]):
        rows, _ = compose(parts[order], "0.5")
        assert rows[0] == pytest.approx(rows[1])


def test_a_weight_of_zero_is_left_out():
    """A request that weighs nothing leaves no trace."""
    parts = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 50.0]])
    rows, smoothing = compose(parts, "0.99", np.array([1.0, 2.0, 0.0]))
    assert rows[1] == 0.0
    assert rows.sum() + smoothing == pytest.approx(2.0, abs=1e-12)


@pytest.mark.parametrize(
    ("parts", "weights"),
    [(np.empty((0, 2)), None), (np.ones(3), None), (np.array([[np.nan]]), None), (np.ones((2, 1)), np.zeros(2))],
)
def test_nothing_to_compose_is_refused(parts: np.ndarray, weights: np.ndarray | None):
    """Unknown parts, no request, or none with a weight cannot be described."""
    with pytest.raises(DiagnosisError):
        compose(parts, "0.9", weights)
