"""Block bootstrap as counts: diagnosis/statistics/bootstrap.py."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.statistics.bootstrap import (
    Runs,
    block_counts,
    correlation,
    correlation_length,
    exceedances,
    iter_runs,
    ranks,
    repeat_counts,
    twice_through,
    widen,
)
from engine_probe.errors import DiagnosisError


def test_runs_cover_what_they_say_and_wrap_around():
    """Of 5 requests, runs of 3 from 3 and 2 from 4 draw 3, 4, 0 and 4, 0."""
    runs = Runs(5, np.array([[3, 4]]), np.array([3, 2]))
    assert runs.counts().tolist() == [[2, 0, 0, 1, 2]]
    assert runs.counts_at(np.array([4, 1, 0])).tolist() == [[2, 0, 2]]
    assert runs.sums(twice_through(np.array([1.0, 10.0, 100.0, 1000.0, 10000.0]))).tolist() == [21002.0]


@pytest.mark.parametrize(("n", "block"), [(1, 1), (7, 7), (10, 1), (10, 3), (50, 13), (5, 9), (400, 20)])
def test_every_replicate_draws_as_many_requests_as_there_are(n: int, block: int):
    """Counts sum to n in every row, on average each request is drawn once, and both ways of counting agree."""
    counts = block_counts(n, block, 2000, 3)
    assert (counts.sum(axis=1) == n).all()
    assert np.abs(counts.mean(axis=0) - 1.0).max() < 0.2
    some = np.random.default_rng(1).permutation(n)[: n // 2 + 1]
    at = np.concatenate([runs.counts_at(some) for runs in iter_runs(n, block, 2000, 3)])
    assert (at == counts[:, some]).all()


def test_neighbours_are_drawn_together():
    """In blocks of 10, a request's neighbour is nearly always drawn as often; the one 10 further on is not."""
    counts = block_counts(200, 10, 500, 0).astype(float)
    same = np.corrcoef(counts[:, 100], counts[:, 101])[0, 1]
    apart = np.corrcoef(counts[:, 100], counts[:, 112])[0, 1]
    assert same > 0.8
    assert abs(apart) < 0.2


def test_same_seed_same_counts():
    """The seed decides everything; the next seed gives others."""
    assert (block_counts(100, 7, 5, 42) == block_counts(100, 7, 5, 42)).all()
    assert (block_counts(100, 7, 5, 42) != block_counts(100, 7, 5, 43)).any()


def test_whole_repeats_are_resampled():
    """Requests of one repeat are drawn equally often; three repeats are drawn in total."""
    counts = repeat_counts(np.array(["a", "b", "a", "c", "b", "b"]), 300, 0)
    assert (counts[:, 0] == counts[:, 2]).all()
    assert (counts[:, 1] == counts[:, 4]).all()
    assert (counts[:, [0, 1, 3]].sum(axis=1) == 3).all()
    assert len(np.unique(counts[:, 0])) > 1


def test_independent_requests_are_resampled_one_by_one():
    """Most independent series get a block of 1, as nothing is correlated at any lag."""
    blocks = [correlation_length(np.random.default_rng(i).exponential(size=1250), "0.99") for i in range(20)]
    assert np.median(blocks) == 1


def test_a_longer_memory_gives_longer_blocks_that_still_leave_twenty():
    """Values repeated 10 times need blocks beyond 10; a slow wave is cut at n / 20."""
    repeated = np.repeat(np.random.default_rng(0).exponential(size=400), 10)
    assert 10 < correlation_length(repeated, "0.99") <= 200
    wave = np.sin(np.arange(4000) / 400.0)
    assert correlation_length(wave, "0.99") == 200
    assert correlation(repeated, "0.99").lag >= 9


def test_blocks_cut_short_say_what_they_miss():
    """An independent series misses nothing; a memory as long as the longest block allowed leaves spread unseen."""
    assert correlation(np.random.default_rng(3).exponential(size=2000), "0.99").missed == 1.0
    rng = np.random.default_rng(0)
    slow = np.convolve(rng.normal(size=3000), 0.98 ** np.arange(400))[400:2400]
    found = correlation(slow, "0.9")
    assert found.block == 100  # n / 20, where the memory would ask for more
    assert 1.05 < found.missed <= 2.0


def test_constant_and_tiny_series_have_no_correlation():
    """Nothing varies, or nothing can be estimated: block 1, lag 0."""
    for values in (np.ones(1000), np.zeros(3), np.empty(0), np.ones(1)):
        assert (correlation(values, "0.99").lag, correlation(values, "0.99").block) == (0, 1)


def test_huge_windows_are_resampled_in_at_most_5000_blocks():
    """More blocks cost time and tell nothing more: 100,000 requests get blocks of 20."""
    assert correlation_length(np.random.default_rng(0).exponential(size=100_000), "0.99") == 20


def test_exceedances_where_values_tie():
    """Equal values that straddle the number wanted all count, unless that would be everyone."""
    assert exceedances(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist() == [False, False, True, True]
    assert exceedances(np.array([1.0, 2.0, 2.0, 3.0]), 2).tolist() == [False, True, True, True]
    assert exceedances(np.array([0.0, 0.0, 0.0, 3.0]), 2).tolist() == [False, False, False, True]
    assert exceedances(np.zeros(3), 1).all()


def test_equal_values_share_their_middle_rank():
    """Ranks of 5, 1, 5, 0 are 2.5, 1, 2.5, 0."""
    assert ranks(np.array([5.0, 1.0, 5.0, 0.0])).tolist() == [2.5, 1.0, 2.5, 0.0]


def test_few_blocks_widen_as_student_does():
    """t at 97.5 % with 19 degrees of freedom is 2.0930 against 1.9600, and the spread gains sqrt(20 / 19)."""
    draws = np.array([-1.0, 0.0, 1.0])
    wide = widen(draws, 20)
    assert wide[1] == 0.0
    assert wide[2] == pytest.approx(2.0930 / 1.95996 * np.sqrt(20 / 19), rel=1e-4)
    assert widen(draws, 1e9)[2] == pytest.approx(1.0)
    assert widen(draws, 1e9, missed=1.5)[2] == pytest.approx(1.5)
    assert widen(np.empty(0), 20).size == 0


@pytest.mark.parametrize(("n", "block", "replicates"), [(0, 1, 1), (10, 0, 1), (10, 1, -1)])
def test_a_bootstrap_that_makes_no_sense_is_refused(n: int, block: int, replicates: int):
    """Sizes below 1 are refused, and the message has the numbers."""
    with pytest.raises(DiagnosisError, match=str(n)):
        block_counts(n, block, replicates, 0)


def test_one_repeat_tells_nothing_about_their_spread():
    """Resampling repeats needs two of them."""
    with pytest.raises(DiagnosisError, match="at least two"):
        repeat_counts(np.zeros(5), 10, 0)
