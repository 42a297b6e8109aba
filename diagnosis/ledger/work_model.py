"""How long the same work takes in each window: the calibration that the ledger rests on.

Two numbers matter. `prefill_s_per_token` turns tokens that had to be computed again into seconds. `slow_factor` says how
much longer a step with the *same* work took in the suspect window; it is judged at equal concurrency, so that a fuller
batch is not mistaken for a slower machine, at equal context where that is longer in what is slower (`contexts.py`), and against the drift of step time inside each window (`drift.py`). Where the
only a part of the window that is worse was slower, the ratio of the whole would be nobody's: that part is its `spell`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from diagnosis.calibration import all_reached, threshold
from diagnosis.facts import F64, I64, Bool, Facts, StepFacts
from diagnosis.ledger.contexts import at_equal_context, beyond_context, grew, mean_contexts
from diagnosis.ledger.drift import SPANS, Ratio, Spell, compare, drift, drift_by_time, spell
from diagnosis.ledger.overheads import without_overheads
from diagnosis.ledger.pace import Pace, decoding_at, mean_gaps, quiet_gaps, running_of
from diagnosis.ledger.stalls import preempted_by_count

MIN_LEVEL = 30
"""Steps (or gaps) that a level of concurrency needs in both windows before it is compared."""
SLOWER = threshold(
    "slow_steps.ratio",
    least=0.10,
    unit="relative",
    says="change of step time at equal work",
    why="machines of one kind differ by a few percent",
)
ABOVE_DRIFT = threshold(
    "slow_steps.above_drift",
    least=1.0,
    unit="ratio",
    says="that change over what drift inside the windows explains",
    why="as far as drift reaches in 98 of 100 quiet pairs (drift.SIGMAS)",
)


@dataclass(frozen=True, slots=True)
class WorkModel:
    """Calibration of a pair of windows.

    prefill_s_per_token   s a computed prompt token adds (baseline speed); None where it cannot be fitted
    decode_s_per_seq      s that one more running sequence adds to a step; None likewise
    step_s                typical step with one sequence, s
    slow_factor           suspect step time / baseline step time at equal work; 1.0 within the noise, None if unobservable
    slow_raw, slow_noise  the ratio as measured, and by how much it would have to differ from 1 (log scale) to stand out from drift
    source                steps | token gaps | mean gap per request | None
    spell                 the part of the worse window in which its steps were slow, where its rest was not; slow_factor is 1.0 then
    spell_in_suspect      whether that is the suspect window
    decoding              sequences in the batch that a sequence's step had, on average, of (baseline, suspect); as steps, else requests tell
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
    spell_in_suspect: bool = True

    def exchanged(self) -> WorkModel:
        """The model with the windows' roles exchanged; costs stay those of the faster window."""
        return replace(
            self,
            slow_factor=None if self.slow_factor is None else 1.0 / self.slow_factor,
            slow_raw=None if self.slow_raw is None else 1.0 / self.slow_raw,
            decoding=(self.decoding[1], self.decoding[0]),
            spell_in_suspect=self.spell_in_suspect == (self.spell is None),
        )

    def slow_share(self, *, suspect: bool) -> float:
        """Share of engine time in this window that slower steps added over the faster window's speed."""
        factor = self.slow_factor or 1.0
        if suspect:
            return max(0.0, 1.0 - 1.0 / factor)
        return max(0.0, 1.0 - factor)

    def spell_shares(self, at_s: F64, *, suspect: bool) -> F64:
        """Share of engine time that slower steps added at each instant of a spell of this window, [n]; 0 outside it."""
        if self.spell is None or suspect != self.spell_in_suspect:
            return np.zeros(len(at_s))
        return self.spell.shares(at_s)


def calibrate(base: Facts, suspect: Facts, *, suspect_is_worse: bool = True) -> WorkModel:
    """Fit the model on both windows. `suspect_is_worse`: a slow spell is looked for in the suspect window, else in the baseline."""
    base, suspect = without_overheads(base), without_overheads(suspect)
    sides = (_Side(base), _Side(suspect))
    found = _compared(*sides, suspect_is_worse=suspect_is_worse)
    factor, ratio = None, found.ratio
    if ratio is not None:
        factor = ratio.value if _stands_out(ratio) and found.spell is None else 1.0
    per_seq, step = _decode_cost(sides[0])
    cost = _prefill_cost(base, suspect, factor or 1.0)
    return WorkModel(
        prefill_s_per_token=cost,
        decode_s_per_seq=per_seq,
        step_s=step,
        slow_factor=factor,
        slow_raw=None if ratio is None else ratio.value,
        slow_noise=None if ratio is None else ratio.noise,
        num_compared=found.num_compared,
        source=found.source,
        decoding=(sides[0].typical_running(), sides[1].typical_running()),
        spell=found.spell,
        spell_in_suspect=suspect_is_worse or found.spell is None,
    )


