"""Significance: can these two windows be told apart?

Idea: what counts is the interval of the *difference*, resampled in blocks because neighbouring requests share a queue. Where
the windows do not carry the quantile (`sufficiency.py`) it gets no interval.

Invariant: no interval is invented; `changed` needs an interval that excludes 0 and a change that matters. Windows that
change places change the sign of the difference and of its interval, and nothing else.
Source: Politis & Romano 1992 (circular blocks).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosis.statistics.bootstrap import widen
from diagnosis.statistics.draws import derived_seed, interval_95, p_value
from diagnosis.statistics.quantiles import F64
from diagnosis.statistics.sample import Sample
from diagnosis.statistics.sufficiency import of_samples

MIN_FOR_MEAN = 20
"""Requests of either window before an interval of the mean is given: bootstrap intervals of fewer are too narrow."""
MIN_REPLICATES = 100
"""Fewest replicates that a 95 % interval is read off."""


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
        Sample(base, w_base, "baseline", q, repeat_base, block),
        Sample(suspect, w_suspect, "suspect", q, repeat_suspect, block),
    ]
    facts = of_samples(windows[0], windows[1])
    replicates = affordable_replicates(replicates, sum(facts.n)) if min(facts.n) > 1 else 0
    drawn = [
        window.replicate(replicates, derived_seed(seed, stream))
        for window, stream in zip(windows, _streams(windows), strict=True)
    ]
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


def _streams(windows: Sequence[Sample]) -> tuple[int, int]:
    """A stream of randomness for each of two windows that it keeps when they change places."""
    first, second = (zlib.crc32(window.values.tobytes()) for window in windows)
    return (0, 1) if first <= second else (1, 0)


def affordable_replicates(wanted: int, n: int) -> int:
    """Replicates worth their time: all that were wanted up to 50,000 requests, then fewer, but at least 100."""
    return min(wanted, max(MIN_REPLICATES, int(wanted * 50_000 / max(n, 50_000))))


def _matters(interval: tuple[float, float] | None, delta: float, reference: float, min_relative: float) -> bool:
    if interval is None or delta == 0.0:
        return False
    excludes_zero = interval[0] > 0.0 or interval[1] < 0.0
    return excludes_zero and abs(delta) >= min_relative * abs(reference)
