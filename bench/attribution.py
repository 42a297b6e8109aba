"""How long attribution and comparison take, beside one sort of the same totals in the same run.

Targets: 1,250 requests in 6 groups with 200 replicates, and 100,000 requests in 5 groups with fewer, each in about a
second on one core. `run()` returns seconds and ratios; ratios travel between machines, seconds do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from diagnosis.attribution.shapley import attribute
from diagnosis.statistics.comparability import common_mix
from diagnosis.statistics.significance import compare

CASES = ((1_250, 6), (10_000, 6), (100_000, 5))
ROUNDS = 3


def run() -> dict[str, Any]:
    """Best of three of each: attribution, weighted attribution, comparison, common mix, by number of requests."""
    return {f"{n:,} requests, {groups} groups": _case(n, groups) for n, groups in CASES}


def _case(n: int, groups: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    names = [f"cause_{k}" for k in range(groups)]
    base = rng.exponential(1.0, (n, groups))
    suspect = rng.exponential(1.0 + 0.2 * np.arange(groups), (n, groups))
    weights = rng.uniform(0.5, 2.0, n)
    mixes = [
        {
            "prompt_tokens": np.round(rng.lognormal(mean, 1.0, n)),
            "tenant": rng.choice(["a", "b", "c"], n).astype(object),
        }
        for mean in (7.0, 7.2)
    ]
    replicates = attribute(names, base, suspect, "0.99").replicates
    total_b, total_s = base.sum(axis=1), suspect.sum(axis=1)
    seconds = {
        "attribute": _best(lambda: attribute(names, base, suspect, "0.99")),
        "attribute_weighted": _best(
            lambda: attribute(names, base, suspect, "0.99", w_base=weights, w_suspect=weights[::-1])
        ),
        "compare": _best(lambda: compare(total_b, total_s, "0.99")),
        "common_mix": _best(lambda: common_mix(mixes[0], mixes[1])),
    }
    sort = _best(lambda: np.sort(total_s))
    return {
        "replicates": replicates,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "sorts_per_replicate": round(seconds["attribute"] / sort / replicates, 1),
    }


def _best(work: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    import json

    print(json.dumps(run(), indent=2))
