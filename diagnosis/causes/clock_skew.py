"""Clocks that cannot agree: what joins instants of two machines, or of one before and after its clock was set, is off."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.checks.check import Check
from diagnosis.checks.clocks import OUTSIDE, Skew, skews
from diagnosis.claims.evidence_sql import request_pairs_sql
from diagnosis.facts import Facts
from diagnosis.telling.wording import seconds

CERTAIN = 0.95
"""Strength: a bound that instants break leaves no doubt, but of which of the two clocks."""
BY_CLOCKS = "the checks of the data, from the instants of requests that both sides saw"


@cause("clock_skew", rows=())
def clock_skew(case: Case) -> Claim | Excluded | None:
    """Clocks differ by more than causality allows: events of two machines are joined at instants that are not the same.

    Why: a host without time synchronisation, a virtual machine that slept, a clock that was set in the middle of the window.
    Durations of one vantage stay right; what is off is whatever joins two: which block was stored before a request came, which
    worker was free when a request was routed, and windows cut by time.

    Refuted by: no request that came before it was sent, and no token that was seen before it was made, once the hosts are
    synchronised.

    Remedy:
    - host: chrony or PTP on every worker; check that the offset is under a millisecond (`chronyc tracking`)
    - fleet: take latencies from one vantage, and durations in place of differences of instants
    - application: stamp the arrival where the answer is stamped too

    Experiment: send a hundred requests to that worker from a synchronised host and compare arrivals at both ends; the least
    difference, less half of the round trip, is the skew.
    """
    found = [check for check in case.checks if check.contradicts and check.about == "clock"]
    if not found:
        told = [check for check in case.checks if check.check == "clocks" and check.value is not None]
        apart = max((check.value or 0.0 for check in told), default=0.0)
        return Excluded(
            f"0 requests came before they were sent; clocks are {seconds(apart)} apart at most where they were compared"
        )
    subject = next((check.subject for check in found if check.subject is not None), None)
    evidence = [each for check in found for each in _evidence(case, check)]
    return Claim(evidence, ("fleet", None) if subject is None else ("worker", subject), strength=CERTAIN)


def _evidence(case: Case, check: Check) -> list[Evidence]:
    facts = next((f for f in (case.base, case.suspect) if check.statement.startswith(f"{f.name}: ")), case.suspect)
    if check.check != "clocks":
        return [Evidence(check.statement, check.value, check.unit, computed_by=BY_CLOCKS)]
    worst = skews(facts)[0]
    return [Evidence(check.statement, worst.by_s, "s", _sql(case, facts, worst), _impossible(facts, worst), BY_CLOCKS)]


def _sql(case: Case, facts: Facts, skew: Skew) -> str | None:
    """How much earlier than it can be one request in twenty came, or its first token."""
    ahead_ns = facts.requests.engine_ahead_ns
    instant, order = (
        ("first_token_ns", "mine.{0} - theirs.{0}")
        if skew.low_s == skew.by_s
        else ("arrival_ns", "theirs.{0} - mine.{0}")
    )
    moved_ns = ahead_ns if instant == "first_token_ns" else -ahead_ns
    least = f"quantile_disc({order.format(instant)}{f' + {moved_ns}' if moved_ns else ''}, {OUTSIDE})"
    return request_pairs_sql(case, facts, f"-{least} / 1e9 AS impossible_s", skew.worker)


def _impossible(facts: Facts, skew: Skew, limit: int = 5) -> list[str]:
    """Requests that cannot have been as these clocks say."""
    r = facts.requests
    way = (r.first_token_s - r.engine_first_s) if skew.low_s == skew.by_s else (r.engine_arrival_s - r.arrival_s)
    rows = [row for row in way.argsort() if r.worker_names[r.worker[row]] == skew.worker and way[row] < 0]
    return [str(r.request_id[row]) for row in rows[:limit]]
