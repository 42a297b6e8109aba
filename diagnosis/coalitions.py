"""The game that attribution plays: the value of every coalition of causes, again for every bootstrap replicate.

Idea: in coalition S the suspect's requests keep their own seconds for the causes in S and get the baseline's seconds at
the same rank for the others. Most requests can be neither the quantile nor in its tail whatever S is, so only their
number matters. Orders are sorted once; a replicate only counts how often each request was drawn. Bounds that hold while
the drawn ranks stay inside a band say in advance who can matter; a replicate that leaves the band looks at everyone.

Invariant: pruning never changes a value. Equal windows give equal columns, hence exact zeros.
Source: Shapley 1953; the band is 4.5 standard deviations of a block-resampled distribution function.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import factorial

import numpy as np
import numpy.typing as npt

from diagnosis.bootstrap import correlation, iter_block_counts, repeat_counts
from diagnosis.quantiles import (
    F64,
    Counts,
    Index,
    descending_order,
    kish,
    parse_quantile,
    rank_order,
    tail_index,
    tail_indices,
    tail_limit,
)


@dataclass(frozen=True, slots=True)
class Play:
    """One reading of the game in seconds: Shapley rows [g] and dependence; plain differences for the mean.

    work counts the numbers that were looked at, to decide how many replicates are affordable.
    """

    rows: F64
    dependence: float
    es_rows: F64
    es_dependence: float
    mean_rows: F64
    work: int


class Arm:
    """One window as the game sees it: a column a player, their presorted orders, weights, how it is resampled.

    columns [g, n] seconds in arrival order; weights [n] > 0 or None; repeats [n] or None.
    """

    def __init__(
        self,
        columns: F64,
        labels: list[str],
        weights: F64 | None,
        repeats: npt.NDArray[np.generic] | None,
        q: str,
        seed: int,
    ) -> None:
        self.columns, self.weights, self.repeats, self.q = columns, weights, repeats, q
        self.g: int = columns.shape[0]
        self.n: int = columns.shape[1]
        self.total = sum_rows(columns)
        self.by_total = descending_order(self.total)
        self.correlation = correlation(self.total, q)
        self.block = self.correlation.block
        self.num_blocks: float = self.n / self.block
        self.missed = self.correlation.missed
        if repeats is not None:
            self.num_blocks, self.missed = float(np.unique(repeats).size), 1.0
        self.orders = np.empty((self.g, self.n), dtype=np.intp)
        for k, label in enumerate(labels):
            # Each part breaks its ties by a permutation of its own, else two parts that are both 0 would be matched
            # to large baseline values on the same requests.
            shuffle = np.random.default_rng([seed, zlib.crc32(label.encode())]).permutation(self.n)
            self.orders[k] = rank_order(columns[k], shuffle)
        self.ordered = np.take_along_axis(columns, self.orders, axis=1)
        self.mass = np.ones(self.n, dtype=np.int64) if weights is None else weights
        self.nominal = self.mass.sum()
        self.through = self.cumulate(self.mass)
        self.low, self.high = self._band()

    def draw(self, replicates: int, seed: int) -> Iterator[Counts]:
        """Mass of each request in each replicate: how often it was drawn, times its weight."""
        chunks = (
            iter_block_counts(self.n, self.block, replicates, seed)
            if self.repeats is None
            else iter([repeat_counts(self.repeats, replicates, seed)])
        )
        for counts in chunks:
            for row in counts:
                yield row if self.weights is None else row * self.weights

    def cumulate(self, mass: Counts) -> Counts:
        """Mass at or below each rank of each column, [g, n]."""
        out = np.empty((self.g, self.n), dtype=np.float64 if mass.dtype.kind == "f" else np.int32)
        for k in range(self.g):
            np.cumsum(mass.take(self.orders[k]), out=out[k])
        return out

    def stays_in_band(self, through: Counts, total: float) -> bool:
        """Whether every cumulative mass lies inside the band that the advance bounds assume."""
        scale = self.nominal / total
        for k in range(self.g):
            row = through[k] if scale == 1.0 else through[k] * scale
            if (row < self.low[k]).any() or (row > self.high[k]).any():
                return False
        return True

    def _band(self) -> tuple[list[Counts], list[Counts]]:
        """Lowest and highest cumulative mass expected of a replicate at each rank [n] of each column; both rise."""
        scatter = self._inflation() / kish(np.asarray(self.mass, dtype=np.float64))
        low: list[Counts] = []
        high: list[Counts] = []
        for through in self.through if self.weights is not None else self.through[:1]:
            share = np.clip(through / self.nominal, 0.0, 1.0)
            reach = self.nominal * (4.5 * np.sqrt(scatter * share * (1.0 - share)) + 10.0 * scatter)
            lowest = np.maximum(np.maximum.accumulate(through - reach), 0.0)
            highest = np.minimum(np.minimum.accumulate((through + reach)[::-1])[::-1], self.nominal)
            if self.weights is None:
                low.append(np.floor(lowest).astype(np.int32))
                high.append(np.ceil(highest).astype(np.int32))
            else:
                low.append(lowest * (1 - 1e-9))
                high.append(highest * (1 + 1e-9))
        if self.weights is None:  # without weights every column counts alike
            return low * self.g, high * self.g
        return low, high

    def _inflation(self) -> float:
        """How much more a resampled share scatters than that of independent requests: 1 to the length of a block."""
        if self.repeats is not None:
            return float(self.n / self.num_blocks)
        whole = self.n - self.n % self.block
        worst = 1.0
        for level in (0.5, 0.9, 0.99):
            edges = self.ordered[:, int(level * (self.n - 1))]
            above = (
                (self.columns[:, :whole] > edges[:, None]).reshape(self.g, whole // self.block, self.block).sum(axis=2)
            )
            share = above.mean(axis=1) / self.block
            ratio = above.var(axis=1) / np.maximum(self.block * share * (1.0 - share), 1e-9)
            worst = max(worst, float(ratio.max(initial=0.0)))
        return min(1.3 * worst, float(self.block))


class Game:
    """The coalition game between a baseline and a suspect arm, played once per replicate."""

    def __init__(self, base: Arm, suspect: Arm, q: str) -> None:
        self.base, self.suspect, self.q, self.g = base, suspect, q, base.g
        self.shapley = shapley_matrix(self.g)
        self.place = np.empty((self.g, suspect.n), dtype=np.intp)
        np.put_along_axis(self.place, suspect.orders, np.arange(suspect.n)[None, :], axis=1)
        lower, upper = self._advance_bounds()
        self.by_lower, self.by_upper = descending_order(lower), descending_order(upper)
        self.lower = lower[self.by_lower]
        self.rising_upper = upper[self.by_upper][::-1]

    def play(self, base_mass: Counts | None = None, mass: Counts | None = None) -> Play:
        """Play with the drawn masses [n_b], [n_s]; without any, on the windows as they are."""
        base_mass = self.base.mass if base_mass is None else base_mass
        mass = self.suspect.mass if mass is None else mass
        base_through, through = self.base.cumulate(base_mass), self.suspect.cumulate(mass)
        base_total, total = mass_sum(base_mass), mass_sum(mass)
        banded = self.base.stays_in_band(base_through, base_total) and self.suspect.stays_in_band(through, total)
        near = self._near(mass) if banded else np.flatnonzero(mass > 0)
        matched = np.empty((self.g, near.size))
        for k in range(self.g):
            matched[k] = self._match(k, near, mass, through[k], base_through[k], base_total / total)
        own = self.suspect.columns[:, near]
        keep = self._can_matter(own, matched, mass[near], total)
        quantile, shortfall = self._coalitions(own[:, keep], matched[:, keep], mass[near[keep]], total)
        base_quantile, base_shortfall = self._base_tail(base_mass, base_total)
        means = np.einsum("n,kn->k", mass.astype(np.float64), self.suspect.columns) / total
        base_means = np.einsum("n,kn->k", base_mass.astype(np.float64), self.base.columns) / base_total
        return Play(
            rows=(self.shapley * (quantile - quantile[0])).sum(axis=1),
            dependence=float(quantile[0] - base_quantile),
            es_rows=(self.shapley * (shortfall - shortfall[0])).sum(axis=1),
            es_dependence=float(shortfall[0] - base_shortfall),
            mean_rows=means - base_means,
            work=self._work(near.size, keep.size),
        )

    def _advance_bounds(self) -> tuple[F64, F64]:
        """Bounds [n_s] on what a request can take in any coalition of any replicate inside the bands."""
        base, suspect = self.base, self.suspect
        lower, upper = np.zeros(suspect.n), np.zeros(suspect.n)
        scale = base.nominal / suspect.nominal
        for k in range(self.g):
            if k == 0 or base.weights is not None or suspect.weights is not None:
                before = np.concatenate([[0], suspect.low[k][:-1]])
                least = np.searchsorted(base.high[k], before * scale * (1 - 1e-9))
                most = np.searchsorted(base.low[k], suspect.high[k] * scale * (1 + 1e-9))
            own = suspect.ordered[k]
            order = suspect.orders[k]
            lower[order] += np.minimum(own, base.ordered[k].take(least, mode="clip"))
            upper[order] += np.maximum(own, base.ordered[k].take(most, mode="clip"))
        return lower, upper

    def _near(self, mass: Counts) -> Index:
        """Drawn requests whose advance upper bound reaches the quantile of the advance lower bounds."""
        floor = self.lower[tail_index(mass.take(self.by_lower), self.q)]
        count = self.rising_upper.size - int(np.searchsorted(self.rising_upper, floor - slack(floor)))
        near = np.sort(self.by_upper[:count])
        return near[mass.take(near) > 0]

    def _match(self, k: int, near: Index, mass: Counts, through: Counts, base_through: Counts, scale: float) -> F64:
        """Baseline seconds of part k at the weighted ranks of the requests `near`: their middle rank, lower inverse."""
        place = self.place[k].take(near)
        by_place = np.argsort(place)  # a search for rising needles stays in the cache
        rising = place[by_place]
        middle = through.take(rising) - mass.take(near[by_place]) * 0.5
        found = np.searchsorted(base_through, rank_needle(middle * scale, base_through))
        matched = np.empty(near.size)
        matched[by_place] = self.base.ordered[k].take(found, mode="clip")
        return matched

    def _can_matter(self, own: F64, matched: F64, mass: Counts, total: float) -> Index:
        """The same with the exact bounds of this replicate; all who are not `near` lie below the quantile anyway."""
        lower, upper = sum_rows(np.minimum(own, matched)), sum_rows(np.maximum(own, matched))
        order = descending_order(lower)
        floor = lower[order[min(tail_indices(mass[order][None, :], self.q, np.array([total]))[0], lower.size - 1)]]
        return np.flatnonzero(upper >= floor - slack(floor))

    def _coalitions(self, own: F64, matched: F64, mass: Counts, total: float) -> tuple[F64, F64]:
        """Quantile and expected shortfall of all 2^g coalitions; bit k of a coalition's number: cause k is in it."""
        values = np.empty((1 << self.g, own.shape[1]))
        values[0] = sum_rows(matched)
        for k in range(self.g):
            np.add(values[: 1 << k], own[k] - matched[k], out=values[1 << k : 2 << k])
        values[-1] = sum_rows(own)
        return tails(values, mass, total, self.q)

    def _work(self, near: int, keep: int) -> int:
        """Numbers looked at in one play; weights cost more, since they are sorted where counts are partitioned."""
        weighted = self.base.weights is not None or self.suspect.weights is not None
        everyone = 5 * self.g * (self.base.n + self.suspect.n)
        return (2 if weighted else 1) * (everyone + 10 * self.g * near + (8 << self.g) * keep)

    def _base_tail(self, mass: Counts, total: float) -> tuple[float, float]:
        by_total = self.base.by_total
        quantile = self.base.total[by_total[tail_index(mass.take(by_total), self.q)]]
        near = np.flatnonzero((self.base.total >= quantile) & (mass > 0))
        found, shortfall = tails(self.base.total[near][None, :], mass[near], total, self.q)
        return float(found[0]), float(shortfall[0])


