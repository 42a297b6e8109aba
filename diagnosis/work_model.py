"""How long the same work takes in each window: the calibration that the ledger rests on.

Two numbers matter. `prefill_s_per_token` turns tokens that had to be computed again into seconds. `slow_factor` says how
much longer a step with the *same* work took in the suspect window; it is judged at equal concurrency, so that a fuller
batch is not mistaken for a slower machine, and against the drift of step time inside each window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from diagnosis.facts import F64, Facts, StepFacts
from diagnosis.pace import Pace, decoding_at, mean_gaps, quiet_gaps, running_of

MIN_LEVEL = 30
"""Steps (or gaps) that a level of concurrency needs in both windows before it is compared."""
BLOCKS = 8
"""Spans of time a window is cut into to see how much step time drifts by itself."""
SIGMAS = 2.5
"""Standard errors a ratio has to differ from 1 by: about 2 % of quiet pairs pass."""
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


def calibrate(base: Facts, suspect: Facts) -> WorkModel:
    """Fit the model on both windows."""
    sides = (_Side(base), _Side(suspect))
    raw, noise, compared, source = _slow_factor(*sides)
    factor: float | None = None
    if raw is not None:
        significant = abs(np.log(raw)) > max(np.log1p(FLOOR), noise or 0.0)
        factor = raw if significant else 1.0
    per_seq, step = _decode_cost(sides[0])
    cost = _prefill_cost(base, suspect, factor or 1.0)
    decoding = (sides[0].typical_running(), sides[1].typical_running())
    return WorkModel(cost, per_seq, step, factor, raw, noise, compared, source, decoding)


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


def _slow_factor(base: _Side, suspect: _Side) -> tuple[float | None, float | None, int, str | None]:
    if base.steps is not None and suspect.steps is not None:
        found = _factor_from_steps(base.steps, suspect.steps)
        if found is not None:
            return found[0], found[1], found[2], "steps"
    found = _factor_from_levels(base.gaps, suspect.gaps)
    if found is not None:
        return found[0], found[1], found[2], "token gaps"
    found = _factor_from_levels(base.means, suspect.means)
    if found is not None:
        return found[0], found[1], found[2], "mean gap per request"
    return None, None, 0, None


def _factor_from_levels(base: Pace, suspect: Pace) -> tuple[float, float, int] | None:
    """Ratio of step times at equal concurrency, its uncertainty (log scale), and how many gaps were compared."""
    levels_b, levels_s = np.round(base.running), np.round(suspect.running)
    pooled: dict[float, float] = {}
    compared = 0
    for level in np.intersect1d(np.unique(levels_b), np.unique(levels_s)):
        a, b = base.step_s[levels_b == level], suspect.step_s[levels_s == level]
        if len(a) >= MIN_LEVEL and len(b) >= MIN_LEVEL:
            median_a, median_b = np.median(a), np.median(b)
            if median_a > 0 and median_b > 0:
                pooled[float(level)] = float(np.sqrt(median_a * median_b))
                compared += min(len(a), len(b))
    if not pooled:
        return None
    effects = [
        _block_effects(pace.step_s, levels, pace.at_s, pooled)
        for pace, levels in ((base, levels_b), (suspect, levels_s))
    ]
    return _compare_blocks(effects[0], effects[1], compared)


def _block_effects(step: F64, level: F64, at_s: F64, pooled: dict[float, float]) -> F64:
    """Log of step time over the pooled step time of its level, as the median of each of BLOCKS spans of time."""
    levels = np.unique(level)
    usual = np.array([pooled.get(float(x), np.nan) for x in levels])
    relative = np.log(np.maximum(step, 1e-9) / usual[np.searchsorted(levels, level)])
    known = np.isfinite(relative)
    relative, at_s = relative[known], at_s[known]
    edges = np.quantile(at_s, np.linspace(0.0, 1.0, BLOCKS + 1)) if len(at_s) else np.zeros(BLOCKS + 1)
    block = np.clip(np.searchsorted(edges, at_s, "right") - 1, 0, BLOCKS - 1)
    return np.array([np.median(relative[block == k]) for k in range(BLOCKS) if (block == k).any()])


def _compare_blocks(base: F64, suspect: F64, compared: int) -> tuple[float, float, int] | None:
    """Machines drift by the minute, so the scatter between spans of time, not the count of steps, says how sure a ratio is."""
    if min(len(base), len(suspect)) < BLOCKS // 2:
        return None
    log_ratio = float(suspect.mean() - base.mean())
    error = float(np.sqrt(base.var(ddof=1) / len(base) + suspect.var(ddof=1) / len(suspect)))
    return float(np.exp(log_ratio)), SIGMAS * error, compared


def step_design(steps: StepFacts) -> tuple[F64, F64]:
    """(duration, [1, prefill tokens, decode tokens, context tokens?]) of the steps that know them."""
    prefill, decode = steps.get("prefill_tokens"), steps.get("decode_tokens")
    known = np.isfinite(steps.duration_s) & (steps.duration_s > 0) & np.isfinite(prefill) & np.isfinite(decode)
    columns = [np.ones(int(known.sum())), prefill[known], decode[known]]
    return steps.duration_s[known], np.stack(columns, axis=1) if columns else np.empty((0, 3))


def _factor_from_steps(base: StepFacts, suspect: StepFacts) -> tuple[float, float, int] | None:
    duration_b, work_b = step_design(base)
    duration_s, work_s = step_design(suspect)
    if len(duration_b) < 3 * MIN_LEVEL or len(duration_s) < 3 * MIN_LEVEL:
        return None
    coefficients = fit_nonnegative(work_b, duration_b)
    inside = np.all(work_s <= work_b.max(axis=0), axis=1)
    if inside.sum() < MIN_LEVEL:
        return None
    predicted_b, predicted_s = work_b @ coefficients, work_s[inside] @ coefficients
    if np.median(predicted_b) <= 0:
        return None
    effects = []
    for duration, predicted in ((duration_b, predicted_b), (duration_s[inside], predicted_s)):
        relative = np.log(np.maximum(duration, 1e-9) / np.maximum(predicted, 1e-9))
        effects.append(np.array([np.median(part) for part in np.array_split(relative, BLOCKS) if len(part)]))
    return _compare_blocks(effects[0], effects[1], int(inside.sum()))


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


def _prefill_cost(base: Facts, suspect: Facts, factor: float) -> float | None:
    """Seconds a computed prompt token adds, at the faster window's speed."""
    if base.steps is not None:
        duration, work = step_design(base.steps)
        if len(duration) >= 3 * MIN_LEVEL and np.ptp(work[:, 1]) > 0:
            fitted = float(fit_nonnegative(work, duration)[1])
            if fitted > 0:
                return fitted
    designs, targets = [], []
    for facts, speed in ((base, 1.0), (suspect, factor)):
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
        targets.append(prefill[known] / speed)
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
        duration, work = step_design(base.steps)
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
