"""Whose steps take longer than those of the same shape at the others.

Seconds of a worker's steps over those that steps of the same shape took at the others, in CHUNKS parts of the interval: a one-sided t test
of the logarithms against the median of the others. Where too few steps of an interval have their like elsewhere, all of them count, against
what so much work takes there at most (`beyond`). Without steps the seconds of prompts share the rate with those of tokens (`decoding`)
in LONG intervals taken as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.facts import F64, I64, Bool
from diagnosis.hotspots.beyond import usual_beyond
from diagnosis.hotspots.decoding import answers, lost_share
from diagnosis.hotspots.harm import MIN_HARM
from diagnosis.hotspots.intervals import BY_TEST, INTERVAL_S, LONG
from diagnosis.hotspots.observed import Observed, Steps
from diagnosis.hotspots.usual import bucket, did_something, median_of_others, usual_of, usual_seconds

CHUNKS = 5
"""Parts of an interval whose scatter tells how sure a worker's pace is: `_t_tail` knows up to five."""
SLOWER = threshold(
    "hotspot_straggler.slower",
    least=0.15,
    unit="relative",
    says="how much longer a worker's steps take than the others' of the same shape, in an interval where that is no chance",
    why="machines of one kind differ by a few percent, and a router that goes by queues makes up for a tenth",
)
MIN_CHUNK_STEPS = 4
"""Steps of a part before it tells a pace."""
MIN_CHUNKS = 3
"""Parts of an interval that tell a pace before it is judged: of two nobody knows how they scatter."""


def pace(seen: Observed, num: int) -> tuple[F64, Bool]:
    """(slowness [num, K], slow [num, K]) by steps, else by the requests' own prefills."""
    nothing = np.full((num, seen.num_workers), np.nan), np.zeros((num, seen.num_workers), dtype=np.bool_)
    if seen.num_workers < 2:
        return nothing
    if seen.steps is not None:
        worker, at, took, usual = usual_seconds(seen.steps, seen.num_workers, seen.pool_of())
        return _paced(
            seen, worker, at, took, usual, num, INTERVAL_S, BY_TEST["pace"], beyond=partial(_beyond, seen, seen.steps)
        )
    served = seen.served
    used = (served.worker >= 0) & (served.computed_tokens > 0) & (served.prefill_s > 0)
    used &= np.isfinite(served.first_token_s)
    worker, at = served.worker[used], served.first_token_s[used]
    took = served.prefill_s[used]
    usual = usual_of(worker, bucket(served.computed_tokens[used]), took, seen.num_workers, seen.pool_of())
    return _paced(seen, worker, at, took, usual, num, INTERVAL_S, BY_TEST["pace"] / 2)


def _beyond(seen: Observed, steps: Steps, asked: Bool) -> F64:
    return usual_beyond(steps, did_something(steps), seen.pool_of(), asked)


