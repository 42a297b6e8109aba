"""How often the judgement is wrong when the truth is known: nothing changed, and nothing may be found more than 5 %.

Seeded, so a result is the same at every run; the bounds leave room for the number of runs.
"""

from __future__ import annotations

import numpy as np

from diagnosis.statistics.significance import compare
from diagnosis.statistics.sufficiency import n_for_change


def test_independent_windows_that_do_not_differ_are_rarely_told_apart():
    """300 pairs of 300 independent requests: P95 and the mean are each called changed in 5 %, give or take chance.

    Three standard errors of 300 pairs are 3.8 %; 1,200 pairs gave 4.4 % and 6.0 % with 120 replicates, 4.1 % and 4.9 % with 400.
    """
    changed = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        found = compare(
            rng.exponential(size=300), rng.exponential(size=300), "0.95", replicates=120, seed=seed, min_relative=0.0
        )
        assert found.enough
        changed.append((found.changed, found.changed_mean))
    quantile, mean = np.mean(changed, axis=0)
    assert quantile <= 0.088
    assert mean <= 0.088


def correlated(rng: np.random.Generator, n: int) -> np.ndarray:
    """Lognormal latencies whose logarithm is AR(1) with correlation 0.8, as a queue that builds and drains."""
    noise = rng.normal(size=n + 200)
    weights = 0.8 ** np.arange(60)
    series = np.convolve(noise, weights)[200 : n + 200] * 0.6
    return np.exp(0.7 * series)


def test_correlated_windows_need_blocks():
    """60 pairs of 1,200 correlated requests: taken one by one a fifth or more seem to differ, in blocks few do."""
    one_by_one, in_blocks = [], []
    for seed in range(60):
        rng = np.random.default_rng(1000 + seed)
        base, suspect = correlated(rng, 1200), correlated(rng, 1200)
        naive = compare(base, suspect, "0.9", replicates=120, seed=seed, min_relative=0.0, block=1)
        found = compare(base, suspect, "0.9", replicates=120, seed=seed, min_relative=0.0)
        one_by_one.append((naive.changed, naive.changed_mean))
        in_blocks.append((found.changed, found.changed_mean))
    assert (np.mean(one_by_one, axis=0) > 0.2).all()
    assert (np.mean(in_blocks, axis=0) <= 0.1).all()


def test_a_change_of_a_fifth_is_seen_with_the_number_of_requests_that_was_promised():
    """P90 of independent requests, +20 %, at the n that `n_for_change` asks for: seen in about 90 % of 60 pairs."""
    exponential = -np.log1p(-(np.arange(5000) + 0.5) / 5000)
    n = n_for_change(np.random.default_rng(0).permutation(exponential), "0.9")
    seen = []
    for seed in range(60):
        rng = np.random.default_rng(2000 + seed)
        found = compare(
            rng.exponential(size=n), 1.2 * rng.exponential(size=n), "0.9", replicates=120, seed=seed, min_relative=0.0
        )
        seen.append(found.changed)
    assert np.mean(seen) >= 0.8
