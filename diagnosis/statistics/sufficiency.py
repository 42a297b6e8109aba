"""Do two windows carry a quantile, and if not, how many requests would it take?

Idea: a P99 stands on the few requests above it, so it is judged only where there are enough of them and enough separate
episodes: effective n = n times the extremal index. Otherwise the quantile gets no interval; the number needed is said,
unless no window could ever hold so many.

Source: Siddiqui 1960 (density from spacings of order statistics).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from statistics import NormalDist

import numpy as np

from diagnosis.statistics.bootstrap import Correlation
from diagnosis.statistics.episodes import extremal_index
from diagnosis.statistics.quantiles import F64, allowed_above, check_values, parse_quantile
from diagnosis.statistics.sample import Sample

MIN_EPISODES = 10
"""Tail episodes of either window: of fewer, one episode more or less moves the quantile."""
MOST_REQUESTS = 10**9
"""No window holds more: where more would be needed, no number is given."""
ONE_IN = {1: 20, 2: 40}
"""One chance in so many that the extreme order statistic fails to bound: 5 % on one side, 2.5 % on each of two."""


@dataclass(frozen=True, slots=True)
class Sufficiency:
    """Whether two windows carry a quantile; pairs are (baseline, suspect).

    n_needed: requests per window for a change of 20 %, said only where there are not enough; None too where it is more
    than any window holds.
    """

    n: tuple[int, int]
    n_effective: tuple[float, float]
    extremal: tuple[float, float]
    episodes: tuple[int, int]
    enough: bool
    one_sided: bool
    reason: str | None
    n_needed: int | None


def sufficient(
    base: F64,
    suspect: F64,
    q: str,
    *,
    w_base: F64 | None = None,
    w_suspect: F64 | None = None,
    correlations: tuple[Correlation, Correlation] | None = None,
) -> Sufficiency:
    """Whether two windows carry the quantile q: effective requests and separate tail episodes, and what is missing.

    Arguments as for `significance.compare`; correlations spares working them out again.
    """
    known = correlations or (None, None)
    return of_samples(
        Sample(base, w_base, "baseline", q, known=known[0]), Sample(suspect, w_suspect, "suspect", q, known=known[1])
    )


def of_samples(base: Sample, suspect: Sample) -> Sufficiency:
    """The same of two windows that were taken up before."""
    samples, q = (base, suspect), base.q
    one, two = required_n(q, 1), required_n(q, 2)
    reason = next(filter(None, (_missing(sample, one, two) for sample in samples)), None)
    needed = [n_for_change(sample.values, q) for sample in samples] if reason is not None else []
    known = [n for n in needed if n is not None]
    return Sufficiency(
        n=(base.values.size, suspect.values.size),
        n_effective=(base.effective, suspect.effective),
        extremal=(base.extremal, suspect.extremal),
        episodes=(base.episodes, suspect.episodes),
        enough=reason is None,
        one_sided=reason is None and two is not None and min(base.effective, suspect.effective) < two,
        reason=reason,
        n_needed=max(known) if known and len(known) == len(needed) else None,
    )


def required_n(q: str, sided: int = 1) -> int | None:
    """Smallest n at which the extreme order statistic bounds the quantile: P99 needs 299 one-sided, 368 two-sided.

    The smallest n with max(q, 1-q)^n <= 0.05 (one-sided) or <= 0.025 (each side of two), from logarithms of 60 digits: no
    power of q is exactly 1/20 or 1/40, so rounding cannot decide. None where it is more than MOST_REQUESTS: nothing
    bounds a maximum, and next to it nothing that fits into a window does.
    """
    exact = parse_quantile(q)
    outside = min(exact, 1 - exact)
    if outside <= 0:
        return None
    with localcontext(prec=60):
        share = 1 - Decimal(outside.numerator) / Decimal(outside.denominator)
        n = int((-Decimal(ONE_IN[sided]).ln() / share.ln()).to_integral_value(rounding="ROUND_CEILING"))
    return n if n <= MOST_REQUESTS else None


def n_for_change(values: F64, q: str, change: float = 0.2, power: float = 0.9) -> int | None:
    """Requests each window needs to see the quantile change by `change` (a ratio) at 95 % with the given power.

    n = (z_0.975 + z_power)^2 * (1 + (1 + c)^2) q (1-q) / (f^2 theta d^2): c the change as a ratio and d in seconds (a
    window that got slower by c also scatters more by c), theta the extremal index, f the density at the quantile from
    the spacing of order statistics one standard deviation of the rank to either side. Never below what any interval
    needs: `required_n` and ten tail episodes, each divided by theta. None where it is more than MOST_REQUESTS.
    """
    values, _ = check_values(values, None)
    exact = parse_quantile(q)
    least = required_n(q, 2)
    if least is None:
        return None
    theta = extremal_index(values, q)
    floor = math.ceil(max(least, MIN_EPISODES / float(1 - exact)) / theta)
    n = values.size
    needed = floor
    if n >= 2:
        ordered = np.sort(values)
        rank = n - 1 - allowed_above(n, q)
        spread = float(exact * (1 - exact))
        reach = max(1, round(math.sqrt(n * spread)))
        low, high = max(rank - reach, 0), min(rank + reach, n - 1)
        density_inverse = n * float(ordered[high] - ordered[low]) / (high - low)
        step = change * abs(float(ordered[rank]))
        if step > 0.0:
            z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(power)
            scatter = min(density_inverse / step, 1e9)  # squares stay finite; it is too many anyway
            needed = max(floor, math.ceil(z**2 * (1.0 + (1.0 + change) ** 2) * spread * scatter**2 / theta))
    return needed if needed <= MOST_REQUESTS else None


def _missing(sample: Sample, one: int | None, two: int | None) -> str | None:
    what = f"the {sample.name} window's {sample.values.size:,} requests"
    if one is None or two is None:
        return (
            f"quantile {sample.q} needs more than {MOST_REQUESTS:,} requests for a bound, and {what} are all there are"
        )
    if sample.effective < one:
        return (
            f"{what} count as {sample.effective:,.0f} independent ones; "
            f"quantile {sample.q} needs {one:,} for a bound and {two:,} for an interval"
        )
    if sample.episodes < MIN_EPISODES:
        return f"{what} hold {sample.episodes} separate tail episodes at quantile {sample.q}; comparing needs {MIN_EPISODES}"
    return None
