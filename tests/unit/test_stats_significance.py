"""Can two windows be told apart: diagnosis/statistics/significance.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diagnosis.statistics.significance import affordable_replicates, compare
from engine_probe.errors import BadWindow, DiagnosisError


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


@pytest.mark.parametrize("seed", [0, 7])
def test_windows_that_change_places_change_the_sign_alone(seed: int) -> None:
    """What got worse one way got better the other way, by the same interval."""
    rng = np.random.default_rng(seed)
    base, suspect = rng.gamma(4.0, 0.02, 500), rng.gamma(4.0, 0.025, 400)
    one, other = (compare(*pair, "0.9", seed=seed) for pair in ((base, suspect), (suspect, base)))
    assert other.delta_s == -one.delta_s
    for there, back in ((one.interval_95, other.interval_95), (one.mean_interval_95, other.mean_interval_95)):
        assert there is not None
        assert back is not None
        assert back == pytest.approx((-there[1], -there[0]), rel=1e-9)
