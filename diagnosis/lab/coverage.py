"""Whether the 95 % interval of the change of P99 holds the true change 95 times in 100, on processes whose truth is known.

Waits of a queue (Lindley's recursion) whose arrivals are independent, come in bursts, or whose service drifts slowly; the true
P99 of each comes from a run of millions. Where the window is short against the time over which requests depend on each other, no
interval is right but none: then the share of windows that are refused is what counts. The bounds are those of the project's
design: 93 to 99 % on independent requests, at least 90 % with a correlation time up to 1/50 of the window, at least 88 % on bursts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diagnosis.statistics.quantiles import F64, nearest_rank
from diagnosis.statistics.significance import compare

Draw = Callable[[np.random.Generator, int], F64]
SLOWER = 1.3
"""Times the baseline's latency that every suspect window has: the change of P99 is then known exactly."""
MOST_REFUSED = 0.5
FEW = 10
"""Intervals of which no share can be told."""
MANY = 2_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """A process, windows of n requests, and what must hold.

    low, high   share of the intervals that hold the true change; None: the windows are too short, and must be refused
    quantile    whose change is judged
    """

    name: str
    draw: Draw
    n: int
    quantile: str
    low: float | None
    high: float = 1.0


def independent(rng: np.random.Generator, n: int) -> F64:
    """Lognormal latencies, one independent of the other."""
    return np.asarray(rng.lognormal(0.0, 0.7, n))


def correlated(time: float) -> Draw:
    """Lognormal latencies whose logarithm forgets by a factor e in `time` requests (AR(1))."""

    def draw(rng: np.random.Generator, n: int) -> F64:
        keep = float(np.exp(-1.0 / time))
        noise = rng.normal(size=n) * np.sqrt(1 - keep * keep)
        noise[0] = rng.normal()
        return np.asarray(np.exp(0.7 * _recursive(noise, keep)))

    return draw


def bursty_queue(burst_ratio: float = 1.6, burst_calls: float = 40.0, load: float = 0.5) -> Draw:
    """Waits plus services of one server whose calls come in bursts: half of them at `burst_ratio` times the mean rate.

    burst_calls   calls of a burst, on average (its length is exponential)
    """

    def draw(rng: np.random.Generator, n: int) -> F64:
        warm = 2000
        total = n + warm
        in_burst = _phases(rng, total, burst_calls)
        quiet = 1 / (2 - 1 / burst_ratio)
        gaps = rng.exponential(1.0, total) / np.where(in_burst, burst_ratio, quiet)
        services = rng.exponential(load, total)
        steps = np.concatenate([[0.0], services[:-1] - gaps[1:]])
        walk = np.cumsum(steps)
        waits = walk - np.minimum.accumulate(np.minimum(walk, 0.0))
        return np.asarray((waits + services + 0.1)[warm:])

    return draw


CASES: Sequence[Case] = (
    Case("independent", independent, 2000, "0.99", 0.93, 0.99),
    Case("correlation time 1/400 of the window", correlated(20), 8000, "0.99", 0.90),
    Case("correlation time 1/50 of the window", correlated(80), 4000, "0.99", 0.90),
    Case("correlation time 1/50 of the window", correlated(80), 4000, "0.9", 0.90),
    Case("bursts of 20 calls", bursty_queue(burst_calls=20.0), 20_000, "0.99", 0.88),
    Case("bursts of 40 calls", bursty_queue(), 6000, "0.95", 0.88),
    Case("correlation time 1/5 of the window", correlated(800), 4000, "0.99", None),
)
"""With a correlation time of 1/50 of its length no window has ten separate episodes beyond P99, whatever its length: there the
interval must be right or refused, and a lower quantile shows that it is right where it is given."""


def check(
    pairs: int = 200, seed: int = 1, tell: Callable[[str], None] = lambda text: None, cases: Sequence[Case] = CASES
) -> dict[str, Any]:
    """A row a case: share of intervals that hold the true change, of windows refused, and whether the bound is met.

    A bound is taken as met where the share lies within two standard errors of it: `pairs` are few.
    """
    return {
        "pairs": pairs,
        "seed": seed,
        "cases": [_checked(case, pairs, seed, tell) for case in cases],
    }


def render(document: dict[str, Any]) -> str:
    """A line a case."""
    lines = [f"95 % interval of the change of a quantile, {document['pairs']} pairs of windows each"]
    for row in document["cases"]:
        covered = "-" if row["coverage"] is None else f"{row['coverage']:.1%}"
        wanted = "refused" if row["low"] is None else f"{row['low']:.0%} to {row['high']:.0%}"
        verdict = "met" if row["met"] else "MISSED"
        lines.append(
            f"  {row['case']:37} n {row['n']:>6,}  quantile {row['quantile']:4}  holds {covered:>6} (wanted {wanted})  refused {row['refused']:.0%}  {verdict}"
        )
    return "\n".join(lines)


def _checked(case: Case, pairs: int, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    tell(f"{case.name}: {pairs} pairs")
    truth = (SLOWER - 1.0) * nearest_rank(case.draw(np.random.default_rng([seed, 7]), MANY), case.quantile)
    held = 0
    judged = 0
    for number in range(pairs):
        rng = np.random.default_rng([seed, number, case.n])
        found = compare(
            case.draw(rng, case.n),
            SLOWER * case.draw(rng, case.n),
            case.quantile,
            replicates=200,
            seed=number,
            min_relative=0.0,
        )
        if found.interval_95 is None:
            continue
        judged += 1
        low, high = found.interval_95
        held += low <= truth <= high
    refused = 1.0 - judged / pairs
    coverage = held / judged if judged else None
    return {
        "case": case.name,
        "quantile": case.quantile,
        "n": case.n,
        "coverage": coverage,
        "refused": refused,
        "low": case.low,
        "high": case.high,
        "met": _is_met(case, coverage, judged, refused),
    }


def _is_met(case: Case, coverage: float | None, judged: int, refused: float) -> bool:
    if case.low is None:
        return refused >= 1.0 - MOST_REFUSED
    if coverage is None or judged < FEW:
        return refused >= 1.0 - MOST_REFUSED
    margin = 2.0 * float(np.sqrt(case.low * (1 - case.low) / judged))
    return bool(case.low - margin <= coverage <= case.high + margin)


def _phases(rng: np.random.Generator, n: int, mean_calls: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[n] whether each call is of a burst: stretches of exponential length, burst and quiet by turns."""
    lengths = np.maximum(1, rng.exponential(mean_calls, 2 + int(4 * n / mean_calls)).astype(np.int64))
    while lengths.sum() < n:
        lengths = np.concatenate([lengths, lengths])
    turns = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return np.asarray(turns[:n])


def _recursive(noise: F64, keep: float) -> F64:
    """x[t] = keep * x[t-1] + noise[t], in stretches short enough for the powers of `keep`."""
    out = np.empty_like(noise)
    stretch = max(1, min(len(noise), int(200 / max(-np.log(keep), 1e-9))))
    last = 0.0
    for start in range(0, len(noise), stretch):
        part = noise[start : start + stretch]
        powers = keep ** np.arange(1, len(part) + 1)
        out[start : start + stretch] = powers * (last + np.cumsum(part / powers))
        last = float(out[start + len(part) - 1])
    return out
