"""Nearest-rank percentiles with exact arithmetic, and the interval that goes with them.

Definition (design section 4): the ceil(q*N)-th smallest of N values. q is a decimal string, never a float: 0.07 * 100
is 7.000000000000001 in binary and would give rank 8. The SQL form is DuckDB's `quantile_disc` with q as a DECIMAL, for
which DuckDB computes N - floor((N*10^s - N*q*10^s) / 10^s) in integers, that is ceil(q*N) (1.5; a property test
compares the two). Interval: order statistics (David and Nagaraja, Order Statistics, section 7.1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from engine_probe.errors import UsageError

_DECIMAL = re.compile(r"0?\.\d{1,15}|1(?:\.0{1,15})?")


def parse_quantile(q: str) -> Fraction:
    """The exact value of a decimal string with 0 < q <= 1; UsageError for anything else."""
    if not isinstance(q, str) or not _DECIMAL.fullmatch(q) or (value := Fraction(q)) <= 0:
        raise UsageError(f"{q!r} is no quantile. Give a decimal above 0 and up to 1 as text, such as 0.99.", value=q)
    return value


def rank_index(n: int, q: str) -> int:
    """Rank (1-based) of the q-quantile of `n` values: ceil(q*n). ValueError where there are no values."""
    if n < 1:
        raise ValueError(f"a rank needs at least one value, not {n}")
    return math.ceil(parse_quantile(q) * n)


def nearest_rank(values: Iterable[Any], q: str) -> float | None:
    """The q-quantile of the values that are known (None is left out); None where none is."""
    if isinstance(values, np.ndarray):
        known = values[~np.isnan(values)].astype(np.float64) if values.dtype.kind == "f" else values.astype(np.float64)
    else:
        known = np.asarray([value for value in values if value is not None], dtype=np.float64)
    if known.size == 0:
        parse_quantile(q)
        return None
    rank = rank_index(int(known.size), q)
    return float(np.partition(known, rank - 1)[rank - 1])


def quantile_sql(expression: str, q: str) -> str:
    """SQL aggregate: the q-quantile of `expression` by nearest rank, nulls left out, null where nothing is known."""
    parse_quantile(q)
    digits = q.partition(".")[2] or "0"
    whole = "1" if q.startswith("1") else "0"
    return f"quantile_disc({expression}, {whole}.{digits}::DECIMAL({len(digits) + 1}, {len(digits)}))"


def quantiles_sql(expression: str, quantiles: Sequence[str]) -> str:
    """SQL aggregate: a list with each of the quantiles, as `quantile_sql` gives them one by one, from one sort."""
    digits = []
    for q in quantiles:
        parse_quantile(q)
        digits.append(("1" if q.startswith("1") else "0", q.partition(".")[2]))
    scale = max([1, *(len(fraction) for _, fraction in digits)])
    decimals = [f"{whole}.{fraction.ljust(scale, '0')}::DECIMAL({scale + 1}, {scale})" for whole, fraction in digits]
    return f"quantile_disc({expression}, [{', '.join(decimals)}])"


def weighted_rank(values: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], q: str) -> float | None:
    """The nearest rank by weight: the smallest value whose cumulative weight reaches q of the total; None without values.

    values [n], any order; weights [n] above 0. Equal weights give exactly the unweighted nearest rank.
    """
    if len(values) == 0:
        return None
    order = np.argsort(values, kind="stable")
    if weights.min() == weights.max():
        return float(values[order[rank_index(len(values), q) - 1]])
    through = np.cumsum(weights[order])
    # the sum is rounded, and a rounding must not push the rank to the next value
    reached = float(parse_quantile(q)) * through[-1] * (1.0 - 4 * np.finfo(np.float64).eps * max(len(values), 64))
    return float(values[order[min(int(np.searchsorted(through, reached, side="left")), len(values) - 1)]])


@lru_cache(maxsize=4096)
def rank_interval(n: int, q: str, confidence: str = "0.95") -> tuple[int | None, int | None]:
    """Ranks (1-based) whose values bound the q-quantile, each side missed with at most (1 - confidence) / 2.

    For independent values. None on a side where no rank is safe: the upper bound of P99 needs 368 values at 0.95.
    """
    if n < 1:
        return None, None
    share = float(parse_quantile(q))
    miss = float((1 - parse_quantile(confidence)) / 2)
    if share == 1.0:
        return None, None
    below = _binomial_cdf(n, share)
    # The number of values under the true quantile is binomial: rank r lies above it with probability cdf(r - 1) and
    # below it with probability 1 - cdf(r - 1).
    lower = int(np.searchsorted(below, miss, side="right"))
    upper = int(np.searchsorted(below, 1.0 - miss, side="left")) + 1
    return (lower if lower >= 1 else None), (upper if upper <= n else None)


def _binomial_cdf(n: int, p: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """P(X <= k) for k = 0..n of a binomial, from its logarithms; entries far from the mean are 0 or 1."""
    spread = 12 * math.sqrt(n * p * (1 - p)) + 12
    first, last = max(0, math.floor(n * p - spread)), min(n, math.ceil(n * p + spread))
    k = np.arange(first, last + 1)
    log_mass = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])
    log_mass += k * math.log(p) + (n - k) * math.log1p(-p)
    cdf = np.ones(n + 1)
    cdf[:first] = 0.0
    cdf[first : last + 1] = np.minimum(np.cumsum(np.exp(log_mass)), 1.0)
    return cdf
