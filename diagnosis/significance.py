"""Significance: can these two windows be told apart, and if not, how many requests would it take.

Idea: what counts is the interval of the *difference*, resampled in blocks because neighbouring requests share a queue.
A P99 stands on the few requests above it, so it is judged only when there are enough of them and enough separate
episodes: effective n = n times the extremal index. Otherwise the quantile gets no interval; the number needed is said.

Invariant: no interval is invented; `changed` needs an interval that excludes 0 and a change that matters.
Source: Ferro & Segers 2003 (extremal index); Politis & Romano 1992 (circular blocks); Siddiqui 1960 (density from
spacings of order statistics); Benjamini & Hochberg 1995.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from diagnosis.bootstrap import (
    Correlation,
    correlation,
    exceedances,
    high_values,
    iter_runs,
    repeat_counts,
    twice_through,
    widen,
)
from diagnosis.quantiles import (
    F64,
    Index,
    allowed_above,
    check_values,
    descending_order,
    kish,
    nearest_rank,
    parse_quantile,
    tail_indices,
)
from engine_probe.errors import BadWindow

MIN_EPISODES = 10
MIN_FOR_MEAN = 20
MIN_REPLICATES = 100
SPARSE = 20  # counting only the largest requests is worth it when they are fewer than one in so many


@dataclass(frozen=True, slots=True)
class Sufficiency:
    """Whether two windows carry a quantile; pairs are (baseline, suspect).

    n_needed: requests per window for a change of 20 %, said only where there are not enough.
    """

    n: tuple[int, int]
    n_effective: tuple[float, float]
    extremal: tuple[float, float]
    episodes: tuple[int, int]
    enough: bool
    one_sided: bool
    reason: str | None
    n_needed: int | None


@dataclass(frozen=True, slots=True)
class Significance:
    """The difference suspect - baseline of one quantile and of the mean, in seconds, and whether it is real.

    interval_95 is None where the windows do not carry the quantile. When `one_sided` it is (low, inf): it can show that
    things got worse, never that they got better. The mean has no interval below 20 requests. p_* are two-sided
    bootstrap p-values for whoever tests many things at once; blocks are block lengths in requests.
    """

    n: tuple[int, int]
    n_effective: tuple[float, float]
    extremal: tuple[float, float]
    episodes: tuple[int, int]
    enough: bool
    one_sided: bool
    reason: str | None
    n_needed: int | None
    delta_s: float
    interval_95: tuple[float, float] | None
    delta_mean_s: float
    mean_interval_95: tuple[float, float] | None
    changed: bool
    changed_mean: bool
    p_quantile: float | None = None
    p_mean: float | None = None
    replicates: int = 0
    blocks: tuple[int, int] = (1, 1)


def compare(
    base: F64,
    suspect: F64,
    q: str,
    *,
    w_base: F64 | None = None,
    w_suspect: F64 | None = None,
    replicates: int = 400,
    seed: int = 0,
    min_relative: float = 0.10,
    repeat_base: npt.NDArray[np.generic] | None = None,
    repeat_suspect: npt.NDArray[np.generic] | None = None,
    block: int | None = None,
) -> Significance:
    """Compare a quantile and the mean of two windows by a block bootstrap of their difference.

    base [n_b], suspect [n_s] seconds in arrival order, no NaN; weights as from `comparability.common_mix`; repeat_*
    name the repeat of each request where an arm was run several times; block overrides the block length, in requests.
    `changed` asks for an interval without 0 and a change of at least min_relative of the baseline's value. Above 50,000
    requests fewer replicates are drawn (`Significance.replicates`). Raises BadWindow when a window holds no request.
    """
    windows = [
        _Window(base, w_base, "baseline", q, repeat_base, block),
        _Window(suspect, w_suspect, "suspect", q, repeat_suspect, block),
    ]
    facts = _sufficiency(windows, q)
    replicates = affordable_replicates(replicates, sum(facts.n)) if min(facts.n) > 1 else 0
    drawn = [window.replicate(q, replicates, derived_seed(seed, side)) for side, window in enumerate(windows)]
    num_blocks = min(window.num_blocks for window in windows)
    missed = max(window.missed for window in windows)
    delta = windows[1].quantile - windows[0].quantile
    delta_mean = windows[1].mean - windows[0].mean
    interval = mean_interval = p_quantile = p_mean = None
    if replicates > 0 and facts.enough:
        differences = widen(drawn[1][0] - drawn[0][0], num_blocks, missed)
        interval, p_quantile = interval_95(differences, one_sided=facts.one_sided), p_value(differences)
    if replicates > 0 and min(facts.n) >= MIN_FOR_MEAN:
        differences = widen(drawn[1][1] - drawn[0][1], num_blocks, missed)
        mean_interval, p_mean = interval_95(differences), p_value(differences)
    return Significance(
        n=facts.n,
        n_effective=facts.n_effective,
        extremal=facts.extremal,
        episodes=facts.episodes,
        enough=facts.enough,
        one_sided=facts.one_sided,
        reason=facts.reason,
        n_needed=facts.n_needed,
        delta_s=delta,
        interval_95=interval,
        delta_mean_s=delta_mean,
        mean_interval_95=mean_interval,
        changed=_matters(interval, delta, windows[0].quantile, min_relative),
        changed_mean=_matters(mean_interval, delta_mean, windows[0].mean, min_relative),
        p_quantile=p_quantile,
        p_mean=p_mean,
        replicates=replicates,
        blocks=(windows[0].correlation.block, windows[1].correlation.block),
    )


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

    Arguments as for `compare`; correlations spares working them out again.
    """
    known = correlations or (None, None)
    windows = [
        _Window(base, w_base, "baseline", q, known=known[0]),
        _Window(suspect, w_suspect, "suspect", q, known=known[1]),
    ]
    return _sufficiency(windows, q)


