"""Step times of two windows at equal work: their ratio, and a slow spell of the worse one.

By the steps themselves, else by the gaps between tokens or the requests' means at equal concurrency; at equal context where that is longer
in what is slower (`contexts.py`); judged against the drift of step time inside each window (`drift.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from diagnosis.calibration import all_reached, threshold
from diagnosis.facts import F64, I64, Facts, StepFacts
from diagnosis.ledger.contexts import at_equal_context, beyond_context, grew, mean_contexts
from diagnosis.ledger.drift import SPANS, Ratio, Spell, compare, drift, drift_by_time, spell
from diagnosis.ledger.pace import Pace, mean_gaps, quiet_gaps, running_of
from diagnosis.ledger.stalls import preempted_by_count
from diagnosis.ledger.step_costs import MIN_LEVEL, designed, step_costs, step_design

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


def stands_out(ratio: Ratio) -> bool:
    apart = abs(float(np.log(ratio.value)))
    return all_reached((SLOWER, float(np.expm1(apart))), (ABOVE_DRIFT, apart / max(ratio.noise, 1e-12)))


@dataclass(frozen=True, slots=True)
class Compared:
    """Step times of both windows at equal work: their ratio, a slow spell of the worse one, and what was compared.

    points   of both windows, what was compared
    """

    ratio: Ratio | None
    spell: Spell | None
    num_compared: int
    source: str | None
    points: Sequence[Points] = ()


@dataclass(frozen=True, slots=True)
class Points:
    """Compared steps, gaps or requests of a window, [m] each.

    effect   log of step time over what is usual for its sequences   at_s: its end, middle_s: its middle
    worker   code into the names of the window's requests, -1 unknown
    """

    effect: F64
    at_s: F64
    middle_s: F64
    sequences: F64
    worker: I64


class Side:
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


def compared(base: Side, suspect: Side, *, suspect_is_worse: bool) -> Compared:
    found = _compare_steps(base, suspect, suspect_is_worse)
    if found is None:
        found = _compare_levels(base, suspect, "token gaps", suspect_is_worse)
    if found is None:
        found = _compare_levels(base, suspect, "mean gap per request", suspect_is_worse)
    if found is None:
        return Compared(None, None, 0, None)
    return _in_context(base, suspect, found, int(suspect_is_worse))


def _in_context(base: Side, suspect: Side, found: Compared, worse: int) -> Compared:
    """What was found, unless it is slow where contexts are longer: then at equal context, else beyond what contexts explain, else nothing."""
    if found.ratio is None or (found.spell is None and not stands_out(found.ratio)):
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
        return Compared(None, None, 0, None)
    still = slow is not None or (stands_out(ratio) and (ratio.value > 1.0) == (found.ratio.value > 1.0))
    if not is_equal and not still:
        return Compared(None, None, 0, None)
    return replace(found, ratio=ratio, spell=slow, num_compared=num_equal if is_equal else found.num_compared)


def _compare_levels(base_side: Side, suspect_side: Side, source: str, suspect_is_worse: bool) -> Compared | None:
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
        Points(effect[0], pace.at_s, pace.middle_s, level, side.requests.worker[pace.request])
        for effect, pace, level, side in zip(effects, (base, suspect), levels, sides, strict=True)
    ]
    return Compared(ratio, slow, num_compared, source, points)


def _relative(pace: Pace, level: F64, usual: Mapping[float, float]) -> F64:
    """Log of each step time over what is usual at its level; NaN where that is not known."""
    levels = np.unique(level)
    known = np.array([usual.get(float(x), np.nan) for x in levels])
    relative: F64 = np.log(np.maximum(pace.step_s, 1e-9) / known[np.searchsorted(levels, level)])
    return relative


def _workers_of(steps: StepFacts, side: Side) -> I64:
    """[m] code of each step's worker into the names of the window's requests, -1 where no request names it."""
    names = list(side.requests.worker_names)
    place = [names.index(name) if name in names else -1 for name in steps.worker_names]
    return np.array([*place, -1], dtype=np.int64)[steps.worker]


def _compare_steps(base_side: Side, suspect_side: Side, suspect_is_worse: bool) -> Compared | None:
    """Step times over what the baseline's fit says of their work."""
    base, suspect = base_side.steps, suspect_side.steps
    if base is None or suspect is None:
        return None
    duration_b, work_b, at_b = step_design(base)
    duration_s, work_s, at_s = step_design(suspect)
    if len(duration_b) < 3 * MIN_LEVEL or len(duration_s) < 3 * MIN_LEVEL:
        return None
    coefficients = step_costs(base)
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
        _workers_of(base, base_side)[designed(base)],
        _workers_of(suspect, suspect_side)[designed(suspect)][inside],
    )
    points = [
        Points(effect, at, at - duration / 2, work[:, 2], worker)
        for (effect, at), duration, work, worker in zip(
            effects, (duration_b, duration_s[inside]), (work_b, work_s[inside]), workers, strict=True
        )
    ]
    return Compared(ratio, _spell(effects, int(suspect_is_worse)), int(inside.sum()), "steps", points)


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