def _stands_out(ratio: Ratio) -> bool:
    apart = abs(float(np.log(ratio.value)))
    return all_reached((SLOWER, float(np.expm1(apart))), (ABOVE_DRIFT, apart / max(ratio.noise, 1e-12)))


@dataclass(frozen=True, slots=True)
class _Compared:
    """Step times of both windows at equal work: their ratio, a slow spell of the worse one, and what was compared.

    points   of both windows, what was compared
    """

    ratio: Ratio | None
    spell: Spell | None
    num_compared: int
    source: str | None
    points: Sequence[_Points] = ()


@dataclass(frozen=True, slots=True)
class _Points:
    """Compared steps, gaps or requests of a window, [m] each.

    effect   log of step time over what is usual for its sequences   at_s: its end, middle_s: its middle
    worker   code into the names of the window's requests, -1 unknown
    """

    effect: F64
    at_s: F64
    middle_s: F64
    sequences: F64
    worker: I64


class _Side:
    """One window, whose gaps are worked out when they are first asked for."""

    def __init__(self, facts: Facts) -> None:
        self.steps, self.requests = facts.steps, facts.requests
        self._out = preempted_by_count(facts)[0]

    @cached_property
    def gaps(self) -> Pace:
        return quiet_gaps(self.requests)

    @cached_property
    def means(self) -> Pace:
        return mean_gaps(self.requests, self._out)

    def typical_running(self) -> float | None:
        found = None if self.steps is None else running_of(self.steps)
        return found if found is not None else (self.gaps if len(self.gaps) else self.means).typical_running()


def _compared(base: _Side, suspect: _Side, *, suspect_is_worse: bool) -> _Compared:
    found = _compare_steps(base, suspect, suspect_is_worse)
    if found is None:
        found = _compare_levels(base, suspect, "token gaps", suspect_is_worse)
    if found is None:
        found = _compare_levels(base, suspect, "mean gap per request", suspect_is_worse)
    if found is None:
        return _Compared(None, None, 0, None)
    return _in_context(base, suspect, found, int(suspect_is_worse))


def _in_context(base: _Side, suspect: _Side, found: _Compared, worse: int) -> _Compared:
    """What was found, unless it is slow where contexts are longer: then at equal context, else beyond what contexts explain, else nothing."""
    if found.ratio is None or (found.spell is None and not _stands_out(found.ratio)):
        return found
    contexts = []
    for side, points in zip((base, suspect), found.points, strict=True):
        told = mean_contexts(side.requests, points.worker, points.middle_s)
        if told is None:
            return found
        contexts.append(told)
    if found.spell is not None:
        inside = found.spell.shares(found.points[worse].at_s) > 0
        longer = grew(contexts[worse][inside], contexts[1 - worse])
    else:
        slower = int(found.ratio.value > 1.0)
        longer = grew(contexts[slower], contexts[1 - slower])
    if not longer:
        return found
    effects, sequences = [each.effect for each in found.points], [each.sequences for each in found.points]
    equal = at_equal_context(effects, sequences, contexts, MIN_LEVEL)
    num_equal = min(int(np.isfinite(each).sum()) for each in equal)
    is_equal = num_equal >= 3 * MIN_LEVEL
    left = equal if is_equal else beyond_context(effects, contexts)
    timed = [(effect, points.at_s) for effect, points in zip(left, found.points, strict=True)]
    ratio, slow = compare(*(drift(*each) for each in timed)), _spell(timed, worse)
    if ratio is None:
        return _Compared(None, None, 0, None)
    still = slow is not None or (_stands_out(ratio) and (ratio.value > 1.0) == (found.ratio.value > 1.0))
    if not is_equal and not still:
        return _Compared(None, None, 0, None)
    return replace(found, ratio=ratio, spell=slow, num_compared=num_equal if is_equal else found.num_compared)


