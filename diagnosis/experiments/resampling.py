"""Intervals from repeats: every way in which as many repeats can be drawn from them, with replacement.

Idea: within a repeat requests share queues, so the repeat is the only unit that is independent. Three repeats can be drawn in
27 ways, ten of them different; all are looked at, so there is no chance in it and nothing to seed. A spread read off so few is
too small, which `bootstrap.widen` mends by Student's t. Two arms that served the same traces are drawn together: what a hard
trace does to both is no difference.
Invariant: equal arms differ by 0 in every draw.
Source: docs/method.md, section 3; Fisher and Hall 1991 (exhaustive bootstrap).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from diagnosis.statistics.bootstrap import repeat_counts, widen
from diagnosis.statistics.draws import interval_95, student_p
from diagnosis.statistics.quantiles import F64, Counts, descending_order, nearest_rank, tail_indices
from diagnosis.statistics.significance import MIN_FOR_MEAN
from diagnosis.statistics.sufficiency import required_n

MAX_WHOLE = 6
"""Up to so many repeats every draw is looked at (46,656 of them), beyond it `REPLICATES` by seed 0."""
REPLICATES = 2000
"""The ends of a 95 % interval scatter by a fiftieth of its width."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Ways to draw repeats: how often each is drawn [m, repeats], and in how many ways [m] that comes about."""

    counts: Counts
    ways: Counts

    @property
    def num_repeats(self) -> int:
        return int(self.counts.shape[1])


def draws_of(num_repeats: int) -> Draws:
    """All draws of so many repeats, 2 or more."""
    if num_repeats > MAX_WHOLE:
        found = repeat_counts(np.arange(num_repeats), REPLICATES, seed=0)
        return Draws(found.astype(np.int64), np.ones(REPLICATES, dtype=np.int64))
    counts, ways = [], []
    for drawn in itertools.combinations_with_replacement(range(num_repeats), num_repeats):
        times = Counter(drawn)
        counts.append([times[repeat] for repeat in range(num_repeats)])
        ways.append(math.factorial(num_repeats) // math.prod(math.factorial(n) for n in times.values()))
    return Draws(np.array(counts, dtype=np.int64), np.array(ways, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number of an arm, or a difference. interval_95 None: `reason` says why; its upper end inf: a lower bound alone.

    p_value   of "it is 0", for many that are looked at together; None where there is no two-sided interval
    """

    value: float | None
    interval_95: tuple[float, float] | None = None
    reason: str | None = None
    p_value: float | None = None

    @property
    def is_above_0(self) -> bool:
        return self.interval_95 is not None and self.interval_95[0] > 0.0

    @property
    def is_below_0(self) -> bool:
        return self.interval_95 is not None and self.interval_95[1] < 0.0


def estimate(repeats: Sequence[F64], q: str | None) -> Estimate:
    """Quantile `q` (None: mean) of all repeats' values together, with the interval that the repeats give.

    repeats   values of each, without NaN
    """
    pooled = np.concatenate(repeats) if repeats else np.empty(0)
    if pooled.size == 0:
        return Estimate(None, None, "no request tells it")
    value = _value(pooled, q)
    reason, one_sided = _short_of([pooled.size], q, len(repeats))
    if reason is not None:
        return Estimate(value, None, reason)
    return _told(value, lambda draws: _replicates(repeats, q, draws), draws_of(len(repeats)), one_sided=one_sided)


def difference(base: Sequence[F64], suspect: Sequence[F64], q: str | None) -> Estimate:
    """suspect - baseline of a quantile (None: the mean); the n-th repeats of both are drawn together.

    Arms with different numbers of repeats are drawn apart, as far as both have some.
    """
    sizes = [int(sum(values.size for values in arm)) for arm in (base, suspect)]
    if min(sizes) == 0:
        return Estimate(None, None, "no request tells it in both arms")
    value = _value(np.concatenate(suspect), q) - _value(np.concatenate(base), q)
    repeats = min(len(base), len(suspect))
    reason, one_sided = _short_of(sizes, q, repeats)
    if reason is not None:
        return Estimate(value, None, reason)
    pairs = base[:repeats], suspect[:repeats]
    return _told(
        value,
        lambda draws: _replicates(pairs[1], q, draws) - _replicates(pairs[0], q, draws),
        draws_of(repeats),
        one_sided=one_sided,
    )


def of_numbers(numbers: Sequence[float]) -> Estimate:
    """Mean of one number a repeat (a rate, a paired difference)."""
    return estimate([np.array([number]) for number in numbers], None) if numbers else Estimate(None, None, "unknown")


def _short_of(sizes: Sequence[int], q: str | None, repeats: int) -> tuple[str | None, bool]:
    """(why there is no interval, or None; whether it is a lower bound alone)."""
    if repeats < 2:
        return f"{repeats} repeat tells nothing of the spread between repeats; 2 are needed", False
    fewest = min(sizes)
    if q is None:
        if fewest >= MIN_FOR_MEAN or fewest == repeats:
            return None, False
        return f"{fewest:,} requests; a mean needs {MIN_FOR_MEAN}", False
    one, two = required_n(q, 1), required_n(q, 2)
    if one is None or fewest < one:
        return (
            f"{fewest:,} requests; quantile {q} needs {'more than there can be' if one is None else f'{one:,}'}",
            False,
        )
    return None, two is None or fewest < two


def _value(pooled: F64, q: str | None) -> float:
    return float(pooled.mean()) if q is None else nearest_rank(pooled, q)


def _replicates(repeats: Sequence[F64], q: str | None, draws: Draws) -> F64:
    """The value in each way of drawing, [m]; NaN where only repeats without a value were drawn."""
    sizes = np.array([values.size for values in repeats])
    if q is None:
        sums = np.array([values.sum() for values in repeats])
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((draws.counts @ sums) / (draws.counts @ sizes))
    pooled = np.concatenate(repeats)
    order = descending_order(pooled)
    member = np.repeat(np.arange(len(repeats)), sizes)[order]
    mass = draws.counts[:, member]
    index = tail_indices(mass, q)
    return np.where(mass.sum(axis=1) > 0, pooled[order[np.clip(index, 0, order.size - 1)]], np.nan)


def _told(value: float, replicates: Callable[[Draws], F64], draws: Draws, *, one_sided: bool) -> Estimate:
    drawn = np.repeat(replicates(draws), draws.ways)
    drawn = drawn[np.isfinite(drawn)]
    bounds = interval_95(widen(drawn, draws.num_repeats), one_sided=one_sided)
    return Estimate(value, bounds, None, None if one_sided else _p_value(value, drawn, draws.num_repeats))


def _p_value(value: float, drawn: F64, num_repeats: int) -> float:
    """By Student's t, as the interval is. The variance of draws of m repeats is (m - 1) / m of what it stands for."""
    error = float(drawn.std()) * math.sqrt(num_repeats / (num_repeats - 1))
    # What is the same in every draw, to rounding, has no error to be held against.
    if error <= 1e-12 * max(abs(value), float(np.abs(drawn).max(initial=0.0))):
        return 1.0 if value == 0.0 else 0.0
    return student_p(value / error, num_repeats - 1)
