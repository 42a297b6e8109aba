"""What lies between a caller and the engine, by the way: into the engine, back from it, or one of the two and nobody can tell which.

Idea: two clocks that are apart lengthen the one way by what they shorten the other, and do so for every request of a worker. So what a
way took beyond its own least is free of them. Of both least ways only the sum is. Where that sum is more than in the other window, and one
way takes at least as long as it did there, the other way has it: clocks that were set by just as much would be a coincidence. Where the
least of both moved, which of them it was is not told.

Invariant: the three parts sum to `network_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.facts import F64, Facts

OUTSIDE: Final = 0.01
"""Share of a worker's requests that may take less than the least: single wrong instants decide nothing."""
AS_BEFORE_S: Final = 0.002
"""By so much the least of a way may differ between windows and still be as before."""
AS_BEFORE: Final = 0.1
"""Or by this share of what the least of both ways grew."""


@dataclass(frozen=True, slots=True)
class Ways:
    """[n] seconds of each request on its way into the engine, on its first token's way back, and on one of the two; 0 where not known."""

    in_s: F64
    back_s: F64
    either_s: F64


def ways(facts: Facts, other: Facts | None = None) -> Ways:
    """The ways of one window's requests; without another window what the least of them takes is on either."""
    r = facts.requests
    between = np.nan_to_num(r.get("network_s"))
    into, back = np.zeros(len(r)), np.zeros(len(r))
    if not between.any():
        return Ways(into, back, between)
    there_s, back_s = _instants(facts)
    least, before = _least(facts), {} if other is None else _least(other)
    for code, rows in enumerate(r.by_worker()):
        name = r.worker_names[code]
        if name not in least or sum(least[name]) < -AS_BEFORE_S:  # a clock that was set within the window
            continue
        mine = rows[np.isfinite(there_s[rows]) & np.isfinite(back_s[rows])]
        more = _grew(least[name], before.get(name) or _usual(before))
        into[mine] = np.maximum(there_s[mine] - least[name][0], 0.0) + more[0]
        back[mine] = np.maximum(back_s[mine] - least[name][1], 0.0) + more[1]
    told = into + back
    fits = np.minimum(np.divide(between, told, out=np.ones(len(r)), where=told > 0), 1.0)
    return Ways(into * fits, back * fits, between - told * fits)


def _instants(facts: Facts) -> tuple[F64, F64]:
    """[n] seconds from the caller's arrival to the engine's, and from the engine's first token to the caller's, by two clocks as they are."""
    r = facts.requests
    moved_s = r.engine_ahead_ns / 1e9
    return r.engine_arrival_s - r.arrival_s + moved_s, r.first_token_s - r.engine_first_s - moved_s


def _least(facts: Facts) -> dict[str | None, tuple[float, float]]:
    """By worker the least way in and back, s, by two clocks; without workers of whom no request tells both."""
    found: dict[str | None, tuple[float, float]] = {}
    there_s, back_s = _instants(facts)
    for name, rows in zip(facts.requests.worker_names, facts.requests.by_worker(), strict=True):
        mine = rows[np.isfinite(there_s[rows]) & np.isfinite(back_s[rows])]
        if len(mine):
            rank = int(OUTSIDE * len(mine))
            found[name] = (
                float(np.partition(there_s[mine], rank)[rank]),
                float(np.partition(back_s[mine], rank)[rank]),
            )
    return found


def _usual(least: Mapping[str | None, tuple[float, float]]) -> tuple[float, float] | None:
    """The median of all workers, for one that the other window does not name."""
    if not least:
        return None
    into, back = np.median(list(least.values()), axis=0)
    return float(into), float(back)


def _grew(least: tuple[float, float], before: tuple[float, float] | None) -> tuple[float, float]:
    """What the least way in and the least way back took more than before, s; (0, 0) where which of them it was is not told."""
    if before is None:
        return 0.0, 0.0
    into, back = least[0] - before[0], least[1] - before[1]
    same = max(AS_BEFORE_S, AS_BEFORE * (into + back))
    if into + back <= 0.0 or (abs(into) > same and abs(back) > same):
        return 0.0, 0.0
    return (0.0, into + back) if abs(into) <= abs(back) else (into + back, 0.0)
