"""Decisions in which the router's match and what was found differ, and the intervals that have more of them than they may.

Against TOLERATED_ERRORS, by the bound of `excess` for a binomial. Found is what was there at the decision, where block events tell
(`holders`): what came or was evicted while the request waited is no error of the index. Where none tell, a worker stores and pushes out no more
than it computes meanwhile, so what a request found that hardly waited is what was there.
"""

from __future__ import annotations

import math

import numpy as np

from diagnosis.facts import F64, I64, Bool
from diagnosis.hotspots.intervals import BY_TEST
from diagnosis.hotspots.observed import Observed

TOLERATED_ERRORS = 0.05
"""Share of a router's beliefs that blocks which come and go meanwhile make wrong."""
WRONG_TOKENS, WRONG_RATIO = 64, 0.1
"""A belief is wrong by more than these tokens and this share of the prompt: blocks that come meanwhile are no error."""


def wrong_beliefs(seen: Observed, token_s: F64 | None = None) -> tuple[Bool, Bool]:
    """([N] the match that the router believed of the chosen worker was wrong, [N] where both are known).

    token_s   [K] seconds a prompt token: where nobody tells what was held, a request that waited for so long that its worker could compute as
              many tokens as make a belief wrong is not judged. None: however long it waited
    """
    decisions, served = seen.decisions, seen.served
    num = len(decisions)
    if len(served) == 0 or num == 0:
        return np.zeros(num, dtype=np.bool_), np.zeros(num, dtype=np.bool_)
    row = np.maximum(decisions.request, 0)
    believed = decisions.matched[np.arange(num), decisions.chosen]
    found, prompt = seen.found_there(), served.prompt_tokens[row]
    known = (decisions.request >= 0) & np.isfinite(believed) & np.isfinite(found) & np.isfinite(prompt)
    off = np.abs(np.where(known, believed - found, 0.0))
    tolerated = np.maximum(WRONG_TOKENS, WRONG_RATIO * np.nan_to_num(prompt))
    if token_s is not None:
        waited_s = (served.first_scheduled_s - served.arrival_s)[row]
        by_blocks = np.zeros(num, dtype=np.bool_) if seen.held is None else np.isfinite(seen.held)
        known &= by_blocks | ~(waited_s > tolerated * token_s[decisions.chosen])
    return known & (off > tolerated), known


def wrong_intervals(of: I64, is_wrong: Bool, can_err: Bool, num: int) -> Bool:
    """[num] more errors than TOLERATED_ERRORS allows, and at least twice as many: by the bound for a binomial."""
    n = np.bincount(of[can_err], minlength=num)
    k = np.bincount(of[is_wrong], minlength=num)
    share = k / np.maximum(n, 1)
    q = np.clip(share, 1e-12, 1 - 1e-12)
    divergence = q * np.log(q / TOLERATED_ERRORS) + (1 - q) * np.log((1 - q) / (1 - TOLERATED_ERRORS))
    return (share >= 2 * TOLERATED_ERRORS) & (n * divergence >= -math.log(BY_TEST["belief"]))