def pace_of_answers(seen: Observed, num: int) -> tuple[F64, Bool]:
    """The same by the tokens of answers where no step was recorded: LONG intervals are one. Slow ones lost MIN_HARM of their time by it."""
    paced = answers(seen.served, seen.pool_of()) if seen.steps is None else None
    if paced is None:
        return np.full((num, seen.num_workers), np.nan), np.zeros((num, seen.num_workers), dtype=np.bool_)
    size = -(-num // LONG)
    slowness, slow = _paced(
        seen,
        paced.worker,
        paced.at_s,
        paced.took_s,
        paced.usual_s,
        size,
        LONG * INTERVAL_S,
        BY_TEST["pace"] / 2,
        least=0.0,
    )
    of = (paced.at_s / (LONG * INTERVAL_S)).astype(np.int64)
    for index, worker in np.argwhere(slow).tolist():
        inside = (of == index) & (paced.worker == worker)
        slow[index, worker] = lost_share(paced, inside) >= MIN_HARM
    return np.repeat(slowness, LONG, axis=0)[:num], np.repeat(slow, LONG, axis=0)[:num]


def _paced(
    seen: Observed,
    worker: I64,
    at: F64,
    took: F64,
    usual: F64,
    num: int,
    span_s: float,
    level: float,
    least: float = -math.inf,
    beyond: Callable[[Bool], F64] | None = None,
) -> tuple[F64, Bool]:
    """(slowness [num, K], slow [num, K]) of `num` spans, by what each of [m] took and usually takes.

    least   log of the pace that the others are taken to have at least: who has more to do than anybody has no usual to be quicker than
    beyond  what [m] usually take by a bound, of workers asked [K]: in spans that cannot be judged by what the others did just so
    """
    shape = num, CHUNKS, seen.num_workers
    cell = (at / span_s * CHUNKS).astype(np.int64)
    cell = np.where((cell >= 0) & (cell < num * CHUNKS), cell * seen.num_workers + worker, -1)
    logs = _logs(cell, took, usual, shape)
    others = median_of_others(logs, seen.pool_of())
    others = np.fmax(others, least) if np.isfinite(least) else others
    excess = logs - others
    told = np.isfinite(excess).sum(axis=1)
    alike = _mean(excess, told)
    if beyond is not None and (told < MIN_CHUNKS).any():
        every = np.bincount(cell[cell >= 0], minlength=math.prod(shape)).reshape(shape) >= MIN_CHUNK_STEPS
        lacks = (told < MIN_CHUNKS) & (every.sum(axis=1) >= MIN_CHUNKS)
        if lacks.any():
            bounded = _logs(cell, took, beyond(lacks.any(axis=0)), shape)
            excess = np.where(lacks[:, None], bounded, excess)
            told = np.isfinite(excess).sum(axis=1)
    mean = _mean(excess, told)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt(np.nansum(np.square(excess - mean[:, None]), axis=1) / (told - 1))
        t = mean / np.maximum(spread / np.sqrt(told), 1e-6)
        limits = np.array([t_limit(int(n), seen.num_workers, level) for n in range(CHUNKS + 1)])
        certain = (told >= MIN_CHUNKS) & (t >= limits[told])
        slow = certain & (np.expm1(mean) >= SLOWER.value)
    if (told >= MIN_CHUNKS).any():
        SLOWER.note(float(np.expm1(mean[certain]).max(initial=0.0)))
    # the bound says whether a worker is slow, steps that have their like elsewhere say how slow
    return np.exp(np.where(np.isfinite(alike), np.fmax(alike, mean), mean)), slow


def _mean(logs: F64, told: I64) -> F64:
    """[num, K] of what is told; not np.nanmean: its warning can only be kept quiet for all threads at once."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(logs, axis=1) / told)


def _logs(cell: I64, took: F64, usual: F64, shape: tuple[int, int, int]) -> F64:
    """[num, CHUNKS, K] log of seconds over usual ones, of the cells that tell it; `cell` [m] is flat, -1 outside."""
    inside = (cell >= 0) & np.isfinite(usual) & (usual > 0)
    flat, size = cell[inside], math.prod(shape)
    count = np.bincount(flat, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.bincount(flat, took[inside], size) / np.bincount(flat, usual[inside], size)
        return np.log(np.where(count >= MIN_CHUNK_STEPS, ratio, np.nan)).reshape(shape)


@lru_cache
def t_limit(told: int, workers: int, level: float = BY_TEST["pace"]) -> float:
    """One-sided t of `told` values that one of `workers` exceeds with the probability `level`."""
    if told < MIN_CHUNKS:
        return math.inf
    level /= workers
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, told - 1) > level else (low, middle)
    return high


def _t_tail(t: float, freedom: int) -> float:
    """P(T >= t) of Student's t with 2, 3 or 4 degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    if freedom % 2:  # 3
        inside = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle))
    else:
        term = math.sin(angle)
        inside = term if freedom == 2 else term * (1 + math.cos(angle) ** 2 / 2)
    return (1 - inside) / 2
