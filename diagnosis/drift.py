"""Step time over time: whether one window's steps were slower than the other's, all the while or for a spell.

Idea: machines drift by the minute, so a window is cut into spans, and the scatter between spans, not the count of steps,
says how sure a ratio is. A slow-down that began or ended inside a window makes that scatter large and would hide itself; so
one run of neighbouring spans is looked for that stands out from the rest of its window and from all of the other window.

Invariant: a spell is never the whole window. Its bar is high, since many runs of spans are looked at: about one quiet pair
in a thousand passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from diagnosis.facts import F64

BLOCKS = 8
"""Spans of time a window is cut into to see how much step time drifts by itself."""
SIGMAS = 2.5
"""Standard errors a ratio of whole windows has to differ from 1 by: about 2 % of quiet pairs pass."""
SPELL_SIGMAS = 6.0
"""Standard errors that a spell has to stand out by, from its own window and from the other."""
SPELL_FLOOR = 0.20
"""Relative rise of step time below which no spell is spoken of."""
MIN_SPANS = 2
"""Spans that a spell holds at least, and leaves at least."""


@dataclass(frozen=True, slots=True)
class Spell:
    """A part of a window, s since its origin."""

    start_s: float
    end_s: float

    def holds(self, at_s: F64) -> np.ndarray:
        """Which instants lie in it; an unknown one does not."""
        return (at_s >= self.start_s) & (at_s < self.end_s)


@dataclass(frozen=True, slots=True)
class Drift:
    """Effect (log of step time over what is usual for the same work) of each span of a window, and where spans begin and end."""

    effect: F64
    edges: F64

    def __len__(self) -> int:
        return len(self.effect)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Suspect step time over baseline step time at equal work.

    noise  log scale: by how much it would have to differ from 1 to stand out      spell  where only a part of one window is slower
    """

    value: float
    noise: float
    spell: Spell | None = None


def drift(relative: F64, at_s: F64) -> Drift:
    """Median of `relative` [m] in each of BLOCKS spans with as many of the instants `at_s` each; unknown ones are left out."""
    known = np.isfinite(relative) & np.isfinite(at_s)
    relative, at_s = relative[known], at_s[known]
    if len(at_s) == 0:
        return Drift(np.empty(0), np.zeros(1))
    edges = np.quantile(at_s, np.linspace(0.0, 1.0, BLOCKS + 1))
    span = np.clip(np.searchsorted(edges, at_s, "right") - 1, 0, BLOCKS - 1)
    held = [k for k in range(BLOCKS) if (span == k).any()]
    effect = np.array([np.median(relative[span == k]) for k in held])
    return Drift(effect, np.append(edges[held], edges[-1] + 1e-9))


def compare(base: Drift, suspect: Drift) -> Ratio | None:
    """The ratio of two windows; of a spell in one of them where there is one. None where too few spans hold steps."""
    if min(len(base), len(suspect)) < BLOCKS // 2:
        return None
    found = _spell(suspect, base), _spell(base, suspect)
    if found[0] is not None and (found[1] is None or found[0].value >= found[1].value):
        return found[0]
    if found[1] is not None:
        return Ratio(1.0 / found[1].value, found[1].noise, found[1].spell)
    a, b = base.effect, suspect.effect
    error = float(np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b)))
    return Ratio(float(np.exp(b.mean() - a.mean())), SIGMAS * error)


def _spell(slow: Drift, other: Drift) -> Ratio | None:
    """The run of spans of one window that stands out from its rest and from the other window, if any does."""
    best: Ratio | None = None
    least = np.inf
    for first, stop in combinations(range(len(slow) + 1), 2):
        if not MIN_SPANS <= stop - first <= len(slow) - MIN_SPANS:
            continue
        inside, outside = slow.effect[first:stop], np.concatenate([slow.effect[:first], slow.effect[stop:]])
        groups = (inside, outside, other.effect)
        spread = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        sd = np.sqrt(spread / (sum(map(len, groups)) - len(groups)))
        rises = [inside.mean() - group.mean() for group in groups[1:]]
        noises = [SPELL_SIGMAS * sd * np.sqrt(1 / len(inside) + 1 / len(group)) for group in groups[1:]]
        stands_out = all(rise > max(noise, np.log1p(SPELL_FLOOR)) for rise, noise in zip(rises, noises, strict=True))
        if stands_out and spread < least:
            least = spread
            spell = Spell(float(slow.edges[first]), float(slow.edges[stop]))
            best = Ratio(float(np.exp(rises[1])), float(noises[1]), spell)
    return best
