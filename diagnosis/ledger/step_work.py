"""What a worker's steps spent their time on, by each step's own token counts: sharper than the requests' phases tell it.

Idea: a step that computed n prompt tokens spent n times the cost of a token on them, those computed again after preemption
by name; the rest of its time was decoding and overhead. Who answers for first-time prefill is told by the requests whose
prompts were being computed then. Where a step does not know its tokens, what the requests tell stays.

Invariant: a step spends at most its own duration on prefill. vLLM books a prompt whole in the step that finishes it, and
tokens to compute again in the step that admits them: what a step had no time for is put onto the steps before it, and after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from diagnosis.facts import F64, I64, Facts, StepFacts
from diagnosis.ledger.overheads import overheads
from diagnosis.ledger.rows import KINDS

AGAIN, ORDINARY = "preemption_recompute", KINDS[-1]
NEIGHBOURS_S = 0.001
"""Steps that begin later than this after the end of the one before are no neighbours: the engine was idle between them."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Steps of one worker that know their tokens, by time: start and end (s), and the share of each that went into prefill.

    first   share of time for prompt tokens computed for the first time      again   for tokens computed again
    beside  share of time for each of OVERHEADS that occurs
    """

    start_s: F64
    end_s: F64
    first: F64
    again: F64
    beside: Mapping[str, F64]

    def edges(self, low: float, high: float) -> F64:
        """Instants between low and high at which a step begins or ends."""
        found = np.concatenate([self.start_s, self.end_s])
        return found[(found > low) & (found < high)]

    def refine(self, edges: F64, activity: Mapping[str, F64]) -> dict[str, F64]:
        """Shares of time by kind of prefill in each piece between edges, [m] each; `activity` is what the requests tell."""
        middle = (edges[:-1] + edges[1:]) / 2
        step = np.clip(np.searchsorted(self.end_s, middle, "left"), 0, len(self.end_s) - 1)
        inside = (self.start_s[step] <= middle) & (middle <= self.end_s[step])
        told = np.zeros(len(middle))
        for share in activity.values():
            told += share
        beside = {name: np.where(inside, share[step], 0.0) for name, share in self.beside.items()}
        first, again = self.first[step], self.again[step]
        inside &= np.isfinite(first)
        out = {}
        for name in KINDS:
            by_requests = activity.get(name, np.zeros(len(middle)))
            by_step = np.where(told > 0, first * by_requests / np.where(told > 0, told, 1.0), 0.0)
            if name == ORDINARY:
                by_step = np.where(told > 0, by_step, first)
            if name == AGAIN:
                by_step = by_step + again
            share = np.where(inside, by_step, by_requests)
            if share.any():
                out[name] = share
        # bookkeeping comes first: what it took no prefill can have taken (`step_work` left it no room)
        return beside | out


def step_work(
    facts: Facts, worker: str | None, token_s: float | None, told: Mapping[str, F64] | None = None
) -> StepWork | None:
    """Work of one worker's steps; `token_s` is what a computed token costs in this window, s; `told`: the overheads of
    all steps, where they were worked out already.

    Without it only the overheads are told (`first` and `again` are NaN). None where nothing can be told.
    """
    steps = facts.steps
    if steps is None or worker not in steps.worker_names:
        return None
    told = overheads(facts) if told is None else told
    if token_s is None and not told:
        return None
    prefill, recomputed = steps.get("prefill_tokens"), np.nan_to_num(steps.get("recomputed_tokens"))
    mine = steps.worker == list(steps.worker_names).index(worker)
    mine &= np.isfinite(prefill) & np.isfinite(steps.duration_s) & (steps.duration_s > 0)
    rows = np.flatnonzero(mine)
    if len(rows) == 0:
        return None
    end, whole = steps.at_s[rows], steps.duration_s[rows]
    start = end - whole
    beside = {name: seconds[rows] for name, seconds in told.items() if seconds[rows].any()}
    shares = {name: seconds / whole for name, seconds in beside.items()}
    if token_s is None:
        unknown = np.full(len(rows), np.nan)
        return StepWork(start, end, unknown, unknown, shares)
    room = np.maximum(whole - sum(beside.values()), 0.0)
    again = spread(np.minimum(recomputed, prefill)[rows] * token_s, room, _neighbours(start, end))
    first = np.clip(prefill - recomputed, 0.0, None)[rows] * token_s
    first = spread(first[::-1], (room - again)[::-1], _neighbours(start, end)[::-1])[::-1]
    return StepWork(start, end, first / whole, again / whole, shares)


def others_by_steps(steps: StepFacts | None, worker: str | None, first_s: F64, last_s: F64) -> F64:
    """Mean number of other sequences in the worker's decode steps between first and last token, [n]; NaN where no step tells."""
    nothing = np.full(len(first_s), np.nan)
    if steps is None or worker not in steps.worker_names:
        return nothing
    decoding = steps.get("decode_tokens")
    mine = (steps.worker == list(steps.worker_names).index(worker)) & (np.nan_to_num(decoding) > 0)
    if not mine.any():
        return nothing
    at, others = steps.at_s[mine], np.concatenate([[0.0], np.cumsum(decoding[mine] - 1.0)])
    start, end = (np.searchsorted(at, instant, "right") for instant in (first_s, last_s))
    count = end - start
    return np.where(count > 0, (others[end] - others[start]) / np.maximum(count, 1), np.nan)


def decoding_by_steps(steps: StepFacts | None, worker: str | None, at_s: F64) -> F64:
    """Sequences that decoded in the worker's step that each instant lies in, or in the next one, [n]; NaN where no step tells."""
    nothing = np.full(len(at_s), np.nan)
    if steps is None or worker not in steps.worker_names:
        return nothing
    decoding = steps.get("decode_tokens")
    mine = np.flatnonzero((steps.worker == list(steps.worker_names).index(worker)) & np.isfinite(decoding))
    if len(mine) == 0:
        return nothing
    at = np.searchsorted(steps.at_s[mine], at_s, "right")
    return np.where(at < len(mine), decoding[mine][np.minimum(at, len(mine) - 1)], np.nan)


def spread(seconds: F64, room: F64, joined: I64) -> F64:
    """Seconds of work [n] of which none has more than its room: the excess goes to the next, while that is a neighbour.

    joined  [n - 1] whether each is a neighbour of the next; what has no neighbour with room left is dropped.
    """
    out = np.minimum(seconds, room)
    for i in np.flatnonzero(seconds > room).tolist():
        left, at = seconds[i] - room[i], i + 1
        while left > 0 and at < len(out) and joined[at - 1]:
            taken = min(left, room[at] - out[at])
            out[at] += taken
            left, at = left - taken, at + 1
    return out


def _neighbours(start: F64, end: F64) -> I64:
    return (start[1:] - end[:-1] <= NEIGHBOURS_S).astype(np.int64)
