"""How often two windows of one process are called different: the table of docs/method.md, section 3.

Nominal 5 %. No materiality threshold, so that the interval alone is judged. `run(pairs)` returns shares by process;
`refused` is the share in which the quantile got no interval, and `changed` counts the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from diagnosis.statistics.quantiles import F64
from diagnosis.statistics.significance import compare

Draw = Callable[[np.random.Generator, int], F64]


def autoregressive(correlation: float) -> Draw:
    """Lognormal latencies whose logarithm is AR(1) with standard deviation 0.7."""

    def draw(rng: np.random.Generator, n: int) -> F64:
        memory = correlation ** np.arange(400)
        series = np.convolve(rng.normal(size=n + memory.size), memory)[memory.size : memory.size + n]
        return np.asarray(np.exp(0.7 * np.sqrt(1 - correlation**2) * series))

    return draw


def queue(load: float) -> Draw:
    """Waiting times of an M/M/1 queue plus 0.1: the walk of service less interarrival times above its lowest point."""

    def draw(rng: np.random.Generator, n: int) -> F64:
        warm_up = 2000
        steps = rng.exponential(load, n + warm_up) - rng.exponential(1.0, n + warm_up)
        walk = np.concatenate([[0.0], np.cumsum(steps)])
        return np.asarray((walk - np.minimum.accumulate(walk))[warm_up : warm_up + n] + 0.1)

    return draw


CASES: tuple[tuple[str, Draw, int, str], ...] = (
    ("independent exponential", lambda rng, n: rng.exponential(size=n), 300, "0.95"),
    ("independent exponential", lambda rng, n: rng.exponential(size=n), 1250, "0.99"),
    ("independent lognormal", lambda rng, n: rng.lognormal(size=n), 1250, "0.99"),
    ("independent Pareto(2.5)", lambda rng, n: rng.pareto(2.5, n) + 1.0, 1250, "0.99"),
    ("AR(1) 0.5", autoregressive(0.5), 1250, "0.95"),
    ("AR(1) 0.9", autoregressive(0.9), 2000, "0.95"),
    ("M/M/1 load 0.5", queue(0.5), 1250, "0.95"),
    ("M/M/1 load 0.8", queue(0.8), 2000, "0.95"),
)


def run(pairs: int = 200) -> dict[str, Any]:
    """Shares of `pairs` pairs that are called different, in blocks and one request by one."""
    return {f"{name}, {n:,} requests, quantile {q}": _case(draw, n, q, pairs) for name, draw, n, q in CASES}


def _case(draw: Draw, n: int, q: str, pairs: int) -> dict[str, float | None]:
    found, naive = [], []
    for seed in range(pairs):
        rng = np.random.default_rng([seed, n])
        base, suspect = draw(rng, n), draw(rng, n)
        found.append(compare(base, suspect, q, replicates=200, seed=seed, min_relative=0.0))
        naive.append(compare(base, suspect, q, replicates=200, seed=seed, min_relative=0.0, block=1))
    judged = [i for i, one in enumerate(found) if one.enough]
    return {
        "refused": 1.0 - len(judged) / pairs,
        "changed": _share([found[i].changed for i in judged]),
        "changed_one_by_one": _share([naive[i].changed for i in judged]),
        "mean_changed": _share([one.changed_mean for one in found]),
        "mean_changed_one_by_one": _share([one.changed_mean for one in naive]),
    }


def _share(called: list[bool]) -> float | None:
    return round(float(np.mean(called)), 3) if called else None


if __name__ == "__main__":
    import json

    print(json.dumps(run(), indent=2))
