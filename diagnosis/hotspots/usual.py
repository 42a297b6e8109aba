"""What a worker usually takes for work of one shape, and what is usual among the others: medians that one slow worker does not move."""

from __future__ import annotations

import numpy as np

from diagnosis.facts import F64, I64, Bool
from diagnosis.hotspots.observed import Steps


def did_something(steps: Steps) -> Bool:
    """[S] steps of a known worker that computed a prompt or an answer."""
    tokens = np.nan_to_num(steps.prefill_tokens) + np.nan_to_num(steps.decode_tokens)
    return np.asarray((steps.worker >= 0) & (steps.duration_s > 0) & (tokens > 0))


def usual_seconds(steps: Steps, workers: int, pool: I64) -> tuple[I64, F64, F64, F64]:
    """(worker, end, seconds, usual seconds of steps of the same shape) of the steps that did something."""
    prefill, decode = np.nan_to_num(steps.prefill_tokens), np.nan_to_num(steps.decode_tokens)
    used = did_something(steps)
    worker, took = steps.worker[used], steps.duration_s[used]
    shape = bucket(prefill[used]) * 256 + bucket(decode[used])
    return worker, steps.at_s[used], took, usual_of(worker, shape, took, workers, pool)


def bucket(amount: F64) -> I64:
    """Quarter octaves: amounts within 19 % of each other; 0 has its own."""
    return np.where(amount > 0, np.floor(4 * np.log2(np.maximum(amount, 1.0))).astype(np.int64) + 1, 0)


def usual_of(worker: I64, shape: I64, took: F64, workers: int, pool: I64) -> F64:
    """[m] what a worker takes for the same shape: the median of the workers' means, so that one that is slow moves nobody else's pace.

    NaN where no other worker of its pool [K] did it.
    """
    _, code = np.unique(shape * (int(pool.max(initial=0)) + 2) + pool[worker], return_inverse=True)
    num = int(code.max(initial=-1)) + 1
    cell = code * workers + worker
    count = np.bincount(cell, minlength=num * workers)
    means = np.where(count > 0, np.bincount(cell, took, num * workers) / np.maximum(count, 1), np.nan)
    means = means.reshape(num, workers)
    usual = np.where(np.isfinite(means).sum(axis=1) > 1, _median(means), np.nan)
    return np.asarray(usual[code])


def median_of_others(values: F64, pool: I64 | None = None) -> F64:
    """[..., K] median of the other workers' values, of the same pool [K]; of many workers one's own makes no difference."""
    if pool is not None and (pool != pool[0]).any():
        others = np.full(values.shape, np.nan)
        for mine in (np.flatnonzero(pool == code) for code in np.unique(pool)):
            others[..., mine] = median_of_others(values[..., mine])
        return others
    workers = values.shape[-1]
    if workers > 16:
        return np.broadcast_to(_median(values)[..., None], values.shape)
    return np.stack([_median(np.delete(values, k, axis=-1)) for k in range(workers)], axis=-1)


def _median(values: F64) -> F64:
    """Median of the last axis, NaN left out; NaN where nothing is left."""
    if not values.shape[-1]:
        return np.full(values.shape[:-1], np.nan)
    known = np.isfinite(values).sum(axis=-1)
    ranked = np.sort(values, axis=-1)  # NaN last
    low, high = (
        np.take_along_axis(ranked, at[..., None], axis=-1)[..., 0] for at in ((known - 1).clip(0) // 2, known // 2)
    )
    return np.where(known > 0, (low + high) / 2, np.nan)
