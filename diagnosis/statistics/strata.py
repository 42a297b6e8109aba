"""Strata: the cross of the dimensions, as fine as the smaller window can fill, and whether two windows fill them alike.

Source: permutation test of the G statistic, Good 2005.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.statistics.dimensions import I64, Dimension
from diagnosis.statistics.quantiles import F64

CUTS = ((0.25, 0.5, 0.75, 0.9, 0.97), (0.5, 0.8, 0.95), (0.5, 0.9), (0.75,))
"""Quantiles of the pooled lengths at which bins are cut: finer at the top, where a tail latency is decided."""
MAX_STRATA = 256
"""More would be of single requests, whatever the windows' size."""
PER_STRATUM = 20  # requests of the smaller window that a stratum should hold on average
MAX_P, MIN_TV = 0.01, 0.02
"""Two mixes differ where chance is as unlikely as this, and so many of the requests are of another kind beyond what chance makes."""
PERMUTATIONS = 500
"""So many resolve a p of 0.01."""


@dataclass(frozen=True, slots=True)
class MixTest:
    """Difference of two mixes: permutation p of the G statistic, total variation, and its excess over chance."""

    p: float
    tv: float
    excess: float

    @property
    def material(self) -> bool:
        return self.p < MAX_P and self.excess >= MIN_TV

    def __str__(self) -> str:
        return f"total variation {self.tv:.2f} ({self.tv - self.excess:.2f} expected by chance), p {self.p:.3f}"


def strata_of(
    dimensions: dict[str, Dimension], moved: list[str], still: list[str], sizes: tuple[int, int]
) -> tuple[I64, list[str]]:
    """The cross of the dimensions that resolves what moved as finely as the smaller window can fill.

    What did not move, most shifted first, is crossed with it coarsely as far as there is room. When nothing moved
    alone, all dimensions are crossed, for they may have moved together, and their bins coarsened until there is room.
    """
    most = min(MAX_STRATA, min(sizes) // PER_STRATUM)
    for cuts in CUTS:
        for kept in range(len(still), -1, -1) if moved else [len(still)]:
            resolution: dict[str, tuple[float, ...]] = dict.fromkeys(moved, cuts)
            resolution.update(dict.fromkeys(still[:kept], CUTS[2] if moved else cuts))
            codes, labels = _cross(dimensions, resolution)
            if len(labels) <= most:
                return codes, labels
    for kept in range(len(still), -1, -1):
        codes, labels = _cross(dimensions, dict.fromkeys([*moved, *still[:kept]], CUTS[-1]))
        if len(labels) <= most:
            break
    return codes, labels


def _cross(dimensions: dict[str, Dimension], resolution: dict[str, tuple[float, ...]]) -> tuple[I64, list[str]]:
    """Stratum number of each request, and the names of the strata that hold any."""
    codes: I64 | None = None
    labels = [""]
    for name in (n for n in dimensions if n in resolution):
        part, words = dimensions[name].bins(resolution[name])
        joined = part if codes is None else codes * len(words) + part
        present = np.flatnonzero(np.bincount(joined, minlength=len(labels) * len(words)))
        renumber = np.zeros(len(labels) * len(words), dtype=np.int64)
        renumber[present] = np.arange(present.size)
        codes = renumber[joined]
        labels = [", ".join(filter(None, (labels[j // len(words)], words[j % len(words)]))) for j in present.tolist()]
    if codes is None:  # nothing to tell requests apart by: one stratum
        return np.zeros(next(iter(dimensions.values())).size, dtype=np.int64), ["all requests"]
    return codes, labels


def difference(codes: I64, labels: list[str], sizes: tuple[int, int], rng: np.random.Generator) -> MixTest:
    pooled = np.bincount(codes, minlength=len(labels))
    observed = np.bincount(codes[: sizes[0]], minlength=len(labels))
    shuffled = rng.multivariate_hypergeometric(pooled, sizes[0], size=PERMUTATIONS, method="marginals")
    g, tv = _statistics(np.vstack([observed, shuffled]), pooled, sizes)
    p = float((1 + np.count_nonzero(g[1:] >= g[0] * (1 - 1e-12))) / (1 + PERMUTATIONS))
    return MixTest(p, float(tv[0]), float(tv[0] - tv[1:].mean()))


def _statistics(base: I64, pooled: I64, sizes: tuple[int, int]) -> tuple[F64, F64]:
    """G and total variation of tables whose baseline counts are [tables, strata]."""
    g = np.zeros(base.shape[0])
    for counts, size in ((base, sizes[0]), (pooled - base, sizes[1])):
        expected = pooled * (size / sum(sizes))
        ratio = np.divide(counts, expected, out=np.ones(counts.shape), where=counts > 0)
        g += 2.0 * (counts * np.log(ratio)).sum(axis=1)
    tv = 0.5 * np.abs(base / sizes[0] - (pooled - base) / sizes[1]).sum(axis=1)
    return g, tv
