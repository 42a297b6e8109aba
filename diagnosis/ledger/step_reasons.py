"""Steps that took longer than their work, where something about them tells why: an adapter that was swapped in, a shape that was new.

Idea: what a step's work takes is fitted on the baseline, at the window's own speed. Of the time beyond it, that of steps which
admitted a request for an adapter that had not been asked for lately is the swap's, if such steps stand out from the others; likewise
that of steps whose number of tokens was the first of its class on that worker is the compiler's. What is left of single steps that took several
times their work, whatever they computed, while those beside them were as quick as ever, are the instants at which the process stood still
(`pauses.py`): nothing tells why, and they are slower steps.

Invariant: a step's extras are not more than its time beyond its work; without such a difference between steps nothing is told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.facts import F64, I64, Bool, Facts, StepFacts
from diagnosis.ledger.overheads import overheads
from diagnosis.ledger.pauses import PAUSES, stood_still
from diagnosis.ledger.step_costs import MIN_LEVEL, fit_nonnegative

LEAST_S: Final = 0.01
"""Time beyond a step's work that is more than scatter."""
LONGER: Final = 0.3
"""The same as a share of its work."""
STANDING: Final = threshold(
    "step_reasons.steps",
    least=3,
    unit="steps",
    says="steps of a window that stand out and share a reason",
    why="two that share something may do so by chance",
)
CLEAR: Final = 0.7
"""Share of the steps that stand out which the reason has to have."""
QUICK: Final = 0.1
"""Quantile of the steps' times over their work that is the window's own speed where most steps stand still."""
SPLIT: Final = 1.6
"""Times that quantile from which on the median is the time of steps that stand still."""
OFTEN: Final = 0.5
"""Share of the steps with the reason that have to stand out."""
CLASSES: Final = (1, 16, 32, 64, 128, 256, 512)
"""Tokens of a class of shapes that are tried."""
MOST_SLOTS: Final = 64
"""Adapters that a worker holds at most: one that was never asked for is as far away."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps that know their work, by worker and time: row in the facts, time beyond their work, and whether that stands out."""

    row: I64
    worker: I64
    end_s: F64
    start_s: F64
    tokens: F64
    beyond_s: F64
    stands_out: Bool


def with_step_extras(base: Facts, suspect: Facts) -> tuple[Facts, Facts]:
    """Both windows with the seconds of their steps that have such a reason."""
    if base.steps is None or suspect.steps is None:
        return base, suspect
    fitted = _fit(base.steps)
    if fitted is None:
        return base, suspect
    return _explained(base, fitted), _explained(suspect, fitted)


def _explained(facts: Facts, fitted: F64) -> Facts:
    steps = None if facts.steps is None else _beyond(facts.steps, fitted)
    if facts.steps is None or steps is None or int(steps.stands_out.sum()) < STANDING.least:
        STANDING.note(0.0)
        PAUSES.note(0.0)
        return facts
    extras: dict[str, F64] = {}
    left = steps
    for name, find in (("adapter_swap", swaps), ("recompile", compiles)):
        found = find(facts, left)
        if found is None:
            continue
        seconds = np.zeros(len(facts.steps))
        seconds[left.row[found]] = left.beyond_s[found]
        extras[name] = seconds
        left = replace(left, stands_out=left.stands_out & ~found)
    beyond = np.where(left.stands_out, left.beyond_s, 0.0)
    for told in overheads(facts).values():
        beyond = beyond - told[left.row]
    work, prompts = steps.end_s - steps.start_s - steps.beyond_s, facts.steps.get("prefill_tokens")[left.row] > 0
    still = stood_still(left.worker, work, beyond, prompts)
    if still is not None:
        extras["slow_steps"] = np.zeros(len(facts.steps))
        extras["slow_steps"][left.row[still]] = beyond[still]
    return replace(facts, step_extras=extras) if extras else facts


def _fit(steps: StepFacts) -> F64 | None:
    """Seconds of a step by [1, prefill tokens, sequences that decode]; steps far beyond the first fit are left out of the second."""
    work, duration = _work(steps)
    if len(duration) < 3 * MIN_LEVEL:
        return None
    first = fit_nonnegative(work, duration)
    usual = duration <= 2.0 * (work @ first) + LEAST_S
    return fit_nonnegative(work[usual], duration[usual]) if int(usual.sum()) >= 3 * MIN_LEVEL else first