def tails(values: F64, mass: Counts, total: float, q: str) -> tuple[F64, F64]:
    """Quantile and expected shortfall of each row of values [rows, m] with one mass [m].

    The values are the largest of a sample of mass `total`, the quantile among them. Whole masses are taken as repeats.
    """
    rest = float(1 - parse_quantile(q)) * total
    if mass.dtype.kind != "f":
        values = np.repeat(values, mass, axis=1)
        above = int(tail_limit(np.array([int(total)]), q, 1)[0])
        at = values.shape[1] - 1 - above
        values.partition(at, axis=1)
        quantile = values[:, at]
        worst = np.sort(values[:, at + 1 :], axis=1)  # sorted, so that equal samples add up to the same last bit
        return quantile, (worst.sum(axis=1) + (rest - above) * quantile) / rest
    order = np.argsort(-values, axis=1)  # whichever of equal values comes first, the sums are the same
    values, held = np.take_along_axis(values, order, axis=1), mass[order]
    index = np.minimum(tail_indices(held, q, np.full(values.shape[0], total)), values.shape[1] - 1)
    quantile = np.take_along_axis(values, index[:, None], axis=1)[:, 0]
    inside = np.minimum(np.maximum(rest - (np.cumsum(held, axis=1) - held), 0.0), held)
    return quantile, (values * inside).sum(axis=1) / inside.sum(axis=1)


