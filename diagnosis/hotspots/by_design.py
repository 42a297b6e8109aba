"""Workers that are slower all the time, and whose router knows it: other hardware, and no hotspot.

Three things tell it together: the pace was the same in the whole window, the router gave it less than the others, in requests and in tokens,
and what it gave lost next to nothing before the first token. Who became slow meanwhile, who gets as much as the others, and whom a router that
counts requests sends less only when its queue is long, is a straggler whatever the reason.
"""

from __future__ import annotations

import numpy as np

from diagnosis.facts import F64, Bool
from diagnosis.hotspots.harm import did_harm, did_harm_by_pace
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Borne, Regret


def slower_by_design(seen: Observed, regret: Regret, borne: Borne, slowness: F64, slow: Bool) -> F64:
    """[K] times as long as the others' that a worker's steps take by design, NaN of all others. slowness, slow [I, K]."""
    found = np.full(seen.num_workers, np.nan)
    for worker in np.flatnonzero(slow.any(axis=0)).tolist():
        logs = np.log(slowness[:, worker])
        usual = float(np.median(logs[slow[:, worker]]))
        # of a pace that came or went there are intervals nearer to the others' than to its own
        if (logs[np.isfinite(logs)] >= usual / 2).all():
            found[worker] = np.exp(usual)
    if not np.isfinite(found).any():
        return found
    whole, everybody = np.zeros(len(seen.decisions), dtype=np.int64), np.ones((1, seen.num_workers), dtype=np.bool_)
    harmed = did_harm(whole, seen.decisions.chosen, borne, 1, seen.num_workers)[0]
    harmed |= did_harm_by_pace(seen, whole, regret, everybody)[0]
    knows = np.zeros(seen.num_workers, dtype=np.bool_)
    for worker in np.flatnonzero(np.isfinite(found) & ~harmed).tolist():
        others = (seen.pool_of() == seen.pool_of()[worker]) & np.isnan(found)
        given = max(_given(seen, amount, worker, others) for amount in (np.ones(len(whole)), regret.tokens))
        # half way (by ratio) between as much as the others and what it can do in the time
        knows[worker] = given <= 1.0 / np.sqrt(found[worker])
    return np.where(knows, found, np.nan)


def _given(seen: Observed, amount: F64, worker: int, others: Bool) -> float:
    """What [N] the worker was given over an even share among those who were there, beside the same of the `others` [K]; nobody: infinite."""
    chosen, there = seen.decisions.chosen, seen.decisions.there
    known = np.isfinite(amount) & (chosen >= 0)
    got = np.bincount(chosen[known], amount[known], seen.num_workers)
    if there is None:
        due = np.full(seen.num_workers, got.sum() / seen.num_workers)
    else:
        due = (amount[known] / np.maximum(there[known].sum(axis=1), 1)) @ there[known]
    theirs = got[others].sum() * due[worker]
    return float(got[worker] * due[others].sum() / theirs) if theirs > 0 else float("inf")
