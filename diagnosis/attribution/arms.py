"""One window as the game of attribution sees it: a column of seconds a player, sorted once, and how it is resampled.

Idea: a replicate only counts how often each request was drawn, so presorted orders and cumulative counts give every rank.
Bounds that hold while the cumulative counts stay inside a band say in advance who can matter (`coalitions.py`).

Invariant: equal windows have equal totals, to the last bit.
Source: the band is 4.5 standard deviations of a block-resampled distribution function.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from diagnosis.statistics.bootstrap import correlation, iter_runs, repeat_counts, twice_through
from diagnosis.statistics.quantiles import F64, Counts, Index, kish, rank_order, tail_index

CELLS = 8192
"""Ranks are put into about so many cells where a band is looked at."""
SIGMAS, SPARE = 5.0, 30
"""Of how many more requests than the tail holds it is nearly certain that they hold it in a replicate."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Some replicates of an arm: how often each request was drawn, times its weight [replicates, n], and the seconds of each
    column that were drawn [replicates, g]."""

    mass: Counts
    sums: F64

    @property
    def total(self) -> Counts:
        """Mass of each replicate; exact for whole numbers."""
        return np.asarray(self.mass.sum(axis=1, dtype=np.float64 if self.mass.dtype.kind == "f" else np.int64))

    def rows(self, rows: Index) -> Draw:
        """Some of these replicates."""
        return Draw(self.mass[rows], self.sums[rows])


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
        rising = rank_order(self.total)
        self.by_total = rising[::-1]
        self.correlation = correlation(self.total, q, rising)
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
        self.through = [
            self.cumulate(self.mass[None, :], k)[0] for k in range(self.g if weights is not None else min(self.g, 1))
        ]
        self.cell = max(1, self.n // CELLS)
        self.low, self.high = self._band()
        self.lowest = [low[:: self.cell].copy() for low in self.low]
        self.highest = [high[self.cell - 1 :: self.cell].copy() for high in self.high]

    def itself(self) -> Draw:
        """The window as it is, as one replicate."""
        sums = np.einsum("n,kn->k", self.mass.astype(np.float64), self.columns)
        return Draw(self.mass[None, :], sums[None, :])

    def draw(self, replicates: int, seed: int, at_once: int) -> Iterator[Draw]:
        """Replicates, `at_once` at a time: how often each request was drawn, times its weight."""
        weights = 1 if self.weights is None else self.weights
        if self.repeats is not None:
            mass = repeat_counts(self.repeats, replicates, seed) * weights
            for first in range(0, replicates, at_once):
                some = mass[first : first + at_once]
                yield Draw(some, np.einsum("rn,kn->rk", some.astype(np.float64), self.columns))
            return
        through = [twice_through(column * weights) for column in self.columns]
        for runs in iter_runs(self.n, self.block, replicates, seed, at_once):
            sums = np.empty((len(runs), self.g))
            for k, column in enumerate(through):
                sums[:, k] = runs.sums(column)
            yield Draw(runs.counts() if self.weights is None else runs.counts() * self.weights, sums)

    def cumulate(self, mass: Counts, k: int) -> Counts:
        """Mass at or below each rank of column k, [replicates, n]."""
        out = np.empty(mass.shape, dtype=np.float64 if mass.dtype.kind == "f" else np.int32)
        return np.cumsum(mass.take(self.orders[k], axis=1), axis=1, out=out)

    def stays_in_band(self, through: Counts, k: int, total: Counts) -> npt.NDArray[np.bool_]:
        """In which replicates every cumulative mass of column k lies inside the band that the advance bounds assume.

        The band is level inside a cell of ranks and masses rise, so the first and the last rank of a cell tell of all.
        """
        first, last = through[:, :: self.cell], through[:, self.cell - 1 :: self.cell]
        if (total != self.nominal).any():
            scale = (self.nominal / total)[:, None]
            first, last = first * scale, last * scale
        return np.asarray((first >= self.lowest[k]).all(axis=1) & (last <= self.highest[k]).all(axis=1))

    def tail_of(self, order: Index) -> Index:
        """The first of `order` [n], enough of them to hold the tail's mass in nearly every replicate."""
        at = tail_index(self.mass.take(order), self.q)
        reach = SIGMAS * np.sqrt(self._inflation * (at + 1.0)) + SPARE
        return order[: min(at + 1 + int(reach), self.n)]

    def _band(self) -> tuple[list[Counts], list[Counts]]:
        """Lowest and highest cumulative mass expected of a replicate at each rank [n] of each column; both rise."""
        scatter = self._inflation / kish(np.asarray(self.mass, dtype=np.float64))
        low: list[Counts] = []
        high: list[Counts] = []
        for through in self.through:
            share = np.clip(through / self.nominal, 0.0, 1.0)
            reach = self.nominal * (4.5 * np.sqrt(scatter * share * (1.0 - share)) + 10.0 * scatter)
            lowest = np.maximum(np.maximum.accumulate(through - reach), 0.0)
            highest = np.minimum(np.minimum.accumulate((through + reach)[::-1])[::-1], self.nominal)
            lowest = np.repeat(lowest[:: self.cell], self.cell)[: self.n]
            last = np.append(highest[self.cell - 1 :: self.cell], self.nominal)
            highest = np.repeat(last, self.cell)[: self.n]
            if self.weights is None:
                low.append(np.floor(lowest).astype(np.int32))
                high.append(np.ceil(highest).astype(np.int32))
            else:
                low.append(lowest * (1 - 1e-9))
                high.append(highest * (1 + 1e-9))
        if self.weights is None:  # without weights every column counts alike
            return low * self.g, high * self.g
        return low, high

    @cached_property
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


def sum_rows(columns: F64) -> F64:
    """Sum over parts [g, ...] -> [...], always in the same order: equal columns give equal totals to the last bit."""
    out = np.zeros(columns.shape[1:])
    for column in columns:
        out += column
    return out
