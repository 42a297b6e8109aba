"""Quantiles, tails and effective sizes: the only places where a rank is computed in diagnosis.

Idea: the nearest rank is the ceil(q*n)-th smallest value, worked in exact arithmetic from a decimal string (a float
0.07 times 100 rounds up to 8). Seen from the top it says: at most n - ceil(q*n) values may lie above it. The weighted
form says the same with mass: the smallest value whose cumulative weight reaches q of the total. The rank itself is the
store's (`store.percentile`), so that every surface means the same request.

Invariant: integer weights give exactly what repeating the values gives, and equal weights give exactly the unweighted
rule, whatever their float value. Weights are never negative; a weight of zero means "not there".
Source: docs/method.md; Kish, Survey Sampling (1965), for the effective size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from engine_probe.errors import DiagnosisError
from store import percentile

F64: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[Any]  # whole numbers (how often a request was drawn), or those times weights
Index: TypeAlias = npt.NDArray[np.intp]

_EPS = float(np.finfo(np.float64).eps)


parse_quantile = lru_cache(maxsize=256)(percentile.parse_quantile)  # asked for in every replicate


def nearest_rank(values: F64, q: str, weights: F64 | None = None) -> float:
    """The nearest-rank quantile: ceil(q*n)-th smallest value, or by cumulative weight; NaN when nothing is there.

    values [n], any order, no NaN; weights [n] >= 0 or None. Raises DiagnosisError for NaN values or bad weights.
    """
    values, weights = check_values(values, weights)
    if values.size == 0:
        return float("nan")
    if weights is None:
        index = values.size - 1 - allowed_above(values.size, q)
        return float(np.partition(values, index)[index])
    order = descending_order(values)
    return float(values[order[tail_index(weights[order], q)]])


def expected_shortfall(values: F64, q: str, weights: F64 | None = None) -> float:
    """Mean of the worst 1-q of the mass, the request on the border counted by the fraction that lies inside.

    Never below the nearest-rank quantile; the maximum when less than one request's mass lies above q. NaN when empty.
    """
    values, weights = check_values(values, weights)
    if values.size == 0:
        return float("nan")
    if weights is None:
        index = values.size - 1 - allowed_above(values.size, q)
        values = np.partition(values, index)[index:]
        total = float(index + values.size)
        mass = np.ones(values.size)
    else:
        total, mass = float(weights.sum()), weights
    order = descending_order(values)
    descending, mass = values[order], mass[order]
    tail = float(1 - parse_quantile(q)) * total
    if tail <= 0.0:
        return float(descending[0])
    inside = np.minimum(np.maximum(tail - (np.cumsum(mass) - mass), 0.0), mass)
    # An average can leave the range of what it averages by a rounding; "never below the quantile" may not.
    lowest = descending[inside > 0.0][-1]
    return float(min(max((descending * inside).sum() / inside.sum(), lowest), descending[0]))


def kish(weights: F64) -> float:
    """Effective number of requests behind a weighted sample: (sum w)^2 / sum w^2; 0 when all weights are 0."""
    weights = np.asarray(weights, dtype=np.float64)
    largest = float(weights.max(initial=0.0))
    if largest <= 0.0:
        return 0.0
    scaled = weights / largest  # so that squares neither vanish nor overflow
    return float(scaled.sum() ** 2 / (scaled * scaled).sum())


def allowed_above(n: int, q: str) -> int:
    """How many of n values may lie above the nearest rank: n - ceil(q*n)."""
    return n - percentile.rank_index(n, q) if n > 0 else 0


def tail_index(mass: Counts, q: str) -> int:
    """Index of the nearest rank in values sorted from the largest down, `mass` [n] in that order.

    It is the last index with mass above which at most (1-q) of the total lies. Whole numbers are compared exactly,
    other weights with a tolerance for the rounding of a cumulative sum, which is far below any single weight.
    """
    return int(tail_indices(np.asarray(mass)[None, :], q)[0])


def tail_indices(mass: Counts, q: str, total: Counts | None = None, above: Counts | None = None, n: int = 0) -> Index:
    """`tail_index` for every row of mass [rows, m].

    total [rows] is the mass of each row when `mass` holds only some of its largest values, above [rows] that of still
    larger ones; a row whose tail may reach beyond them gets index m, one whose tail ends above them -1, and the caller
    must look there. n is how many weights the sums are of, where they are more than m.
    """
    if mass.dtype.kind == "f" and np.array_equal(mass, np.floor(mass)) and float(mass.sum()) < 2.0**53:
        mass = mass.astype(np.int64)
    through = np.cumsum(mass, axis=1, dtype=np.float64 if mass.dtype.kind == "f" else np.int64)
    limit = tail_limit(through[:, -1] if total is None else total, q, max(n, mass.shape[1]))
    if above is not None:
        limit = limit - above
    reached = through[:, -1] > limit
    index = np.where(reached, np.argmax(through > limit[:, None], axis=1), mass.shape[1])
    return np.asarray(index if above is None else np.where(limit < 0, -1, index), dtype=np.intp)


def tail_limit(total: Counts, q: str, n: int) -> Counts:
    """Mass that may lie above the nearest rank of totals [rows]: exact for whole numbers, else with a tolerance.

    n is how many weights were added up; it sizes the tolerance.
    """
    exact = parse_quantile(q)
    if total.dtype.kind == "f":
        return np.asarray(total * (float(1 - exact) + 4 * _EPS * max(n, 64)))
    p, d = exact.numerator, exact.denominator
    return np.array([t + (-(p * t) // d) for t in total.tolist()], dtype=np.int64)


def descending_order(values: F64) -> Index:
    """Order from the largest value down, ties by position; the same on every processor."""
    return rank_order(values)[::-1]


def rank_order(values: F64, tie_break: Index | None = None) -> Index:
    """Order from the smallest value up; equal values in the order of `tie_break` [n], a permutation, or by position.

    The fast unstable sort breaks ties differently on different processors; one sort of whole numbers puts them right.
    """
    order = np.argsort(values)
    ordered = values[order]
    new = ordered[1:] != ordered[:-1]
    if new.all():
        return order
    n = values.size
    first = np.concatenate([[0], np.cumsum(new)]) * n  # the same for equal values, and far apart for others
    if tie_break is None:
        key = first + order
        key.sort()
        return np.asarray(key - first)
    place = np.empty(n, dtype=np.intp)
    place[tie_break] = np.arange(n)
    key = first + place[order]
    key.sort()
    return np.asarray(tie_break[key - first])


def check_values(values: F64, weights: F64 | None) -> tuple[F64, F64 | None]:
    """Values without NaN and weights that are finite and >= 0, with the zero-weight values taken out.

    Equal weights come back as None, so that they take the exact unweighted way. Raises DiagnosisError.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or np.isnan(values).any():
        raise DiagnosisError(
            f"quantiles need one column of known values, got shape {values.shape} with "
            f"{int(np.isnan(values).sum())} NaN; drop the unknown ones first"
        )
    if weights is None:
        return values, None
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != values.shape or not np.isfinite(weights).all() or (weights < 0).any():
        raise DiagnosisError(
            f"weights must be finite, not negative, and one per value; got shape {weights.shape} for {values.shape}"
        )
    kept = weights > 0
    if not kept.all():
        values, weights = values[kept], weights[kept]
    if weights.size and weights.min() == weights.max():
        return values, None
    return values, weights
