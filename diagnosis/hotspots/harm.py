"""Whether what a test found has cost anything: MIN_HARM of the best alternatives' cost, by what requests really took.

That only takes alarms away. Where nobody can tell what it cost, it counts as harm.
"""

from __future__ import annotations

import numpy as np

from diagnosis.facts import I64, Bool
from diagnosis.hotspots.beyond import usual_beyond
from diagnosis.hotspots.intervals import INTERVAL_S
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Borne, Regret
from diagnosis.hotspots.usual import did_something, usual_seconds

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


def did_harm_to_answers(seen: Observed, is_slow: Bool) -> Bool:
    """[I, K] the slow worker's answers lost MIN_HARM of the time that they and the prompts in their steps usually take.

    Regret knows waits and prompts. In a step each sequence that decodes loses what the step took longer than those of its shape elsewhere.
    """
    num, workers = is_slow.shape
    if seen.steps is None or not is_slow.any():
        return np.zeros_like(is_slow)
    worker, at, took, usual = usual_seconds(seen.steps, workers, seen.pool_of())
    used = did_something(seen.steps)
    usual = np.where(
        np.isfinite(usual), usual, usual_beyond(seen.steps, used, seen.pool_of(), np.asarray(is_slow.any(axis=0)))
    )
    decode, running = np.nan_to_num(seen.steps.decode_tokens[used]), seen.steps.running[used]
    sequences = np.fmin(decode, running)  # of one that is guessed ahead a step may give several tokens
    index = (at / INTERVAL_S).astype(np.int64)
    inside = np.isfinite(usual) & (index >= 0) & (index < num)
    cell = (index * workers + worker)[inside]
    lost = np.bincount(cell, (sequences * (took - usual))[inside], num * workers)
    whole = np.bincount(cell, (np.fmax(sequences, running) * usual)[inside], num * workers)
    harmful: Bool = (lost >= MIN_HARM * whole) & (lost > 0)
    return harmful.reshape(num, workers)
