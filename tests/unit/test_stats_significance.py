"""Can two windows be told apart: diagnosis/significance.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis.significance import (
    affordable_replicates,
    compare,
    extremal_index,
    false_discoveries,
    interval_95,
    n_for_change,
    p_value,
    required_n,
    sufficient,
    tail_episodes,
)
from engine_probe.errors import BadWindow, DiagnosisError


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


def test_no_number_of_requests_bounds_a_maximum():
    """P100 has no interval: the number needed is beyond any window."""
    assert required_n("1") > 10**15


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


def test_requests_needed_stay_a_number_whatever_the_values():
    """A quantile of nearly nothing beside seconds: astronomically many, but finite."""
    values = np.where(np.arange(100) % 2 == 0, 1e-300, 5.0)
    assert 10**15 < n_for_change(values, "0.5") < 10**22


def test_a_clear_change_is_seen():
    """Twice the latency in 2,000 independent requests each."""
    rng = np.random.default_rng(0)
    found = compare(rng.exponential(size=2000), 2 * rng.exponential(size=2000), "0.99")
    assert found.enough
    assert found.changed
    assert found.changed_mean
    assert found.interval_95 is not None
    assert found.interval_95[0] > 0
    assert found.interval_95[0] < found.delta_s < found.interval_95[1]
    assert found.n == (2000, 2000)
    assert found.n_needed is None
    assert found.p_quantile is not None
    assert found.p_quantile < 0.01


def test_a_real_but_immaterial_change_is_no_change():
    """5 % more in 20,000 requests is far outside noise, and still less than the 10 % that matters."""
    rng = np.random.default_rng(0)
    base = rng.gamma(9.0, size=20_000)
    found = compare(base, base * 1.05, "0.5", replicates=100)
    assert found.interval_95 is not None
    assert found.interval_95[0] > 0
    assert not found.changed
    assert compare(base, base * 1.05, "0.5", replicates=100, min_relative=0.04).changed


def test_too_few_requests_get_no_interval_and_the_number_needed():
    """300 requests bound P99 from one side, but hold 3 episodes: no interval, no verdict, and how many it takes."""
    rng = np.random.default_rng(0)
    found = compare(rng.exponential(size=350), 3 * rng.exponential(size=350), "0.99")
    assert not found.enough
    assert found.interval_95 is None
    assert found.p_quantile is None
    assert not found.changed
    assert found.reason is not None
    assert "3 separate tail episodes" in found.reason
    assert found.n_needed is not None
    assert found.n_needed >= 1000
    assert found.changed_mean  # the mean has its interval all the same


def test_a_clustered_tail_counts_for_fewer_requests():
    """2,000 requests in runs of 20 count as about 100: P99 is refused and the reason has the numbers."""
    rng = np.random.default_rng(0)
    base, suspect = (np.repeat(rng.exponential(size=100), 20) for _ in range(2))
    found = compare(base, suspect, "0.99")
    assert not found.enough
    assert found.reason is not None
    assert "baseline window's 2,000 requests" in found.reason
    assert "299" in found.reason
    assert max(found.n_effective) < 299


def test_between_the_two_needs_only_worse_can_be_shown():
    """With 299 to 367 effective requests the interval has a lower end alone, so a fall is never called a change."""
    base = np.random.default_rng(3).exponential(size=6000)
    weights = np.full(6000, 0.001)  # 370 requests carry the weight: (370 + 5.63)^2 / 370 = 381 before clustering
    weights[np.random.default_rng(4).choice(6000, 370, replace=False)] = 1.0
    found = compare(base, base * 0.2, "0.99", w_base=weights, w_suspect=weights)
    assert found.one_sided
    assert found.interval_95 is not None
    assert found.interval_95[1] == math.inf
    assert not found.changed
    assert compare(base, base * 5.0, "0.99", w_base=weights, w_suspect=weights).changed


def test_a_latency_without_any_spread_can_still_be_compared():
    """Virtual time gives every request the same latency: the tie at the top is the tail, not the absence of one."""
    found = compare(np.full(2000, 0.5), np.full(2000, 0.7), "0.99")
    assert found.enough
    assert found.changed
    assert found.delta_s == pytest.approx(0.2)
    assert not compare(np.full(2000, 0.5), np.full(2000, 0.5), "0.99").changed


def test_the_mean_needs_twenty_requests():
    """19 requests give no interval of the mean either."""
    values = np.random.default_rng(0).exponential(size=40)
    assert compare(values[:19], values[19:], "0.5").mean_interval_95 is None
    assert compare(values[:20], values[20:], "0.5").mean_interval_95 is not None


def test_arms_with_repeats_resample_the_repeats():
    """Ten repeats that differ by themselves make the interval wider than 4,000 requests taken as independent."""
    rng = np.random.default_rng(0)
    repeat = np.repeat(np.arange(10), 400)

    def arm() -> np.ndarray:
        return rng.exponential(size=4000) * (1.0 + 0.5 * rng.random(10))[repeat]

    base, suspect = arm(), arm()
    whole = compare(base, suspect, "0.95", repeat_base=repeat, repeat_suspect=repeat).mean_interval_95
    single = compare(base, suspect, "0.95", block=1).mean_interval_95
    assert whole is not None
    assert single is not None
    assert whole[1] - whole[0] > 1.5 * (single[1] - single[0])


def test_weights_shift_what_is_compared():
    """Weighting the slow half of both windows to nothing compares the fast halves."""
    values = np.concatenate([np.linspace(1, 2, 500), np.linspace(10, 20, 500)])
    rng = np.random.default_rng(0)
    base, suspect = rng.permutation(values), rng.permutation(values)
    found = compare(base, 2 * suspect, "0.95", w_base=(base < 5).astype(float), w_suspect=(suspect < 5).astype(float))
    assert found.n == (500, 500)
    assert found.delta_mean_s == pytest.approx(1.5)


def test_same_seed_same_answer():
    """The answer is a function of its arguments."""
    rng = np.random.default_rng(0)
    base, suspect = rng.exponential(size=500), rng.exponential(size=500)
    assert compare(base, suspect, "0.9", seed=5) == compare(base, suspect, "0.9", seed=5)
    assert compare(base, suspect, "0.9", seed=5) != compare(base, suspect, "0.9", seed=6)


def test_large_windows_draw_fewer_replicates_and_say_so():
    """400 up to 50,000 requests in both windows, then fewer, never under 100."""
    assert affordable_replicates(400, 2_500) == 400
    assert affordable_replicates(400, 100_000) == 200
    assert affordable_replicates(400, 10_000_000) == 100
    assert affordable_replicates(50, 10_000_000) == 50


def test_sufficiency_is_the_same_alone():
    """`sufficient` says what `compare` says, without resampling."""
    rng = np.random.default_rng(0)
    base, suspect = rng.exponential(size=350), rng.exponential(size=1500)
    alone, found = sufficient(base, suspect, "0.99"), compare(base, suspect, "0.99", replicates=0)
    for name in ("n", "n_effective", "extremal", "episodes", "enough", "one_sided", "reason", "n_needed"):
        assert getattr(alone, name) == getattr(found, name)
    assert found.mean_interval_95 is None  # no replicates, no interval


def test_intervals_and_p_values_of_known_draws():
    """Of the draws 0..1000 the middle 95 % is 25..975; 100 of 1,000 draws at or below 0 make p = 0.2."""
    assert interval_95(np.arange(1001.0)) == (25.0, 975.0)
    assert interval_95(np.arange(1001.0), one_sided=True) == (50.0, math.inf)
    assert p_value(np.arange(1000.0) - 99.0) == pytest.approx(0.2)
    assert 0.0 < p_value(np.random.default_rng(0).normal(8.0, 1.0, 200)) < 1e-9
    assert p_value(np.zeros(100)) == 1.0


def test_false_discoveries_by_hand():
    """Of 0.001, 0.02, 0.03, 0.9 the limits are 0.0125, 0.025, 0.0375, 0.05: three stand."""
    assert false_discoveries(np.array([0.9, 0.03, 0.001, 0.02])).tolist() == [False, True, True, True]
    assert false_discoveries(np.array([0.9, 0.8])).tolist() == [False, False]
    assert false_discoveries(np.empty(0)).size == 0


def test_an_empty_window_is_named():
    """No request, or none with a weight, is an error that says which window and what to do."""
    with pytest.raises(BadWindow, match="suspect window holds no request") as error:
        compare(np.ones(5), np.empty(0), "0.99")
    assert error.value.facts["window"] == "suspect"
    with pytest.raises(BadWindow, match="baseline"):
        compare(np.ones(5), np.ones(5), "0.99", w_base=np.zeros(5))


def test_unknown_values_are_refused():
    """NaN is never compared."""
    with pytest.raises(DiagnosisError, match="NaN"):
        compare(np.array([1.0, np.nan]), np.ones(2), "0.99")
