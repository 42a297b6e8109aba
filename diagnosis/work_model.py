"""How long the same work takes in each window: the calibration that the ledger rests on.

Two numbers matter. `prefill_s_per_token` turns tokens that had to be computed again into seconds. `slow_factor` says how
much longer a step with the *same* work took in the suspect window; it is judged at equal concurrency, so that a fuller
batch is not mistaken for a slower machine, and against the drift of step time inside each window (`drift.py`). Where steps
were slow in a part of a window only, the factor is that of the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from diagnosis.drift import Ratio, Spell, compare, drift
from diagnosis.facts import F64, Facts, StepFacts
from diagnosis.pace import Pace, decoding_at, mean_gaps, quiet_gaps, running_of

MIN_LEVEL = 30
"""Steps (or gaps) that a level of concurrency needs in both windows before it is compared."""
FLOOR = 0.10
"""Relative change of step time below which we do not speak of slower steps, whatever the scatter."""


@dataclass(frozen=True, slots=True)
class WorkModel:
    """Calibration of a pair of windows.

    prefill_s_per_token   s a computed prompt token adds (baseline speed); None where it cannot be fitted
    decode_s_per_seq      s that one more running sequence adds to a step; None likewise
    step_s                typical step with one sequence, s
    slow_factor           suspect step time / baseline step time at equal work; 1.0 within the noise, None if unobservable
    slow_raw, slow_noise  the ratio as measured, and by how much it would have to differ from 1 (log scale) to stand out from drift
    source                steps | token gaps | mean gap per request | None
    spell                 the part of the slower window in which its steps were slow; None: all of it, or not slower at all
    decoding              sequences in a batch in the median, of (baseline, suspect): of steps that ran any, else as requests tell
    """

    prefill_s_per_token: float | None
    decode_s_per_seq: float | None
    step_s: float | None
    slow_factor: float | None
    slow_raw: float | None
    slow_noise: float | None
    num_compared: int
    source: str | None
    decoding: tuple[float | None, float | None] = (None, None)
    spell: Spell | None = None

    def exchanged(self) -> WorkModel:
        """The model with the windows' roles exchanged; costs stay those of the faster window."""
        return replace(
            self,
            slow_factor=None if self.slow_factor is None else 1.0 / self.slow_factor,
            slow_raw=None if self.slow_raw is None else 1.0 / self.slow_raw,
            decoding=(self.decoding[1], self.decoding[0]),
        )

    def slow_share(self, *, suspect: bool) -> float:
        """Share of engine time in this window that slower steps added over the faster window's speed."""
        factor = self.slow_factor or 1.0
        if suspect:
            return max(0.0, 1.0 - 1.0 / factor)
        return max(0.0, 1.0 - factor)

    def slow_shares(self, at_s: F64, *, suspect: bool) -> F64:
        """That share at each instant of the window, [n]: 0 outside the spell. An unknown instant is taken to lie outside."""
        share = self.slow_share(suspect=suspect)
        return np.full(len(at_s), share) if self.spell is None else np.where(self.spell.holds(at_s), share, 0.0)


def calibrate(base: Facts, suspect: Facts) -> WorkModel:
    """Fit the model on both windows."""
    sides = (_Side(base), _Side(suspect))
    ratio, compared, source = _slow_ratio(*sides)
    factor = raw = noise = spell = None
    if ratio is not None:
        raw, noise, spell = ratio.value, ratio.noise, ratio.spell
        significant = abs(np.log(raw)) > max(np.log1p(FLOOR), noise)
        factor = raw if significant else 1.0
    per_seq, step = _decode_cost(sides[0])
    decoding = (sides[0].typical_running(), sides[1].typical_running())
    model = WorkModel(None, per_seq, step, factor, raw, noise, compared, source, decoding, spell)
    return replace(model, prefill_s_per_token=_prefill_cost(base, suspect, model))


class _Side:
    """One window, whose gaps are worked out when they are first asked for."""

    def __init__(self, facts: Facts) -> None:
        self.steps, self.requests = facts.steps, facts.requests

    @cached_property
    def gaps(self) -> Pace:
        return quiet_gaps(self.requests)

    @cached_property
    def means(self) -> Pace:
        return mean_gaps(self.requests)

    def typical_running(self) -> float | None:
        found = None if self.steps is None else running_of(self.steps)
        return found if found is not None else (self.gaps if len(self.gaps) else self.means).typical_running()


def _slow_ratio(base: _Side, suspect: _Side) -> tuple[Ratio | None, int, str | None]:
    """(suspect over baseline step time at equal work, steps or gaps compared, where they are from)."""
    if base.steps is not None and suspect.steps is not None:
        found = _ratio_of_steps(base.steps, suspect.steps)
        if found is not None:
            return *found, "steps"
    for sides, source in (
        ((base.gaps, suspect.gaps), "token gaps"),
        ((base.means, suspect.means), "mean gap per request"),
    ):
        found = _ratio_of_levels(*sides)
        if found is not None:
            return *found, source
    return None, 0, None