def _compare_levels(base_side: _Side, suspect_side: _Side, source: str, suspect_is_worse: bool) -> _Compared | None:
    """Step times at equal concurrency, by the gaps or else by the requests' means."""
    sides = (base_side, suspect_side)
    base, suspect = (side.gaps if source == "token gaps" else side.means for side in sides)
    levels = [np.round(pace.running) for pace in (base, suspect)]
    usual: dict[float, tuple[float, float]] = {}
    num_compared = 0
    for level in np.intersect1d(np.unique(levels[0]), np.unique(levels[1])):
        a, b = base.step_s[levels[0] == level], suspect.step_s[levels[1] == level]
        if len(a) >= MIN_LEVEL and len(b) >= MIN_LEVEL:
            median_a, median_b = float(np.median(a)), float(np.median(b))
            if median_a > 0 and median_b > 0:
                usual[float(level)] = (median_a, median_b)
                num_compared += min(len(a), len(b))
    if not usual:
        return None
    middle = {level: float(np.sqrt(a * b)) for level, (a, b) in usual.items()}
    effects = [(_relative(pace, level, middle), pace.at_s) for pace, level in zip((base, suspect), levels, strict=True)]
    ratio, worse = compare(*(drift(*effect) for effect in effects)), int(suspect_is_worse)
    if ratio is None:
        return None
    slow = _spell(effects, worse)
    if slow is not None:  # against the other window's own levels: fuller batches go with a slow spell
        theirs = {level: medians[1 - worse] for level, medians in usual.items()}
        pace = (base, suspect)[worse]
        inside = _relative(pace, levels[worse], theirs)[slow.shares(pace.at_s) > 0]
        slow = replace(slow, factor=max(float(np.exp(np.nanmedian(inside))), 1.0))
    points = [
        _Points(effect[0], pace.at_s, pace.middle_s, level, side.requests.worker[pace.request])
        for effect, pace, level, side in zip(effects, (base, suspect), levels, sides, strict=True)
    ]
    return _Compared(ratio, slow, num_compared, source, points)


def _relative(pace: Pace, level: F64, usual: Mapping[float, float]) -> F64:
    """Log of each step time over what is usual at its level; NaN where that is not known."""
    levels = np.unique(level)
    known = np.array([usual.get(float(x), np.nan) for x in levels])
    relative: F64 = np.log(np.maximum(pace.step_s, 1e-9) / known[np.searchsorted(levels, level)])
    return relative


def _designed(steps: StepFacts) -> Bool:
    """[m] steps that know how long they took and what they did."""
    known = np.isfinite(steps.duration_s) & (steps.duration_s > 0)
    return known & np.isfinite(steps.get("prefill_tokens")) & np.isfinite(steps.get("decode_tokens"))


def step_design(steps: StepFacts) -> tuple[F64, F64, F64]:
    """(duration, [1, prefill tokens, decode tokens], end) of the steps that know them."""
    prefill, decode = steps.get("prefill_tokens"), steps.get("decode_tokens")
    known = _designed(steps)
    columns = [np.ones(int(known.sum())), prefill[known], decode[known]]
    return steps.duration_s[known], np.stack(columns, axis=1), steps.at_s[known]


def _workers_of(steps: StepFacts, side: _Side) -> I64:
    """[m] code of each step's worker into the names of the window's requests, -1 where no request names it."""
    names = list(side.requests.worker_names)
    place = [names.index(name) if name in names else -1 for name in steps.worker_names]
    return np.array([*place, -1], dtype=np.int64)[steps.worker]


def _compare_steps(base_side: _Side, suspect_side: _Side, suspect_is_worse: bool) -> _Compared | None:
    """Step times over what the baseline's fit says of their work."""
    base, suspect = base_side.steps, suspect_side.steps
    if base is None or suspect is None:
        return None
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
    effects = [
        (np.log(np.maximum(duration, 1e-9) / np.maximum(predicted, 1e-9)), at)
        for duration, predicted, at in (
            (duration_b, predicted_b, at_b),
            (duration_s[inside], predicted_s, at_s[inside]),
        )
    ]
    ratio = compare(*(drift(*effect) for effect in effects))
    if ratio is None:
        return None
    workers = (
        _workers_of(base, base_side)[_designed(base)],
        _workers_of(suspect, suspect_side)[_designed(suspect)][inside],
    )
    points = [
        _Points(effect, at, at - duration / 2, work[:, 2], worker)
        for (effect, at), duration, work, worker in zip(
            effects, (duration_b, duration_s[inside]), (work_b, work_s[inside]), workers, strict=True
        )
    ]
    return _Compared(ratio, _spell(effects, int(suspect_is_worse)), int(inside.sum()), "steps", points)


def _spell(effects: Sequence[tuple[F64, F64]], worse: int) -> Spell | None:
    """A slow spell of the worse of two windows, each (log of step time over the usual, instant).

    Spans of as many steps find it where the load comes and goes; slow steps are few, so a spell of much slower ones fills one such span
    or two, and is found in spans of as much time. Where both find one, the cut that leaves less scatter fits its borders better.
    """
    found = []
    for cut in (drift, drift_by_time):
        drifts = [cut(*effect, SPANS) for effect in effects]
        found.append(spell(drifts[worse], drifts[1 - worse]))
    return min((one for one in found if one is not None), key=lambda one: one.noise, default=None)


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
        duration, work, _ = step_design(base.steps)
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
