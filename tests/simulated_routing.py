"""Fleets of first-come-first-served workers behind a router, as `hotspots` sees them: small, seeded, without a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnosis.hotspots.observed import Decisions, Observed, Served, Steps
from store.interface import Window

F64 = npt.NDArray[np.float64]
Pick = Callable[[int, F64, F64, np.random.Generator], int]
"""(number of the decision, seconds until each worker is free, requests it has not done, random numbers) -> worker."""
TOKEN_S = 1e-4


def least(values: F64, random: np.random.Generator) -> int:
    """Any of those that have the least."""
    return int(random.choice(np.flatnonzero(values == values.min())))


POLICIES: dict[str, Pick] = {
    "round_robin": lambda number, busy, has, random: number % len(busy),
    "random": lambda number, busy, has, random: int(random.integers(len(busy))),
    "least_loaded": lambda number, busy, has, random: least(has, random),
    "least_work": lambda number, busy, has, random: least(busy, random),
}
LENGTHS: dict[str, Callable[[np.random.Generator, int], F64]] = {
    "equal": lambda random, n: np.full(n, 1000.0),
    "exponential": lambda random, n: random.exponential(1000.0, n),
    "lognormal": lambda random, n: random.lognormal(6.0, 2.0, n),
    "pareto": lambda random, n: 200.0 * (1 + random.pareto(1.1, n)),
    "few_giants": lambda random, n: np.where(random.random(n) < 0.02, 50_000.0, 200.0),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """intervals of 10 s; per_interval requests in each; use: share of the workers' time; slow: {worker: times as long}."""

    workers: int
    pick: Pick
    lengths: Callable[[np.random.Generator, int], F64] = LENGTHS["exponential"]
    intervals: int = 6
    per_interval: int = 100
    use: float = 0.6
    noise: float = 0.1
    slow: tuple[tuple[int, float], ...] = ()
    tells_steps: bool = True
    tells_routes: bool = True
    policy: str = "least_loaded"


def simulate(fleet: Fleet, seed: int = 0) -> Observed:
    """The fleet's window. Each request is one step, of `noise` around its length; the mean length keeps `use` busy."""
    random = np.random.default_rng(seed)
    num, workers = fleet.intervals * fleet.per_interval, fleet.workers
    span_s = fleet.intervals * 10.0
    at = np.sort(random.random(num) * span_s)
    tokens = np.maximum(fleet.lengths(random, num), 1.0)
    tokens = np.maximum(np.round(tokens * fleet.use * workers * span_s / TOKEN_S / tokens.sum()), 1.0)
    took = tokens * TOKEN_S * np.exp(fleet.noise * random.standard_normal(num))
    factor = np.ones(workers)
    for worker, times in fleet.slow:
        factor[worker] = times
    free, chosen, begun = np.zeros(workers), np.zeros(num, dtype=np.int64), np.zeros(num)
    loads = np.zeros((num, workers), dtype=np.float32)
    ends: list[deque[float]] = [deque() for _ in range(workers)]
    has = np.zeros(workers)
    for row in range(num):
        busy = np.maximum(free - at[row], 0.0)
        for index, theirs in enumerate(ends):
            while theirs and theirs[0] <= at[row]:
                theirs.popleft()
                has[index] -= 1
        worker = fleet.pick(row, busy, has, random)
        loads[row], chosen[row] = has, worker
        begun[row] = max(free[worker], at[row])
        took[row] *= factor[worker]
        free[worker] = begun[row] + took[row]
        ends[worker].append(free[worker])
        has[worker] += 1
    return _observed(fleet, at, tokens, chosen, begun, took, loads)


def _observed(
    fleet: Fleet, at: F64, tokens: F64, chosen: np.ndarray, begun: F64, took: F64, loads: np.ndarray
) -> Observed:
    num, workers = len(at), fleet.workers
    ids = [f"r{row}" for row in range(num)]
    unknown = np.full((num, workers), np.nan, dtype=np.float32)
    done = begun + took
    nobody = np.full(num, -1, dtype=np.int64)
    order = np.lexsort((done, chosen))
    waiting = np.zeros(num)
    for worker in range(workers):
        mine = np.flatnonzero(chosen == worker)
        came, went = np.sort(at[mine]), np.sort(begun[mine])
        # in the state after the step that ends now, the next one has begun already
        waiting[mine] = np.searchsorted(came, done[mine], "right") - np.searchsorted(went, done[mine] + 1e-9, "right")
    steps = Steps(
        chosen[order],
        done[order],
        took[order],
        tokens[order],
        np.zeros(num),
        np.maximum(waiting[order], 0),
        np.ones(num),
    )
    return Observed(
        Window(run_id="simulated"),
        0,
        fleet.intervals * 10.0,
        tuple(f"w{index}" for index in range(workers)),
        (),
        (),
        (fleet.policy,) if fleet.tells_routes else (),
        Decisions(
            ids,
            at,
            chosen,
            np.arange(num),
            nobody,
            nobody,
            np.full(num, fleet.tells_routes),
            unknown,
            loads if fleet.tells_routes else unknown,
            -loads if fleet.tells_routes else unknown,
        ),
        Served(ids, chosen, at, begun, done, tokens, np.zeros(num), tokens, took),
        steps if fleet.tells_steps else None,
        fleet.tells_routes,
        "engine",
    )
