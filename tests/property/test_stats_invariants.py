"""What holds for any arrays, ties, zeros and weights: the statistics of diagnosis."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diagnosis.attribution.composition import compose
from diagnosis.attribution.shapley import attribute
from diagnosis.statistics.bootstrap import exceedances, iter_runs
from diagnosis.statistics.comparability import common_mix
from diagnosis.statistics.episodes import extremal_index, tail_episodes
from diagnosis.statistics.quantiles import expected_shortfall, kish, nearest_rank, rank_order
from diagnosis.statistics.significance import compare

quantiles = st.integers(1, 999).map(lambda k: f"0.{k:03}")
# Few distinct values, so that ties and zeros are the rule and not the exception.
seconds = st.one_of(st.sampled_from([0.0, 0.1, 0.2, 1.0, 2.5]), st.floats(0.0, 100.0, allow_subnormal=False))
weight = st.floats(0.01, 100.0)


def columns(n: st.SearchStrategy[int], k: int) -> st.SearchStrategy[np.ndarray]:
    return n.flatmap(lambda rows: arrays(np.float64, (rows, k), elements=seconds))


@given(arrays(np.float64, st.integers(1, 60), elements=seconds), quantiles)
def test_nearest_rank_is_the_exact_order_statistic(values: np.ndarray, q: str):
    """The ceil(q*n)-th smallest, in fractions."""
    rank = ceil(Fraction(q) * values.size)
    assert nearest_rank(values, q) == sorted(values.tolist())[rank - 1]


@given(st.data(), quantiles)
def test_integer_weights_are_repetitions(data: st.DataObject, q: str):
    """A request of weight 3 is three requests, for the quantile exactly and for the shortfall to rounding."""
    values = data.draw(arrays(np.float64, st.integers(1, 40), elements=seconds))
    times = data.draw(arrays(np.int64, values.size, elements=st.integers(0, 5)).filter(lambda t: t.any()))
    repeated = np.repeat(values, times)
    weights = times.astype(float)
    assert nearest_rank(values, q, weights) == nearest_rank(repeated, q)
    assert expected_shortfall(values, q, weights) == pytest.approx(expected_shortfall(repeated, q), rel=1e-12)


@given(st.data(), quantiles, st.floats(1e-6, 1e6))
def test_only_the_ratio_of_weights_matters(data: st.DataObject, q: str, scale: float):
    """Equal weights of any size are no weights, and the effective size of n of them is n."""
    values = data.draw(arrays(np.float64, st.integers(1, 60), elements=seconds))
    assert nearest_rank(values, q, np.full(values.size, scale)) == nearest_rank(values, q)
    assert kish(np.full(values.size, scale)) == pytest.approx(values.size)


@given(st.data(), quantiles)
def test_shortfall_lies_between_the_quantile_and_the_maximum(data: st.DataObject, q: str):
    """The mean of the worst is at least their best and at most their worst."""
    values = data.draw(arrays(np.float64, st.integers(1, 40), elements=seconds))
    weights = data.draw(st.none() | arrays(np.float64, values.size, elements=weight))
    found = expected_shortfall(values, q, weights)
    assert nearest_rank(values, q, weights) <= found <= values.max()


@given(columns(st.integers(1, 40), 3), quantiles, st.data())
def test_composition_sums_to_the_exact_quantile(parts: np.ndarray, q: str, data: st.DataObject):
    """Parts + smoothing = the nearest-rank quantile of the totals, within 1e-12."""
    weights = data.draw(st.none() | arrays(np.float64, parts.shape[0], elements=weight))
    rows, smoothing = compose(parts, q, weights)
    exact = nearest_rank(parts.sum(axis=1), q, weights)
    assert rows.sum() + smoothing == pytest.approx(exact, rel=1e-12, abs=1e-12)
    assert (rows >= 0.0).all()


def test_few_and_heavy_requests_make_up_the_quantile_themselves() -> None:
    """Of 15 equal requests two have most of the weight: the middle of their ranks is 7.5, and none lies within 3 of it."""
    weights = np.array([4.0, 2.0, *[0.0625] * 13])
    rows, smoothing = compose(np.ones((15, 3)), "0.001", weights)
    assert rows.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert smoothing == pytest.approx(0.0)


@settings(max_examples=80, deadline=None)
@given(columns(st.integers(1, 30), 4), columns(st.integers(1, 30), 4), quantiles, st.data())
def test_rows_sum_to_the_change(base: np.ndarray, suspect: np.ndarray, q: str, data: st.DataObject):
    """Rows and dependence sum to the change of the quantile, the mean and the shortfall, each worked out by itself."""
    w_b = data.draw(st.none() | arrays(np.float64, base.shape[0], elements=weight))
    w_s = data.draw(st.none() | arrays(np.float64, suspect.shape[0], elements=weight))
    groups = data.draw(st.integers(1, 4))
    names = ["queue", "prefill", "decode", "load"]
    found = attribute(names, base, suspect, q, w_base=w_b, w_suspect=w_s, replicates=3, max_groups=groups)
    total_b, total_s = base.sum(axis=1), suspect.sum(axis=1)
    rows = [*found.rows, found.dependence]
    changes = {
        "quantile_s": nearest_rank(total_s, q, w_s) - nearest_rank(total_b, q, w_b),
        "es_s": expected_shortfall(total_s, q, w_s) - expected_shortfall(total_b, q, w_b),
        "mean_s": np.average(total_s, weights=w_s) - np.average(total_b, weights=w_b),
    }
    for name, change in changes.items():
        assert sum(getattr(row, name) for row in rows) == pytest.approx(change, abs=1e-9)
    assert found.delta_quantile_s == pytest.approx(changes["quantile_s"], abs=1e-9)
    assert len(found.rows) <= groups + 1
    # Every replicate's rows are one reading of the same game.
    assert found.draws.shape == (found.replicates, len(found.rows))


@settings(max_examples=60, deadline=None)
@given(columns(st.integers(1, 25), 3), quantiles, st.data())
def test_identical_windows_change_nothing(parts: np.ndarray, q: str, data: st.DataObject):
    """The same requests twice: exact zeros, with ties, zeros and weights."""
    weights = data.draw(st.none() | arrays(np.float64, parts.shape[0], elements=st.sampled_from([0.5, 1.0, 2.0, 3.0])))
    found = attribute(["a", "b", "c"], parts, parts, q, w_base=weights, w_suspect=weights, replicates=2)
    for row in [*found.rows, found.dependence]:
        assert row.quantile_s == 0.0
        assert row.mean_s == 0.0
        assert row.es_s == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(columns(st.integers(1, 25), 3), columns(st.integers(1, 25), 3), quantiles)
def test_a_part_that_is_absent_owns_nothing(base: np.ndarray, suspect: np.ndarray, q: str):
    """A part of zeros changes no other row and has no seconds itself."""
    names = ["a", "b", "c"]
    padded = [np.insert(parts, 1, 0.0, axis=1) for parts in (base, suspect)]
    without = attribute(names, base, suspect, q, replicates=0)
    found = attribute(["a", "absent", "b", "c"], padded[0], padded[1], q, replicates=0)
    told = {row.name: row.quantile_s for row in found.rows if row.name != "other" or "other" in found.first_share}
    assert told == pytest.approx({row.name: row.quantile_s for row in without.rows if row.name in told}, abs=1e-12)
    assert found.dependence.quantile_s == pytest.approx(without.dependence.quantile_s, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data(), quantiles)
def test_comparing_never_fails_on_known_values(data: st.DataObject, q: str):
    """Any known values give finite facts; an interval is only there when there are enough, and it is ordered."""
    base = data.draw(arrays(np.float64, st.integers(1, 60), elements=seconds))
    suspect = data.draw(arrays(np.float64, st.integers(1, 60), elements=seconds))
    found = compare(base, suspect, q, replicates=20)
    assert found.delta_s == nearest_rank(suspect, q) - nearest_rank(base, q)
    assert all(0.0 < theta <= 1.0 for theta in found.extremal)
    assert found.enough == (found.reason is None)
    assert found.n_needed is None or (not found.enough and found.n_needed > 0)
    assert (found.interval_95 is not None) == (found.enough and min(found.n) > 1)
    for interval in (found.interval_95, found.mean_interval_95):
        assert interval is None or interval[0] <= interval[1]


@given(arrays(np.float64, st.integers(0, 80), elements=seconds), quantiles)
def test_episodes_and_extremal_index_stay_in_range(values: np.ndarray, q: str):
    """There are never more episodes than requests at the tail, and the index is a share above 0."""
    assert 0.0 < extremal_index(values, q) <= 1.0
    assert 0 <= tail_episodes(values, q) <= values.size


@given(arrays(np.float64, st.integers(1, 60), elements=seconds), st.integers(0, 59))
def test_exceedances_are_the_largest(values: np.ndarray, wanted: int):
    """No value left out is larger than one taken, and equal values go together."""
    taken = exceedances(values, min(wanted, values.size - 1))
    if taken.any() and not taken.all():
        assert values[taken].min() > values[~taken].max()


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 10**6), st.data())
def test_counting_some_is_counting_all(n: int, block: int, seed: int, data: st.DataObject):
    """The counts of a few positions are the columns of all counts, and each row draws n requests."""
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=10)), dtype=np.intp)
    for runs in iter_runs(n, block, 4, seed):
        counts = runs.counts()
        assert (counts.sum(axis=1) == n).all()
        assert (runs.counts_at(some) == counts[:, some]).all()


@given(st.data())
def test_rank_order_is_a_stable_sort(data: st.DataObject):
    """Equal values keep the order of the permutation, whatever the processor's sort does with ties."""
    values = data.draw(arrays(np.float64, st.integers(0, 60), elements=seconds))
    tie_break = np.array(data.draw(st.permutations(range(values.size))), dtype=np.intp)
    expected = tie_break[np.argsort(values[tie_break], kind="stable")]
    assert rank_order(values, tie_break).tolist() == expected.tolist()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_weights_of_a_common_mix_balance_what_both_have(data: st.DataObject):
    """Weights average 1 over the requests kept, and every category then has the same share in both windows."""
    sides = []
    for _ in range(2):
        sizes = data.draw(st.tuples(*[st.integers(0, 60)] * 3).filter(any))
        sides.append({"workload": np.repeat(np.array(["chat", "code", "batch"], dtype=object), sizes)})
    mix = common_mix(sides[0], sides[1])
    shares = []
    for side, weights in zip(sides, (mix.w_base, mix.w_suspect), strict=True):
        kept = weights > 0
        if not kept.any():
            assert mix.n_effective == (0.0, 0.0)
            return
        assert weights[kept].mean() == pytest.approx(1.0)
        shares.append({w: weights[side["workload"] == w].sum() / weights.sum() for w in ("chat", "code", "batch")})
    if mix.shifted:
        assert shares[0] == pytest.approx(shares[1], abs=1e-9)
