"""What a step takes, and what each prompt token and each sequence adds to it: least squares over a window's steps."""

from __future__ import annotations

import numpy as np

from diagnosis.facts import F64, Bool, StepFacts

MIN_LEVEL = 30
"""Steps (or gaps) that a level of concurrency needs in both windows before it is compared."""


def designed(steps: StepFacts) -> Bool:
    """[m] steps that know how long they took and what they did."""
    known = np.isfinite(steps.duration_s) & (steps.duration_s > 0)
    return known & np.isfinite(steps.get("prefill_tokens")) & np.isfinite(steps.get("decode_tokens"))


def step_design(steps: StepFacts) -> tuple[F64, F64, F64]:
    """(duration, [1, prefill tokens, decode tokens], end) of the steps that know them."""
    prefill, decode = steps.get("prefill_tokens"), steps.get("decode_tokens")
    known = designed(steps)
    columns = [np.ones(int(known.sum())), prefill[known], decode[known]]
    return steps.duration_s[known], np.stack(columns, axis=1), steps.at_s[known]


def step_costs(steps: StepFacts) -> F64:
    """[3] what a step takes, what a prompt token adds and what a sequence adds, s; none below 0.

    Where most steps compute no prompt, those alone tell what a sequence costs: a batch that lacks the sequence whose prompt the step computes
    would else be taken for one that got dearer by being smaller.
    """
    duration, work, _ = step_design(steps)
    pure = work[:, 1] == 0
    times = np.unique(work[pure, 2], return_counts=True)[1]
    if 2 * int(pure.sum()) < len(work) or int((times >= MIN_LEVEL).sum()) < 2 or bool(pure.all()):
        return fit_nonnegative(work, duration)
    fixed, per_seq = fit_nonnegative(work[pure][:, [0, 2]], duration[pure])
    left = duration[~pure] - fixed - per_seq * work[~pure, 2]
    return np.array([fixed, float(fit_nonnegative(work[~pure][:, [1]], left)[0]), per_seq])


def fit_nonnegative(design: F64, target: F64) -> F64:
    """Least squares with coefficients kept at 0 or above (columns that turn negative are left out, then refitted)."""
    active = np.ones(design.shape[1], dtype=bool)
    coefficients = np.zeros(design.shape[1])
    while active.any():
        solution = np.linalg.lstsq(design[:, active], target, rcond=None)[0]
        if (solution >= 0).all():
            coefficients[active] = solution
            break
        columns = np.flatnonzero(active)
        active[columns[solution < 0]] = False
    return coefficients
