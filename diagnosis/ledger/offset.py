"""A fixed time in many requests that no phase tells of: a timer, a buffer, a name look-up; it names no cause, and is none by itself.

Idea: what queues or computes scatters; what waits for a clock does not. So of the seconds that no phase owns, those are looked for that
stand close together at one value: in some requests and not in others (two modes), or in all of them and not in the other window.

Invariant: no request is given more than it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.facts import F64, Bool, Facts
from diagnosis.ledger.attempts import attempts_before
from diagnosis.ledger.timeline import sum_of

LEAST_S: Final = 0.005
"""An offset below this is scatter."""
FEWEST: Final = 10
"""Requests that an offset is seen in, at least."""
WIDTH_OF_TWO: Final = 0.10
"""Width of the upper mode (10th to 90th percentile) over the offset, where others have none of it."""
WIDTH_OF_ONE: Final = 0.02
"""The same where all requests have it: then a queue in front is what has to be told apart."""
APART: Final = 0.05
"""Share of requests without it from which on there are two modes."""
BETWEEN: Final = 0.05
"""Share of requests that may lie between the two modes."""


@dataclass(frozen=True, slots=True)
class Offset:
    """seconds that requests above `usual_s` have beside it, and how many of them have it; two_modes: others of the window do not."""

    usual_s: float
    seconds: float
    num_requests: int
    two_modes: bool

    def of(self, residual: F64) -> F64:
        """[n] seconds of it in each request."""
        has = np.nan_to_num(residual) - self.usual_s > self.seconds / 2
        return np.where(has, np.minimum(np.nan_to_num(residual), self.seconds), 0.0)


def find_offset(base: Facts, suspect: Facts) -> Offset | None:
    """One that the suspect window has and the baseline has not, or fewer of its requests."""
    return offset_between(residual_s(base), residual_s(suspect))


def offset_between(before: F64, after: F64) -> Offset | None:
    before, after = before[np.isfinite(before)], after[np.isfinite(after)]
    if min(len(before), len(after)) < 2 * FEWEST:
        return None
    usual = float(np.quantile(np.concatenate([before, after]), 0.05))
    scatter = float(np.quantile(before, 0.75) - np.quantile(before, 0.25))
    low = min(float(np.median(before)), float(np.median(after)))
    excess = after - low
    high: Bool = excess > max(LEAST_S, 3 * min(scatter, low - usual + LEAST_S))
    if int(high.sum()) < FEWEST:
        return None
    seconds = float(np.median(excess[high]))
    upper: Bool = excess > seconds / 2
    width = float(np.quantile(excess[upper], 0.9) - np.quantile(excess[upper], 0.1))
    two_modes = float((~upper).mean()) >= APART
    if width > (WIDTH_OF_TWO if two_modes else WIDTH_OF_ONE) * seconds + 2 * min(scatter, LEAST_S):
        return None
    middle = (excess > 0.25 * seconds) & (excess < 0.75 * seconds)
    if float(middle.mean()) > BETWEEN or float(((before - low) > seconds / 2).mean()) >= float(upper.mean()) / 2:
        return None
    return Offset(low, seconds, int(upper.sum()), two_modes)


def residual_s(facts: Facts) -> F64:
    """[n] seconds up to the first token that no phase tells of, of who prefilled it or of who decodes it; NaN where queue or prefill is not
    told."""
    r = facts.requests
    left = r.first_token_s - r.arrival_s
    for name in ("queue_s", "prefill_s"):
        left = left - r.get(name)
    for name in ("cache_lookup_s", "alloc_s", "kv_load_s", "frontend_s", "tokenize_s"):
        left = left - np.nan_to_num(r.get(name))
    return left - _handed_over(facts) - attempts_before(facts, r.first_token_s - r.arrival_s)


def _handed_over(facts: Facts) -> F64:
    """[n] seconds of each hand-over before the first token, by the request itself, by its parts, or by the row of who decodes: the most."""
    r, moves = facts.requests, facts.handover
    told = np.nan_to_num(r.get("kv_transfer_s")) + np.nan_to_num(r.get("handover_s"))
    if moves is None:
        return told
    parts = sum_of(moves.parts.values(), len(r))
    by_legs = parts if moves.told_s is None else np.maximum(parts, moves.told_s)
    return np.maximum(told, np.where(moves.before_first, by_legs, 0.0))