def extremal_index(values: F64, q: str) -> float:
    """Share of exceedances that start a new cluster, in (0, 1]: 1 for an independent tail, 1/k in clusters of k.

    values [n] in arrival order. Intervals estimator on `high_values`; with fewer than four exceedances the runs
    estimator (clusters / exceedances); 1 with at most one exceedance.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size == 0:
        return 1.0
    at = np.flatnonzero(high_values(values, q))
    if at.size <= 1:
        return 1.0
    if at.size < 4:
        return _clusters(at, max(correlation(values, q).lag, 1)) / at.size
    gaps = np.diff(at).astype(np.float64)
    if gaps.max() <= 2:
        top, bottom = 2.0 * gaps.sum() ** 2, gaps.size * (gaps * gaps).sum()
    else:
        top, bottom = 2.0 * (gaps - 1).sum() ** 2, gaps.size * ((gaps - 1) * (gaps - 2)).sum()
    return float(min(1.0, max(top / bottom, 1.0 / at.size)))


def tail_episodes(values: F64, q: str, lag: int | None = None) -> int:
    """Separate clusters of requests above the quantile; two belong together while exceedances are still correlated.

    values [n] in arrival order; lag overrides how far apart, in requests, two of them still belong together.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size == 0:
        return 0
    at = np.flatnonzero(exceedances(values, allowed_above(values.size, q)))
    return _clusters(at, correlation(values, q).lag if lag is None else lag)


def required_n(q: str, sided: int = 1) -> int:
    """Smallest n at which the extreme order statistic bounds the quantile: P99 needs 299 one-sided, 368 two-sided.

    Exact, in whole numbers: the smallest n with max(q, 1-q)^n <= 0.05 (one-sided) or <= 0.025 (each side of two).
    """
    exact = parse_quantile(q)
    exact = max(exact, 1 - exact)
    if exact == 1:
        return int(np.iinfo(np.int64).max)  # no number of requests bounds a maximum
    one_in = 20 if sided == 1 else 40
    n = max(1, math.floor(math.log(1.0 / one_in) / math.log(float(exact))) - 1)
    while exact.numerator**n * one_in > exact.denominator**n:
        n += 1
    return n


def n_for_change(values: F64, q: str, change: float = 0.2, power: float = 0.9) -> int:
    """Requests each window needs to see the quantile change by `change` (a ratio) at 95 % with the given power.

    n = (z_0.975 + z_power)^2 * (1 + (1 + c)^2) q (1-q) / (f^2 theta d^2): c the change as a ratio and d in seconds (a
    window that got slower by c also scatters more by c), theta the extremal index, f the density at the quantile from
    the spacing of order statistics one standard deviation of the rank to either side. Never below what any interval
    needs: `required_n` and ten tail episodes, each divided by theta.
    """
    values, _ = check_values(values, None)
    exact = parse_quantile(q)
    theta = extremal_index(values, q)
    episodes = MIN_EPISODES / float(1 - exact) if exact < 1 else 0.0
    floor = math.ceil(max(required_n(q, 2), episodes) / theta)
    n = values.size
    if n < 2:
        return floor
    ordered = np.sort(values)
    rank = n - 1 - allowed_above(n, q)
    spread = float(exact * (1 - exact))
    reach = max(1, round(math.sqrt(n * spread)))
    low, high = max(rank - reach, 0), min(rank + reach, n - 1)
    density_inverse = n * float(ordered[high] - ordered[low]) / (high - low)
    step = change * abs(float(ordered[rank]))
    if step <= 0.0:
        return floor
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(power)
    scatter = min(density_inverse / step, 1e9)  # beyond that no window is long enough, and squares stay finite
    return max(floor, math.ceil(z**2 * (1.0 + (1.0 + change) ** 2) * spread * scatter**2 / theta))


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
    normal = 2.0 * NormalDist().cdf(-abs(float(differences.mean())) / spread) if spread > 0.0 else 0.0
    return float(min(max(normal, 1e-12), 2.0 / differences.size))


