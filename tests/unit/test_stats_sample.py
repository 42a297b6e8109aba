"""Replicates of one window: diagnosis/statistics/sample.py."""

from __future__ import annotations

import numpy as np
import pytest

from diagnosis.statistics import sample
from diagnosis.statistics.bootstrap import block_counts
from diagnosis.statistics.quantiles import nearest_rank
from diagnosis.statistics.sample import Sample


def queue(n: int, seed: int) -> np.ndarray:
    """Waiting times of a queue, so that blocks are long and slow requests come together."""
    rng = np.random.default_rng(seed)
    walk = np.cumsum(rng.exponential(0.7, n) - rng.exponential(1.0, n))
    return walk - np.minimum.accumulate(walk)


@pytest.mark.parametrize("q", ["0.01", "0.5", "0.95", "0.999"])
@pytest.mark.parametrize("weights", ["none", "strata", "any"])
@pytest.mark.parametrize("spare", [30, 0])
def test_replicates_are_quantiles_and_means_of_what_was_drawn(
    monkeypatch: pytest.MonkeyPatch, q: str, weights: str, spare: int
):
    """By the definition: repeat each request as often as it was drawn. With no bracket to spare everyone is looked at."""
    monkeypatch.setattr(sample, "SPARE", spare)
    monkeypatch.setattr(sample, "SIGMAS", 5.0 if spare else 0.0)
    values = queue(6000, 1)
    rng = np.random.default_rng(2)
    weight = {"none": None, "strata": rng.choice([0.5, 2.0], 6000), "any": rng.uniform(0.1, 3.0, 6000)}[weights]
    one = Sample(values, weight, "suspect", q, block=7)
    quantiles, means = one.replicate(12, seed=3)
    mass = block_counts(6000, 7, 12, 3) * (np.ones(6000) if weight is None else weight)
    if weight is None:
        assert quantiles.tolist() == [nearest_rank(np.repeat(values, row.astype(int)), q) for row in mass]
    else:
        assert quantiles.tolist() == [nearest_rank(values, q, row) for row in mass]
    assert means == pytest.approx([np.average(values, weights=row) for row in mass])


def test_a_block_longer_than_the_window_is_the_window():
    """Every replicate is then the window itself, begun elsewhere."""
    quantiles, means = Sample(np.arange(10.0), None, "baseline", "0.5", block=50).replicate(5, seed=0)
    assert quantiles.tolist() == [4.0] * 5
    assert means.tolist() == [4.5] * 5
