"""What is read off bootstrap draws: an interval, a p-value, and which of many p-values stand.

Invariant: an interval and a p-value of the same draws agree about 0, up to the rounding of a quantile.
Source: Efron & Tibshirani 1993 (percentile interval); Benjamini & Hochberg 1995 (false discoveries).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from diagnosis.statistics.quantiles import F64

FALSE_DISCOVERIES = 0.05
"""Most of the differences called real, among many looked at together, that may be chance."""


def interval_95(draws: F64, *, one_sided: bool = False) -> tuple[float, float]:
    """Percentile interval of bootstrap draws [replicates]; one-sided: (5 % point, inf)."""
    if one_sided:
        return float(np.quantile(draws, 0.05)), math.inf
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def p_value(differences: F64) -> float:
    """Two-sided bootstrap p-value of "no difference", from draws of the difference.

    Twice the smaller share on either side of 0; where no draw crosses 0, the normal tail, at most 2 / draws.
    """
    crossed = min(np.count_nonzero(differences <= 0.0), np.count_nonzero(differences >= 0.0))
    if crossed > 0:
        return float(min(1.0, 2.0 * crossed / differences.size))
    spread = float(differences.std())
    normal = normal_p(float(differences.mean()), spread) if spread > 0.0 else 0.0
    return float(min(max(normal, 1e-12), 2.0 / differences.size))


def normal_p(difference: float, spread: float) -> float:
    """Two-sided p-value of a difference with a normal error of that standard deviation; 1 where neither is above 0."""
    if spread <= 0.0:
        return 1.0 if difference == 0.0 else 0.0
    return 2.0 * NormalDist().cdf(-abs(difference) / spread)


def student_p(t: float, freedom: int) -> float:
    """Two-sided p-value of Student's t with 1 or more degrees of freedom. Source: Abramowitz & Stegun 26.7.3 and 26.7.4."""
    if not math.isfinite(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, cosine) if freedom % 2 else (1.0, 1.0)
    for power in range(freedom % 2 + 2, freedom - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    if freedom == 1:
        total = 0.0
    inside = 2.0 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return min(max(1.0 - inside, 0.0), 1.0)


def false_discoveries(p_values: Sequence[float] | F64, alpha: float = FALSE_DISCOVERIES) -> list[bool]:
    """Which of many p-values [m] stand when at most a share alpha of those called real may be false.

    The k smallest stand, for the largest k whose k-th smallest is at most alpha k / m.
    """
    found = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(found, kind="stable")
    passes = np.flatnonzero(found[order] <= alpha * np.arange(1, found.size + 1) / max(found.size, 1))
    real = np.zeros(found.size, dtype=np.bool_)
    real[order[: passes[-1] + 1 if passes.size else 0]] = True
    return [bool(stands) for stands in real]


def derived_seed(seed: int, stream: int) -> int:
    """A seed of its own for each stream of randomness that hangs on one seed."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])