def false_discoveries(p_values: F64, alpha: float = 0.05) -> npt.NDArray[np.bool_]:
    """Which of many p-values [m] stand when at most a share alpha of those called real may be false."""
    p_values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p_values, kind="stable")
    passes = np.flatnonzero(p_values[order] <= alpha * np.arange(1, p_values.size + 1) / max(p_values.size, 1))
    real = np.zeros(p_values.size, dtype=np.bool_)
    real[order[: passes[-1] + 1 if passes.size else 0]] = True
    return real


def affordable_replicates(wanted: int, n: int) -> int:
    """Replicates worth their time: all that were wanted up to 50,000 requests, then fewer, but at least 100."""
    return min(wanted, max(MIN_REPLICATES, int(wanted * 50_000 / max(n, 50_000))))


def derived_seed(seed: int, stream: int) -> int:
    """A seed of its own for each stream of randomness that hangs on one seed."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])


class _Window:
    """One window's values in arrival order, with what sufficiency and the bootstrap need to know of them."""

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
        self.name = name
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
        self.correlation = known or correlation(self.values, q)
        if block is not None:
            self.correlation = Correlation(self.correlation.lag, block)
        self.num_blocks, self.missed = self.values.size / self.correlation.block, self.correlation.missed
        if self.repeats is not None:
            self.num_blocks, self.missed = float(np.unique(self.repeats).size), 1.0
        self.extremal = extremal_index(self.values, q)
        self.episodes = tail_episodes(self.values, q, self.correlation.lag)
        self.effective = self.extremal * (float(self.values.size) if self.weights is None else kish(self.weights))

    def replicate(self, q: str, replicates: int, seed: int) -> tuple[F64, F64]:
        """Quantile and mean of each replicate, [replicates] each."""
        order = descending_order(self.values)
        quantiles, means = [np.empty(0)], [np.empty(0)]
        weights = np.ones(order.size) if self.weights is None else self.weights
        if self.repeats is not None:
            mass = repeat_counts(self.repeats, replicates, seed) * weights
            return self._quantiles(mass[:, order], order, q), (mass * self.values).sum(axis=1) / mass.sum(axis=1)
        mass_through, value_through = twice_through(weights), twice_through(weights * self.values)
        # Only the largest are needed; twice the tail and some spare nearly always suffices, else all are looked at.
        top = order[: 2 * allowed_above(order.size, q) + 200]
        for runs in iter_runs(order.size, self.correlation.block, replicates, seed):
            total = runs.sums(mass_through)
            counts = runs.counts_at(top) if top.size * SPARSE < order.size else runs.counts()[:, top]
            means.append(runs.sums(value_through) / total)
            quantiles.append(
                self._quantiles(counts * weights[top], order, q, total)
                if top.size < order.size
                else self._quantiles(counts * weights[top], order, q)
            )
            if np.isnan(quantiles[-1]).any():
                quantiles[-1] = self._quantiles((runs.counts() * weights)[:, order], order, q)
        return np.concatenate(quantiles), np.concatenate(means)

    def _quantiles(self, mass: F64, order: Index, q: str, total: F64 | None = None) -> F64:
        """Quantile of each row of masses [rows, m] of the m largest values; NaN where the tail reaches beyond them."""
        whole = self.weights is None
        index = tail_indices(
            mass.astype(np.int64) if whole else mass,
            q,
            None if total is None else total.astype(np.int64) if whole else total,
        )
        found = self.values[order[np.minimum(index, order.size - 1)]]
        return np.where(index < mass.shape[1], found, np.nan)


def _clusters(at: Index, lag: int) -> int:
    """Runs of positions, two neighbours in one run when at most `lag` apart; 0 for no position."""
    return int(min(at.size, 1) + np.count_nonzero(np.diff(at) > lag))


def _sufficiency(windows: list[_Window], q: str) -> Sufficiency:
    base, suspect = windows
    one, two = required_n(q, 1), required_n(q, 2)
    reason = next(filter(None, (_missing(window, q, one, two) for window in windows)), None)
    return Sufficiency(
        n=(base.values.size, suspect.values.size),
        n_effective=(base.effective, suspect.effective),
        extremal=(base.extremal, suspect.extremal),
        episodes=(base.episodes, suspect.episodes),
        enough=reason is None,
        one_sided=reason is None and min(base.effective, suspect.effective) < two,
        reason=reason,
        n_needed=None if reason is None else max(n_for_change(window.values, q) for window in windows),
    )


def _missing(window: _Window, q: str, one: int, two: int) -> str | None:
    what = f"the {window.name} window's {window.values.size:,} requests"
    if window.effective < one:
        return (
            f"{what} count as {window.effective:,.0f} independent ones; "
            f"quantile {q} needs {one:,} for a bound and {two:,} for an interval"
        )
    if window.episodes < MIN_EPISODES:
        return f"{what} hold {window.episodes} separate tail episodes at quantile {q}; comparing needs {MIN_EPISODES}"
    return None


def _matters(interval: tuple[float, float] | None, delta: float, reference: float, min_relative: float) -> bool:
    if interval is None or delta == 0.0:
        return False
    excludes_zero = interval[0] > 0.0 or interval[1] < 0.0
    return excludes_zero and abs(delta) >= min_relative * abs(reference)
