"""One window's values in arrival order, as a bootstrap looks at them: rank, mean, correlation, and what replicates of them give.

Idea: a replicate's quantile lies near the window's own, so only the requests around it are counted one by one; how many were
drawn from those above is one difference of cumulative sums a drawn block. A replicate whose quantile lies outside that
bracket looks at everyone.

Invariant: the bracket never changes a value.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from diagnosis.statistics.bootstrap import (
    CHUNK_ELEMENTS,
    Correlation,
    correlation,
    iter_runs,
    repeat_counts,
    twice_through,
)
from diagnosis.statistics.episodes import extremal_index, tail_episodes
from diagnosis.statistics.quantiles import (
    F64,
    Counts,
    Index,
    check_values,
    kish,
    nearest_rank,
    rank_order,
    tail_index,
    tail_indices,
)
from engine_probe.errors import BadWindow

SPARSE = 20  # counting some requests alone is worth it when they are fewer than one in so many
SIGMAS, SPARE = 5.0, 30  # half the bracket: standard deviations of a resampled rank, and requests beside them


class Sample:
    """Values [n] in seconds, in arrival order, with weights as from `comparability.common_mix`, at the quantile q.

    repeats [n] name the repeat of each request where an arm was run several times; block overrides the block length, in
    requests; known spares working out the correlation again. Raises BadWindow where nothing is left to compare.
    """

    def __init__(
        self,
        values: F64,
        weights: F64 | None,
        name: str,
        q: str,
        repeats: npt.NDArray[np.generic] | None = None,
        block: int | None = None,
        known: Correlation | None = None,
    ) -> None:
        self.name, self.q = name, q
        self.values, self.weights = check_values(values, weights)
        if self.values.size == 0:
            raise BadWindow(
                f"the {name} window holds no request with a known value and a weight above 0; "
                "widen it, or choose a metric that was recorded",
                window=name,
            )
        if repeats is not None:
            repeats = np.asarray(repeats)
            repeats = repeats if weights is None else repeats[np.asarray(weights) > 0]
        self.repeats = repeats
        self.quantile = nearest_rank(self.values, q, self.weights)
        self.mean = float(np.average(self.values, weights=self.weights))
        self.correlation = known or correlation(self.values, q, self.order)
        if block is not None:
            self.correlation = Correlation(self.correlation.lag, block)
        self.num_blocks, self.missed = self.values.size / self.correlation.block, self.correlation.missed
        if self.repeats is not None:
            self.num_blocks, self.missed = float(np.unique(self.repeats).size), 1.0

    @cached_property
    def order(self) -> Index:
        """Order from the smallest value up, ties by position."""
        return rank_order(self.values)

    @cached_property
    def extremal(self) -> float:
        """Extremal index of the tail."""
        return extremal_index(self.values, self.q, self.correlation.lag)

    @cached_property
    def episodes(self) -> int:
        """Separate tail episodes."""
        return tail_episodes(self.values, self.q, self.correlation.lag)

    @cached_property
    def effective(self) -> float:
        """Requests that the tail counts as, were they independent and of equal weight."""
        return self.extremal * (float(self.values.size) if self.weights is None else kish(self.weights))

    def replicate(self, replicates: int, seed: int) -> tuple[F64, F64]:
        """Quantile and mean of each replicate, [replicates] each."""
        order = self.order[::-1]
        weights = np.ones(order.size) if self.weights is None else self.weights
        if self.repeats is not None:
            mass = repeat_counts(self.repeats, replicates, seed) * weights
            return self._quantiles(mass[:, order], order), (mass * self.values).sum(axis=1) / mass.sum(axis=1)
        n, whole = order.size, self.weights is None
        first, last = self._bracket(order, weights)
        inside, larger = order[first:last], np.zeros(n, dtype=np.bool_)
        larger[order[:first]] = True
        sparse = inside.size * SPARSE < n
        value_through = twice_through(weights * self.values)
        larger_through = twice_through(larger if whole else larger * weights)
        mass_through = None if whole else twice_through(weights)
        quantiles, means = [np.empty(0)], [np.empty(0)]
        at_once = max(1, CHUNK_ELEMENTS // -(-n // self.correlation.block)) if sparse else None
        for runs in iter_runs(n, self.correlation.block, replicates, seed, at_once):
            total = np.full(len(runs), n) if mass_through is None else runs.sums(mass_through)
            counts: Counts = runs.counts_at(inside) if sparse else runs.counts()[:, inside]
            mass_inside: Counts = counts if whole else counts * weights[inside]
            found = self._quantiles(mass_inside, inside, total, runs.sums(larger_through))
            lost = np.flatnonzero(np.isnan(found))
            if lost.size:
                found[lost] = self._quantiles((runs.rows(lost).counts() * weights)[:, order], order)
            quantiles.append(found)
            means.append(runs.sums(value_through) / total)
        return np.concatenate(quantiles), np.concatenate(means)

    def _bracket(self, order: Index, weights: F64) -> tuple[int, int]:
        """Where in `order` the quantile of nearly every replicate lies: (first, behind the last)."""
        n = order.size
        block = min(self.correlation.block, n)
        at = tail_index(weights[order], self.q)
        mass = np.zeros(n)
        mass[order[: at + 1]] = weights[order[: at + 1]]
        sums = mass[: n - n % block].reshape(-1, block).sum(axis=1)
        spread = np.sqrt(sums.size * float(sums.var())) / max(float(weights.mean()), 1e-300)
        reach = int(SIGMAS * spread) + SPARE
        return max(at - reach, 0), min(at + reach + 1, n)

    def _quantiles(self, mass: Counts, order: Index, total: Counts | None = None, above: Counts | None = None) -> F64:
        """Quantile of each row of masses [rows, m] of the requests `order`, largest first; NaN where it is none of theirs.

        above [rows] is the mass of still larger ones, total [rows] that of all; None: `order` is everyone.
        """
        if self.weights is None:
            mass = mass.astype(np.int64)
        index = tail_indices(mass, self.q, total, above, self.values.size)
        found = self.values[order[np.clip(index, 0, order.size - 1)]]
        return np.where((index >= 0) & (index < order.size), found, np.nan)
