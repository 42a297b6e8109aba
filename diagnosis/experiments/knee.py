"""A sweep over load: the knee, where P99 TTFT starts to break.

Definition: P99 breaks where it exceeds the limit: the SLO where one is given, else `BREAKS_AT` times the P99 of the lowest
load. The knee is the highest load below the first that breaks. It is `sure` where the breaking level's whole interval lies
above the limit and the knee's lies below it; levels between knee and break are narrowed down by `next_level`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diagnosis.claims.offered_load import BREAKS_AT
from diagnosis.experiments.resampling import Estimate
from diagnosis.experiments.summary import ArmSummary
from diagnosis.telling.wording import seconds

TAIL_SHARE = 0.01
"""P99 leaves one of a hundred out."""


@dataclass(frozen=True, slots=True)
class Level:
    """One load: what was offered (requests/s, or requests in flight) and what came of it."""

    load: float
    summary: ArmSummary

    @property
    def p99(self) -> Estimate:
        return self.summary.latency["ttft"]["p99"]


@dataclass(frozen=True, slots=True)
class Knee:
    """load: the knee; None where the lowest load breaks already, or nothing breaks (`breaks_at` says which).

    limit_s      what P99 may be, and why: `rule`
    breaks_at    the first load that breaks; None where none does
    is_sure      the intervals on both sides of the limit do not hold it
    """

    load: float | None
    breaks_at: float | None
    limit_s: float | None
    rule: str
    is_sure: bool
    sentence: str


def find_knee(levels: Sequence[Level], slo_s: float | None, unit: str) -> Knee:
    """Levels in any order. slo_s: limit of P99 TTFT; None: twice that of the lowest load. unit: of the load, for the sentence."""
    ordered = sorted(levels, key=lambda level: level.load)
    lowest = ordered[0].p99.value if ordered else None
    limit = slo_s if slo_s is not None else None if lowest is None else BREAKS_AT * lowest
    rule = (
        f"P99 TTFT above the SLO of {slo_s:g} s"
        if slo_s is not None
        else f"P99 TTFT above {BREAKS_AT:g} times that of the lowest load"
    )
    if limit is None:
        return Knee(
            None,
            None,
            None,
            rule,
            False,
            "No request of the lowest load tells a first token, so there is no knee to find.",
        )
    first = next((i for i, level in enumerate(ordered) if breaks(level, limit)), None)
    if first is None:
        most = ordered[-1].load
        text = f"P99 does not break up to {most:g} {unit}; the knee lies higher."
        return Knee(None, None, limit, rule, False, text)
    if first == 0:
        text = f"P99 is above its limit at the lowest load already ({ordered[0].load:g} {unit}); begin lower."
        return Knee(None, ordered[0].load, limit, rule, _surely_above(ordered[0].p99, limit), text)
    knee, broken = ordered[first - 1], ordered[first]
    lost = broken.summary.num_unfinished
    sure = (lost > 0 or _surely_above(broken.p99, limit)) and _surely_below(knee.p99, limit)
    unfinished = f", where {lost:,} of {broken.summary.num_requests:,} calls got no answer" if lost else ""
    text = (
        f"The knee is at {knee.load:g} {unit}: P99 TTFT is {seconds(knee.p99.value)} there and {seconds(broken.p99.value)} at "
        f"{broken.load:g}{unfinished} (limit {seconds(limit)})"
        + ("." if sure else "; the intervals still hold the limit, so more requests or repeats would move it.")
    )
    return Knee(knee.load, broken.load, limit, rule, sure, text)


def breaks(level: Level, limit_s: float) -> bool:
    """P99 is above the limit. A request that got no answer was slower than any: more than one of a hundred of them break it too."""
    lost = level.summary.num_unfinished / max(level.summary.num_requests, 1)
    return level.p99.value is None or level.p99.value > limit_s or lost > TAIL_SHARE


def next_level(levels: Sequence[Level], slo_s: float | None, *, whole: bool, narrow_to: float = 1.15) -> float | None:
    """The load to try next: double until P99 breaks, then halve the gap (in ratio) until it is below `narrow_to`; None: done.

    whole   loads are whole numbers (requests in flight)
    """
    knee = find_knee(levels, slo_s, "")
    if knee.limit_s is None:
        return None
    if knee.breaks_at is None:
        return max(level.load for level in levels) * 2
    if knee.load is None or knee.breaks_at / knee.load <= narrow_to:
        return None
    middle = math.sqrt(knee.load * knee.breaks_at)
    tried = float(round(middle)) if whole else float(f"{middle:.3g}")
    return tried if knee.load < tried < knee.breaks_at else None


def _surely_above(p99: Estimate, limit_s: float) -> bool:
    return p99.interval_95 is not None and p99.interval_95[0] > limit_s


def _surely_below(p99: Estimate, limit_s: float) -> bool:
    return p99.interval_95 is not None and p99.interval_95[1] < limit_s
