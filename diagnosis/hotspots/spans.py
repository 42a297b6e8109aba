"""The span of one hotspot: neighbouring intervals in alarm, the decisions in them, its instants, and what those decisions lost.

Intervals in which the same is found are one hotspot, one quiet interval between them is bridged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diagnosis.facts import I64, Bool
from diagnosis.hotspots.detection import Detected
from diagnosis.hotspots.intervals import LONG
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Regret


def runs(flags: Bool) -> Iterator[tuple[int, int]]:
    """(first, last) of the flagged intervals, those with one between them joined."""
    first = last = -1
    for index in np.flatnonzero(flags).tolist():
        if first >= 0 and index - last > 2:
            yield first, last
            first = index
        first = index if first < 0 else first
        last = index
    if first >= 0:
        yield first, last


def rows_in(detected: Detected, first: int, last: int) -> I64:
    """Decisions of these intervals."""
    return np.flatnonzero((detected.of >= first) & (detected.of <= last))


def instants(
    seen: Observed, detected: Detected, first: int, last: int, at_once: Bool | None = None
) -> tuple[int, int, int]:
    """(start, end, end of the first test that found it) in ns; at_once: intervals that told it alone, None: all did."""
    found = first
    if at_once is not None:
        alone = np.flatnonzero(at_once[first : last + 1])
        found = min((first // LONG + 1) * LONG, detected.num) - 1
        found = min(found, first + int(alone[0])) if len(alone) else found

    def at(edge: int) -> int:
        return seen.origin_ns + round(float(detected.edges_s[edge]) * 1e9)

    return at(first), at(last + 1), at(found + 1)


def cost_of(regret: Regret, rows: I64) -> tuple[float | None, float | None]:
    """(seconds that these decisions lost, their share of all that was lost)."""
    lost = regret.seconds[rows]
    if not np.isfinite(lost).any():
        return None, None
    total = float(np.nansum(lost))
    return total, share_of_all(regret, total)


def share_of_all(regret: Regret, part: float) -> float | None:
    """Of all the seconds that routing lost; None where it lost none, or where `part` is told by more than regret, and is more."""
    total = float(np.nansum(regret.seconds))
    return min(part / total, 1.0) if total > 0.0 and part <= total * (1.0 + 1e-9) else None