def _ratio_of_levels(base: Pace, suspect: Pace) -> tuple[Ratio, int] | None:
    """Ratio of step times at equal concurrency, and how many gaps were compared."""
    levels = [np.round(pace.running) for pace in (base, suspect)]
    usual: dict[float, tuple[float, float]] = {}
    compared = 0
    for level in np.intersect1d(np.unique(levels[0]), np.unique(levels[1])):
        a, b = base.step_s[levels[0] == level], suspect.step_s[levels[1] == level]
        if len(a) >= MIN_LEVEL and len(b) >= MIN_LEVEL:
            median_a, median_b = float(np.median(a)), float(np.median(b))
            if median_a > 0 and median_b > 0:
                usual[float(level)] = (median_a, median_b)
                compared += min(len(a), len(b))
    if not usual:
        return None
    middle = {level: float(np.sqrt(a * b)) for level, (a, b) in usual.items()}
    drifts = [
        drift(_relative(pace, level, middle), pace.at_s) for pace, level in zip((base, suspect), levels, strict=True)
    ]
    ratio = compare(*drifts)
    if ratio is not None and ratio.spell is not None:
        slow = int(ratio.value > 1.0)  # against the other window's own levels: fuller batches go with a slow spell
        theirs = {level: medians[1 - slow] for level, medians in usual.items()}
        pace = (base, suspect)[slow]
        inside = _relative(pace, levels[slow], theirs)[ratio.spell.holds(pace.at_s)]
        rise = float(np.exp(np.nanmedian(inside)))
        ratio = replace(ratio, value=rise if slow else 1.0 / rise)
    return None if ratio is None else (ratio, compared)


def _relative(pace: Pace, level: F64, usual: Mapping[float, float]) -> F64:
    """Log of each step time over what is usual at its level; NaN where that is not known."""
    levels = np.unique(level)
    known = np.array([usual.get(float(x), np.nan) for x in levels])
    relative: F64 = np.log(np.maximum(pace.step_s, 1e-9) / known[np.searchsorted(levels, level)])
    return relative


def step_design(steps: StepFacts) -> tuple[F64, F64, F64]:
    """(duration, [1, prefill tokens, decode tokens], end) of the steps that know them."""
    prefill, decode = steps.get("prefill_tokens"), steps.get("decode_tokens")
    known = np.isfinite(steps.duration_s) & (steps.duration_s > 0) & np.isfinite(prefill) & np.isfinite(decode)
    columns = [np.ones(int(known.sum())), prefill[known], decode[known]]
    return steps.duration_s[known], np.stack(columns, axis=1), steps.at_s[known]


def _ratio_of_steps(base: StepFacts, suspect: StepFacts) -> tuple[Ratio, int] | None:
    duration_b, work_b, at_b = step_design(base)
    duration_s, work_s, at_s = step_design(suspect)
    if len(duration_b) < 3 * MIN_LEVEL or len(duration_s) < 3 * MIN_LEVEL:
        return None
    coefficients = fit_nonnegative(work_b, duration_b)
    inside = np.all(work_s <= work_b.max(axis=0), axis=1)
    if inside.sum() < MIN_LEVEL:
        return None
    predicted_b, predicted_s = work_b @ coefficients, work_s[inside] @ coefficients
    if np.median(predicted_b) <= 0:
        return None
    drifts = []
    for duration, predicted, at in ((duration_b, predicted_b, at_b), (duration_s[inside], predicted_s, at_s[inside])):
        drifts.append(drift(np.log(np.maximum(duration, 1e-9) / np.maximum(predicted, 1e-9)), at))
    ratio = compare(*drifts)
    return None if ratio is None else (ratio, int(inside.sum()))


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


def _prefill_cost(base: Facts, suspect: Facts, model: WorkModel) -> float | None:
    """Seconds a computed prompt token adds, at the faster window's speed."""
    if base.steps is not None:
        duration, work, _ = step_design(base.steps)
        if len(duration) >= 3 * MIN_LEVEL and np.ptp(work[:, 1]) > 0:
            fitted = float(fit_nonnegative(work, duration)[1])
            if fitted > 0:
                return fitted
    designs, targets = [], []
    for facts, is_suspect in ((base, False), (suspect, True)):
        r = facts.requests
        prefill, computed = r.get("prefill_s"), r.get("computed_tokens")
        known = np.isfinite(prefill) & np.isfinite(computed) & np.isfinite(r.scheduled_s)
        if not known.any():
            continue
        running = np.zeros(len(r))
        for rows in r.by_worker():
            mine = rows[known[rows]]
            running[mine] = decoding_at(r, rows, r.scheduled_s[mine], with_itself=False)
        designs.append(np.stack([np.ones(int(known.sum())), computed[known], running[known]], axis=1))
        slow = model.slow_shares(r.scheduled_s[known], suspect=True) if is_suspect else 0.0
        targets.append(prefill[known] * (1.0 - slow))
    if not designs or sum(map(len, targets)) < 3 * MIN_LEVEL:
        return None
    design, target = np.concatenate(designs), np.concatenate(targets)
    if np.ptp(design[:, 1]) == 0:
        return None
    fitted = float(fit_nonnegative(design, target)[1])
    return fitted if fitted > 0 else None


def _decode_cost(base: _Side) -> tuple[float | None, float | None]:
    """(s one more sequence adds to a step, s of a step with one sequence), from the baseline."""
    if base.steps is not None:
        duration, work, _ = step_design(base.steps)
        if len(duration) >= 3 * MIN_LEVEL and np.ptp(work[:, 2]) > 0:
            fixed, _, per_seq = fit_nonnegative(work, duration)
            return float(per_seq), float(fixed + per_seq)
    pace = base.gaps if len(base.gaps) >= MIN_LEVEL else base.means
    step, running = pace.step_s, pace.running
    if len(step) < 3 * MIN_LEVEL:
        return None, (float(np.median(step)) if len(step) else None)
    keep = step <= np.quantile(step, 0.95)
    fixed, per_seq = fit_nonnegative(np.stack([np.ones(int(keep.sum())), running[keep]], axis=1), step[keep])
    return float(per_seq), float(fixed + per_seq)
