"""How much more load one window was offered than the other, and whether that was past the knee.

Idea: who sends without waiting for answers offers arrivals a second. Callers that send the next request when an answer comes (a load test
at a fixed concurrency) offer requests in flight: past the knee their arrivals follow what the server gives, and may even fall.

Past the knee more load makes requests wait more than in proportion, before the engine or in its queue: a server that has capacity left
makes them wait as little as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.cause import Case, rate_per_s
from diagnosis.facts import Facts
from diagnosis.statistics.quantiles import nearest_rank

BREAKS_AT: Final = 2.0
"""Times the quantile at the lower load, from which on a higher one is past the knee: waiting that doubles is what callers notice."""
SEVERAL: Final = 2.0
"""Times the load, from which on it can be past the knee of a server that was far below it."""
MOSTLY: Final = 0.5
"""Share of the change that must be waiting for a place."""
QUEUES: Final = ("queue_load", "queue_seats", "queue_budget")
HIDDEN: Final = ("queue_unobserved", "ttft_unobserved")
"""Rows in which that waiting stands where nobody tells of phases, or of what bound the queue."""
PLACES: Final = ("front_end", *QUEUES, *HIDDEN)
"""Rows of waiting for a place: at the front end, in the engine's queue, or where that cannot be told apart."""

MOSTLY_NAMED: Final = 0.5
"""Share of a window's requests that must name their worker before its workers are counted."""

FEWEST: Final = 100
"""Requests of a window before it is said to be a closed loop."""
LEAST_IN_FLIGHT: Final = 4
"""Fewer at once come by chance as evenly."""
DISPERSION: Final = 0.25
"""Variance over mean of the requests in flight: 1 where callers come on their own, 0 where an answer brings the next request."""
AT_ONCE: Final = 0.2
"""Share of a mean gap within which the next request follows an answer; of callers on their own half take 0.7 of one (ln 2)."""
EVEN: Final = 0.1
"""Scatter over mean of the gaps below which arrivals come by a clock, and not with answers."""


@dataclass(frozen=True, slots=True)
class Load:
    """Of each worker, (baseline, suspect window): arrivals a second, or requests in flight where `is_closed`."""

    before: float
    now: float
    is_closed: bool

    @property
    def factor(self) -> float:
        return self.now / self.before


@dataclass(frozen=True, slots=True)
class PastKnee:
    """The load, the judged quantile in both windows (s), and the mean wait for a place in both (s), of which `front_s` at the front end and
    `hidden_s` where nobody can look."""

    load: Load
    quantile_s: tuple[float, float]
    wait_s: tuple[float, float]
    front_s: float
    hidden_s: float


def num_workers(base: Facts, suspect: Facts) -> tuple[int, int]:
    """Workers of both windows that served, or could have: those that decode what others prefilled, and those that were there and got
    nothing, are among them. (1, 1) where most requests of a window do not name theirs; a few that do not (lost rows) are no worker."""
    if min(_named_share(base), _named_share(suspect)) < MOSTLY_NAMED:
        return 1, 1
    return _num_workers(base), _num_workers(suspect)


def _num_workers(facts: Facts) -> int:
    names = {*facts.requests.worker_names, *(() if facts.handover is None else facts.handover.worker_names)} - {None}
    there = 0 if facts.routing is None else facts.routing.num_workers
    return max(len(names | facts.scraped_workers), there, 1)


def _named_share(facts: Facts) -> float:
    """Share of the requests that name their worker."""
    named = np.array([name is not None for name in facts.requests.worker_names], dtype=bool)
    return float(named[facts.requests.worker].mean()) if len(facts.requests) else 0.0


def offered_load(base: Facts, suspect: Facts) -> Load:
    """By requests in flight where both windows are closed loops, else by arrivals a second."""
    workers = num_workers(base, suspect)
    flying = in_flight(base), in_flight(suspect)
    if flying[0] is not None and flying[1] is not None:
        return Load(flying[0] / workers[0], flying[1] / workers[1], True)
    return Load(rate_per_s(base) / workers[0], rate_per_s(suspect) / workers[1], False)


def in_flight(facts: Facts) -> float | None:
    """Requests in flight at once that callers keep up; None where requests do not follow answers, or too few or a sample are known."""
    r = facts.requests
    end = np.where(np.isfinite(r.last_token_s), r.last_token_s, r.end_s)
    if len(r) < FEWEST or r.sample_rate is not None or r.num_assumed or not np.isfinite(end).all():
        return None
    ends = np.sort(end)
    ended = np.searchsorted(ends, r.arrival_s, "right")
    others = np.arange(len(r)) - ended
    usual = float(np.median(others))
    if usual + 1 < LEAST_IN_FLIGHT:
        return None
    full = slice(int(np.argmax(others >= usual - 1)), None)  # the first ones come before any answer
    gaps = np.diff(r.arrival_s[full])
    since = (r.arrival_s - ends[np.maximum(ended - 1, 0)])[full]
    if len(gaps) < FEWEST // 2 or gaps.mean() <= 0 or gaps.std() < EVEN * gaps.mean():
        return None
    follows = float(np.median(since)) <= AT_ONCE * float(gaps.mean())
    steady = float(others[full].var()) <= DISPERSION * max(float(others[full].mean()), 1.0)
    return usual + 1 if follows and steady else None


def past_knee(case: Case) -> PastKnee | None:
    """Several times the load, a quantile that broke, and most of it a wait for a place that grew more than in proportion; else None."""
    load = offered_load(case.base, case.suspect)
    ledgers = (case.base_ledger, case.suspect_ledger)
    before_s, now_s = (nearest_rank(ledger.values, case.quantile) for ledger in ledgers)
    if load.factor < SEVERAL or now_s <= BREAKS_AT * before_s:
        return None
    waits = [sum(float(ledger.column(name).mean()) for name in PLACES) for ledger in ledgers]
    grew = float(ledgers[1].values.mean() - ledgers[0].values.mean())
    if waits[1] - waits[0] < MOSTLY * grew or waits[1] <= load.factor * waits[0]:
        return None
    front = float(ledgers[1].column("front_end").mean())
    hidden = sum(float(ledgers[1].column(name).mean()) for name in HIDDEN)
    return PastKnee(load, (before_s, now_s), (waits[0], waits[1]), front, hidden)