def _work(steps: StepFacts) -> tuple[F64, F64]:
    prefill, decode = steps.get("prefill_tokens"), steps.get("decode_tokens")
    known = np.isfinite(steps.duration_s) & (steps.duration_s > 0) & np.isfinite(prefill) & np.isfinite(decode)
    return np.stack([np.ones(int(known.sum())), prefill[known], decode[known]], axis=1), steps.duration_s[known]


def _beyond(steps: StepFacts, fitted: F64) -> Steps | None:
    prefill, decode = steps.get("prefill_tokens"), steps.get("decode_tokens")
    known = np.isfinite(steps.duration_s) & (steps.duration_s > 0) & np.isfinite(prefill) & np.isfinite(decode)
    row = np.flatnonzero(known)
    if len(row) < MIN_LEVEL:
        return None
    duration = steps.duration_s[row]
    work = fitted[0] + fitted[1] * prefill[row] + fitted[2] * decode[row]
    quick, usual = np.quantile(duration / np.maximum(work, 1e-9), [QUICK, 0.5])
    work = work * float(quick if usual > SPLIT * quick else usual)
    beyond = duration - work
    stands_out = beyond > np.maximum(LEAST_S, LONGER * work)
    if not stands_out.any():
        return None
    tokens = prefill[row] + decode[row]
    end = steps.at_s[row]
    return Steps(row, steps.worker[row], end, end - duration, tokens, beyond, stands_out)


# Adapters


def swaps(facts: Facts, steps: Steps) -> Bool | None:
    """[k] steps that swapped an adapter in; None where requests name no models, or such steps do not stand out."""
    distance = adapter_distance(facts, steps)
    if distance is None:
        return None
    asked = np.isfinite(distance)
    best, most = None, 0.0
    for slots in range(1, int(np.max(distance[asked], initial=0.0)) + 1):
        far = asked & (distance >= slots)
        found = far & steps.stands_out
        alike = float(found.sum()) / max(float((far | (steps.stands_out & asked)).sum()), 1.0)
        if alike > most and _is_clear(found, far, steps.stands_out & asked):
            best, most = found, alike
    return best


def adapter_distance(facts: Facts, steps: Steps) -> F64 | None:
    """[k] the most other adapters that were asked for since one that a step began to serve was last asked for; NaN: it began none.

    One that was never asked for before is as far as can be told: MOST_SLOTS.
    """
    r = facts.requests
    if r.model is None or facts.steps is None:
        return None
    names = list(facts.steps.worker_names)
    out = np.full(len(steps.row), np.nan)
    for code, rows in enumerate(r.by_worker()):
        mine = rows[np.isfinite(r.scheduled_s[rows])]
        if r.worker_names[code] not in names or len(mine) == 0:
            continue
        theirs = np.flatnonzero(steps.worker == names.index(r.worker_names[code]))
        if len(theirs) == 0:
            continue
        mine = mine[np.argsort(r.scheduled_s[mine], kind="stable")]
        at = np.searchsorted(steps.end_s[theirs], r.scheduled_s[mine], "right")
        recent: list[object] = []
        for row, place in zip(mine.tolist(), at.tolist(), strict=True):
            name = r.model[row]
            if name is None:
                continue
            far = recent.index(name) if name in recent else MOST_SLOTS
            if name in recent:
                recent.remove(name)
            recent.insert(0, name)
            if place < len(theirs):
                step = theirs[place]
                out[step] = max(far, out[step]) if np.isfinite(out[step]) else far
    return out


# Shapes


def compiles(facts: Facts, steps: Steps) -> Bool | None:
    """[k] steps that stood still for a new shape; None where the steps that stand out are not the first of their classes."""
    for size in CLASSES:
        first = first_of_class(steps, size)
        found = first & steps.stands_out
        if _is_clear(found, first, steps.stands_out):
            return found
    return None


def first_of_class(steps: Steps, size: int) -> Bool:
    """[k] whether no earlier step of the worker had as many tokens, in classes of `size`."""
    shape = np.ceil(steps.tokens / size).astype(np.int64)
    key = steps.worker * (int(shape.max(initial=0)) + 1) + shape
    order = np.argsort(steps.end_s, kind="stable")
    out = np.zeros(len(steps.row), dtype=bool)
    out[order[np.unique(key[order], return_index=True)[1]]] = True
    return out


def _is_clear(found: Bool, with_reason: Bool, out: Bool) -> bool:
    """Most that stand out have the reason, and most that have it stand out."""
    num = int(found.sum())
    if num < CLEAR * int(out.sum()) or num < OFTEN * int(with_reason.sum()):
        STANDING.note(0.0)
        return False
    return STANDING.is_reached(num)
