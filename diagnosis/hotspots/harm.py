"""Whether what a test found has cost anything: MIN_HARM of the best alternatives' cost, by what requests really took.

That only takes alarms away. Where nobody can tell what it cost, it counts as harm.
"""

from __future__ import annotations

import numpy as np

from diagnosis.facts import I64, Bool
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Borne, Regret

MIN_HARM = 0.1
"""Regret over what the best alternatives would have cost, from which on a worker's excess is a hotspot: a tenth is the least that is told of a latency anywhere."""


def did_harm(of: I64, chosen: I64, borne: Borne, num: int, workers: int) -> Bool:
    """[num, workers] what was lost is at least MIN_HARM of what the best would have cost, or nobody can tell."""
    known = np.isfinite(borne.lost_s) & np.isfinite(borne.best_s) & (chosen >= 0)
    cell = of[known] * workers + chosen[known]
    lost = np.bincount(cell, borne.lost_s[known], num * workers)
    cost = np.bincount(cell, borne.best_s[known], num * workers)
    told = np.bincount(cell, minlength=num * workers)
    harmful: Bool = (told == 0) | (lost >= MIN_HARM * cost) & (lost > 0)
    return harmful.reshape(num, workers)


def did_harm_by_pace(seen: Observed, of: I64, regret: Regret, is_slow: Bool) -> Bool:
    """[I, K] the slow worker's requests lost MIN_HARM by its pace alone: the same tokens, computed behind another worker's queue.

    Asked where nobody tells what other workers held of a prompt. Regret then takes it that they held nothing, so what a slow worker
    computes of a prompt that it mostly holds itself is never worth another's while.
    """
    num, workers = is_slow.shape
    untold = (
        np.flatnonzero(np.isnan(seen.decisions.matched).all(axis=1)) if is_slow.any() else np.zeros(0, dtype=np.int64)
    )
    if not len(untold):
        return np.zeros_like(is_slow)
    cost = regret.wait_s[untold] + regret.tokens[untold, None] * regret.token_s
    if seen.decisions.there is not None:
        cost = np.where(seen.decisions.there[untold], cost, np.nan)
    chosen = seen.decisions.chosen[untold]
    own, least = cost[np.arange(len(untold)), np.maximum(chosen, 0)], np.fmin.reduce(cost, axis=1)
    known = np.isfinite(own) & np.isfinite(least) & (chosen >= 0)
    cell = of[untold][known] * workers + chosen[known]
    lost = np.bincount(cell, (own - least)[known], num * workers)
    best = np.bincount(cell, least[known], num * workers)
    harmful: Bool = (lost >= MIN_HARM * best) & (lost > 0)
    return harmful.reshape(num, workers)
