"""Requests whose first token never came: right-censored at end - arrival, so their quantile is a range.

Idea: a client that gave up after 30 s waited at least 30 s; leaving it out would hide the worst of an incident. So an
unfinished request without a first token counts with what it waited at least, if that is no less than the median of
those that got one. One that ended sooner (refused, cancelled at once) says nothing about the tail: it widens the range
and stands in the ratio of unfinished requests.

Invariant: low_s <= the true quantile <= high_s, whatever became of the open waits; `high_s` None is "no upper limit".
A finished request without a first token is not censored, only unobserved. Definition: design section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diagnosis.facts import F64, Bool, Facts
from diagnosis.statistics.quantiles import nearest_rank
from diagnosis.telling.wording import number, percent, quantile_name, seconds

GOLDEN = 0.6180339887498949
"""Its multiples modulo 1 lie evenly, however many there are."""
METRICS = ("ttft", "e2e")
"""Metrics that begin with the arrival; TPOT has no meaning without a first token."""


@dataclass(frozen=True, slots=True)
class Range:
    """Where a quantile of one window lies, s. `high_s` None: nothing bounds it from above."""

    low_s: float
    high_s: float | None

    @property
    def open(self) -> bool:
        return self.high_s is None


@dataclass(frozen=True, slots=True)
class Waits:
    """What is known of one window's metric.

    seen      [m] values of the requests that have it, s
    at_least  [k] what the others waited at least, s
    """

    seen: F64
    at_least: F64

    def range(self, q: str) -> Range:
        """Where the quantile lies if the open waits ended at once, and if they had never ended."""
        low = nearest_rank(np.concatenate([self.seen, self.at_least]), q)
        high = nearest_rank(np.concatenate([self.seen, np.full(len(self.at_least), np.inf)]), q)
        return Range(low, high if np.isfinite(high) else None)

    def statement(self, name: str, metric: str, q: str) -> str | None:
        """One sentence where the range is one; None where nobody is censored."""
        if len(self.at_least) == 0:
            return None
        total = len(self.seen) + len(self.at_least)
        found = self.range(q)
        if found.high_s is None:
            where = f"is {seconds(found.low_s)} or more"
        elif found.high_s > found.low_s:
            where = f"lies between {seconds(found.low_s)} and {seconds(found.high_s)}"
        else:
            where = f"is {seconds(found.low_s)} all the same"
        share = percent(len(self.at_least) / total)
        return (
            f"{name}: {number(len(self.at_least))} of {number(total)} requests ({share}) ended without a first token, after "
            f"{seconds(float(np.median(self.at_least)))} in the median; {quantile_name(q)} {metric} {where}"
        )


def at_least_s(facts: Facts) -> F64:
    """End - arrival of unfinished requests without a first token, [n]; NaN for all others."""
    r = facts.requests
    waited = r.end_s - r.arrival_s
    censored = ~r.finished & ~np.isfinite(r.first_token_s) & np.isfinite(waited) & (waited >= 0)
    return np.where(censored, waited, np.nan)


def waits(facts: Facts, metric: str, values: F64) -> Waits:
    """Split a window's requests into those that have the metric (`values` [n], NaN unknown) and those still waiting at their end."""
    seen = values[np.isfinite(values) & (values >= 0)]
    if metric not in METRICS:
        return Waits(seen, np.empty(0))
    at_least = at_least_s(facts)
    return Waits(seen, at_least[np.isfinite(at_least)])


def counted(values: F64, at_least: F64) -> Bool:
    """Which censored requests [n] count with what they waited: those at or above the median of the known values."""
    known = values[np.isfinite(values) & (values >= 0)]
    level = float(np.median(known)) if len(known) else 0.0
    return np.isfinite(at_least) & (np.nan_to_num(at_least) >= level)


def stand_in(values: F64, censored: Bool) -> F64:
    """Lengths [n] with the unknown ones of censored requests filled in by the window's own known lengths, spread evenly.

    A request that never got a token has no answer length, and would be a kind of request that no other window has.
    """
    missing = np.flatnonzero(censored & ~np.isfinite(values))
    known = np.sort(values[np.isfinite(values)])
    if len(missing) == 0 or len(known) == 0:
        return values
    share = (np.arange(len(missing)) + 0.5) / len(missing)
    order = np.argsort(np.arange(len(missing)) * GOLDEN % 1.0)  # so that lengths do not follow the time
    filled = values.copy()
    filled[missing[order]] = known[(share * len(known)).astype(np.int64)]
    return filled
