"""Do two windows carry a quantile: diagnosis/statistics/sufficiency.py, diagnosis/statistics/episodes.py."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.statistics.episodes import extremal_index, tail_episodes
from diagnosis.statistics.significance import compare
from diagnosis.statistics.sufficiency import n_for_change, required_n, sufficient


@pytest.mark.parametrize(
    ("q", "one_sided", "two_sided"),
    [("0.99", 299, 368), ("0.95", 59, 72), ("0.9", 29, 36), ("0.5", 5, 6), ("0.01", 299, 368), ("0.999", 2995, 3688)],
)
def test_requests_a_bound_needs(q: str, one_sided: int, two_sided: int):
    """0.99^299 = 0.0495 <= 0.05 < 0.99^298, and 0.99^368 = 0.0248 <= 0.025 < 0.99^367; the other side mirrors it."""
    assert required_n(q) == one_sided
    assert required_n(q, 2) == two_sided
    share = max(float(q), 1 - float(q))
    assert share**one_sided <= 0.05 < share ** (one_sided - 1)
    assert share**two_sided <= 0.025 < share ** (two_sided - 1)


@pytest.mark.parametrize("q", ["1", "0.999999999", "0.999999999999999", "0.000000000000001"])
def test_no_window_bounds_a_maximum_or_what_lies_next_to_it(q: str):
    """P100 has no bound at all; 1 - 10^-9 would take ln 20 * 10^9 = 3.0 * 10^9 requests, more than any window holds."""
    assert required_n(q) is None
    assert n_for_change(np.random.default_rng(0).exponential(size=500), q) is None


def test_the_number_needed_is_exact_up_to_the_largest_window():
    """1 - 10^-8: n = ln 20 / -ln(1 - 10^-8) = 299,573,225.9 (ln 20 = 2.99573227355, and 1.5 less for the curvature), rounded up."""
    assert required_n("0.99999999") == 299_573_226
    assert required_n("0.00000001") == 299_573_226


def test_a_quantile_that_no_window_carries_is_said_so():
    """P99.9999999999: the reason names the limit, no number is needed, and nothing is computed for ever."""
    rng = np.random.default_rng(0)
    found = sufficient(rng.exponential(size=400), rng.exponential(size=400), "0.999999999999")
    assert not found.enough
    assert found.n_needed is None
    assert found.reason is not None
    assert "more than 1,000,000,000 requests" in found.reason


def test_extremal_index_of_an_independent_tail_is_near_one():
    """Exceedances of independent requests do not cluster."""
    found = [extremal_index(np.random.default_rng(i).exponential(size=2000), "0.99") for i in range(30)]
    assert np.mean(found) > 0.9
    assert max(found) <= 1.0


@pytest.mark.parametrize("k", [2, 5, 10])
def test_extremal_index_of_clusters_of_k_is_near_one_in_k(k: int):
    """Every value comes k times in a row, so k exceedances make one episode."""
    found = [extremal_index(np.repeat(np.random.default_rng(i).exponential(size=1000), k), "0.98") for i in range(30)]
    assert np.mean(found) == pytest.approx(1 / k, rel=0.25)


def test_extremal_index_of_next_to_nothing():
    """Without two exceedances nothing clusters; with few of them the runs are counted."""
    assert extremal_index(np.empty(0), "0.99") == 1.0
    assert extremal_index(np.ones(1), "0.99") == 1.0
    assert extremal_index(np.ones(50), "0.99") == 1.0
    together = np.array([0.0, 0, 0, 5, 6, 0, 0, 0])  # two exceedances (a quarter of 8), side by side: one episode
    assert extremal_index(together, "0.99") == 0.5


def test_tail_episodes_count_clusters_and_not_requests():
    """1,000 independent requests have 10 episodes above P99; 200 values of 5 requests each have 2."""
    assert tail_episodes(np.random.default_rng(5).exponential(size=1000), "0.99") == 10
    repeated = np.repeat(np.random.default_rng(0).permutation(200).astype(float), 5)
    assert tail_episodes(repeated, "0.99") == 2
    assert tail_episodes(np.arange(6.0), "0.5", lag=1) == 1  # 3, 4, 5 in a row
    assert tail_episodes(np.array([9.0, 0, 0, 9, 0, 0]), "0.5", lag=2) == 2
    assert tail_episodes(np.empty(0), "0.5") == 0


def test_more_noise_and_smaller_changes_need_more_requests():
    """n falls with the square of the change: 10 % against 20 % takes 4 * 2.21 / 2.44 times as many."""
    values = np.random.default_rng(0).exponential(size=20_000)
    small, large = n_for_change(values, "0.9", 0.1), n_for_change(values, "0.9", 0.2)
    assert small == pytest.approx(4 * 2.21 / 2.44 * large, rel=0.01)
    assert n_for_change(values, "0.99") > n_for_change(values, "0.9")
    assert n_for_change(values, "0.9", power=0.99) > n_for_change(values, "0.9")


def test_requests_needed_follow_the_density_at_the_quantile():
    """Uniform on (1, 2): density 1, median 1.5, 20 % of it 0.3: n = 10.507 * 2.44 * 0.25 / 0.09 = 71.2."""
    values = np.random.default_rng(1).permutation(1.0 + (np.arange(10_000) + 0.5) / 10_000)
    theta = extremal_index(values, "0.5")
    assert n_for_change(values, "0.5") == pytest.approx(71.2 / theta, rel=0.03)


def test_requests_needed_are_never_fewer_than_an_interval_takes():
    """A tail without spread still needs ten episodes above P99, that is 1,000 requests."""
    assert n_for_change(np.ones(500), "0.99") == 1000
    assert n_for_change(np.ones(1), "0.99") == 1000


def test_a_change_that_no_window_is_long_enough_for_has_no_number():
    """A quantile of nearly nothing beside seconds: the number would be astronomical, so none is told."""
    values = np.where(np.arange(100) % 2 == 0, 1e-300, 5.0)
    assert n_for_change(values, "0.5") is None


def test_sufficiency_is_the_same_alone():
    """`sufficient` says what `compare` says, without resampling."""
    rng = np.random.default_rng(0)
    base, suspect = rng.exponential(size=350), rng.exponential(size=1500)
    alone, found = sufficient(base, suspect, "0.99"), compare(base, suspect, "0.99", replicates=0)
    for name in ("n", "n_effective", "extremal", "episodes", "enough", "one_sided", "reason", "n_needed"):
        assert getattr(alone, name) == getattr(found, name)
    assert found.mean_interval_95 is None  # no replicates, no interval