def rank_needle(middle: F64, through: Counts) -> Counts:
    """What to search for among cumulative masses: in whole numbers the first one >= m is the first >= ceil(m)."""
    return middle if through.dtype.kind == "f" else np.ceil(middle).astype(through.dtype)


def shapley_matrix(g: int) -> F64:
    """[g, 2^g]: the Shapley value of player k is row k times the vector of coalition values."""
    members = (np.arange(1 << g)[:, None] >> np.arange(g)) & 1
    size = members.sum(axis=1)
    weight = np.array([factorial(s) * factorial(g - s - 1) / factorial(g) for s in range(g)] + [0.0])
    return np.asarray(np.where(members.T == 1, weight[np.maximum(size - 1, 0)], -weight[size]), dtype=np.float64)


def sum_rows(columns: F64) -> F64:
    """Sum over parts [g, n] -> [n], always in the same order: equal columns give equal totals to the last bit."""
    out = np.zeros(columns.shape[1])
    for column in columns:
        out += column
    return out


def mass_sum(mass: Counts) -> float:
    """Total mass; exact for whole numbers."""
    return float(mass.sum()) if mass.dtype.kind == "f" else int(mass.sum(dtype=np.int64))


def slack(value: float) -> float:
    """Room for rounding when a bound is compared with a value made of the same numbers in another order."""
    return 1e-9 * abs(float(value)) + 1e-12
