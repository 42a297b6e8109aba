"""Step time over time: whether one window's steps were slower than the other's, all the while or for a spell.

Idea: machines drift by the minute, so a window is cut into spans, and the scatter between spans, not the count of steps,
says how sure a ratio is. A slow-down that began or ended inside a window makes that scatter large, hides itself, or is charged
to requests that were long done; so one run of neighbouring spans is looked for that stands out from the rest of its window
and from all of the other window.

Invariant: a spell is never the whole window. Its bar is high, since many runs of spans are looked at: about one quiet pair
in a thousand passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.facts import F64

BLOCKS = 8
"""Spans of time a window is cut into to see how much step time drifts by itself."""
SIGMAS = 2.5
"""Standard errors a ratio of whole windows has to differ from 1 by: about 2 % of quiet pairs pass."""
SPANS = 16
"""Spans of time in which a spell is looked for. Its borders fall into spans, so the one before and the one behind it count as neither."""
SPELL_SIGMAS = 6.0
"""Standard errors that a spell has to stand out by, from its own window and from the other."""
SPELL = threshold(
    "slow_spell.above_noise",
    least=1.0,
    unit="ratio",
    says="rise of step time in a spell that is long and high enough over what scatter between spans explains",
    why="as far as scatter reaches in 999 of 1,000 quiet pairs (drift.SPELL_SIGMAS)",
)
SPELL_FLOOR = 0.20
"""Relative rise of step time below which no spell is spoken of: twice what a whole window has to be slower by, for spells are chosen."""
REST = 0.10
"""Relative rise of the rest of the window from which on it is the whole that is slower, and no spell of it."""
MIN_SPANS = 3
"""Spans that a spell holds at least, and leaves at least."""
FEWEST_OF_SPAN = 10
"""Steps (or gaps) of a span of time before its median is looked at."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Effect (log of step time over what is usual for the same work) of each span of a window; the k-th from edges[k] s on."""

    effect: F64
    edges: F64

    def __len__(self) -> int:
        return len(self.effect)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Suspect step time over baseline step time at equal work; `noise` (log scale): what it has to differ from 1 by to stand out."""

    value: float
    noise: float


@dataclass(frozen=True, slots=True)
class Spell:
    """A part of one window, s since its origin, in which the same step took `factor` times the other window's time.

    noise  log scale: by how much it had to differ from 1 to stand out
    """

    start_s: float
    end_s: float
    factor: float
    noise: float

    def shares(self, at_s: F64) -> F64:
        """Share of engine time that slower steps added, at each instant, [n]: 0 outside the spell, and where it is not known."""
        return np.where((at_s >= self.start_s) & (at_s < self.end_s), 1.0 - 1.0 / self.factor, 0.0)


def drift(relative: F64, at_s: F64, num_spans: int = BLOCKS) -> Drift:
    """Median of `relative` [m] in each of the spans with as many of the instants `at_s` each; unknown ones are left out."""
    relative, at_s = _known(relative, at_s)
    if len(at_s) == 0:
        return Drift(np.empty(0), np.zeros(1))
    return _cut(relative, at_s, np.quantile(at_s, np.linspace(0.0, 1.0, num_spans + 1)), 1)


def drift_by_time(relative: F64, at_s: F64, num_spans: int = BLOCKS) -> Drift:
    """The same in spans that last as long each; those with fewer than FEWEST_OF_SPAN are left out."""
    relative, at_s = _known(relative, at_s)
    if len(at_s) == 0:
        return Drift(np.empty(0), np.zeros(1))
    return _cut(relative, at_s, np.linspace(at_s.min(), at_s.max(), num_spans + 1), FEWEST_OF_SPAN)


def _known(relative: F64, at_s: F64) -> tuple[F64, F64]:
    known = np.isfinite(relative) & np.isfinite(at_s)
    return relative[known], at_s[known]


def _cut(relative: F64, at_s: F64, edges: F64, fewest: int) -> Drift:
    num_spans = len(edges) - 1
    span = np.clip(np.searchsorted(edges, at_s, "right") - 1, 0, num_spans - 1)
    held = [k for k in range(num_spans) if int((span == k).sum()) >= fewest]
    effect = np.array([np.median(relative[span == k]) for k in held])
    return Drift(effect, np.append(edges[held], edges[-1] + 1e-9))


def compare(base: Drift, suspect: Drift) -> Ratio | None:
    """The ratio of two whole windows; None where too few spans hold steps."""
    if min(len(base), len(suspect)) < BLOCKS // 2:
        return None
    a, b = base.effect, suspect.effect
    error = float(np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)))
    return Ratio(float(np.exp(b.mean() - a.mean())), SIGMAS * error)


def spell(slow: Drift, other: Drift) -> Spell | None:
    """The run of spans of one window that stands out from its rest and from the other window, if any does and the rest does not."""
    best: Spell | None = None
    least = np.inf
    if min(len(slow), len(other)) < SPANS // 2:
        return None
    SPELL.note(0.0)
    for first, stop in combinations(range(len(slow) + 1), 2):
        inside = slow.effect[first:stop]
        outside = np.concatenate([slow.effect[: max(first - 1, 0)], slow.effect[stop + 1 :]])
        if min(len(inside), len(outside)) < MIN_SPANS:
            continue
        groups = (inside, outside, other.effect)
        spread = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        sd = np.sqrt(spread / (sum(map(len, groups)) - len(groups)))
        rises = [float(inside.mean() - group.mean()) for group in groups[1:]]
        noises = [float(SPELL_SIGMAS * sd * np.sqrt(1 / len(inside) + 1 / len(group))) for group in groups[1:]]
        rest_is_usual = float(outside.mean() - other.effect.mean()) < np.log1p(REST)
        if min(rises) <= np.log1p(SPELL_FLOOR) or not rest_is_usual:
            continue
        above = min(rise / max(noise, 1e-12) for rise, noise in zip(rises, noises, strict=True))
        if SPELL.is_reached(above) and spread < least:
            least = spread
            half = float(inside.mean() + outside.mean()) / 2
            begin, end = first, stop  # spans at its borders belong to it where most of each was slow
            while begin > 0 and slow.effect[begin - 1] > half:
                begin -= 1
            while end < len(slow) and slow.effect[end] > half:
                end += 1
            best = Spell(float(slow.edges[begin]), float(slow.edges[end]), float(np.exp(rises[1])), noises[1])
    return best
