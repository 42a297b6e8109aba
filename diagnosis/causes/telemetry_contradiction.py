"""Two numbers for one thing that cannot both be true."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.checks.check import Check
from diagnosis.claims.evidence_sql import counter_sql, event_where, request_sql, sum_sql
from diagnosis.telling.wording import number

CERTAIN = 0.95
"""What numbers are worth that exclude each other."""
BY_TIMES = ("hits_against_times", "hits_against_ttft")
LIKELY = 0.6
"""What one is worth that the times alone speak against: prefill could have become faster by just as much."""
HITS = "prefix_hits_tokens_total"
BY_CHECKS = "the checks of the data, from both windows' rows"


@cause("telemetry_contradiction", rows=())
def telemetry_contradiction(case: Case) -> Claim | Excluded | None:
    """Two numbers for one thing exclude each other: what changed, or stands at 0, is what is told and not what the engine did.

    Why: a counter that stands still or counts something else (self hits, retries), a gauge that nobody sets, a phase that is
    told twice, an exporter of another version. The same counter at 0 is true where nothing was reused; so it is held against
    the requests, the steps and the times.

    Refuted by: a third witness that bears out the number which is called wrong; the same two numbers agreeing once the exporter
    is fixed while the latency stays.

    Remedy:
    - vLLM: compare /metrics with one request's own usage (--enable-prompt-tokens-details tells its cached tokens)
    - fleet: trust requests and steps over the counter until it is fixed; take the alert off it
    - host: look for two exporters under one name, or one that was restarted without its engine

    Experiment: send the same prompt twice to one worker and read the counter before and after; the second must move it by the
    blocks that its own usage says were cached.
    """
    found = [check for check in case.checks if check.contradicts and check.about == "telemetry"]
    if not found:
        made = sum(check.about == "telemetry" for check in case.checks)
        return Excluded(f"{made} comparisons of counters, events, requests and times found 0 contradictions")
    strength = max(LIKELY if check.check in BY_TIMES else CERTAIN for check in found)
    return Claim([evidence for check in found for evidence in _evidence(case, check)], strength=strength)


def _evidence(case: Case, check: Check) -> list[Evidence]:
    """What the check says with its number, and where both sides of it can be read."""
    if check.check not in ("cached_tokens", "hit_counter", *BY_TIMES, "kv_usage"):
        return [Evidence(check.statement, check.value, check.unit, computed_by=BY_CHECKS)]
    facts = next((f for f in (case.base, case.suspect) if check.statement.startswith(f"{f.name}: ")), case.suspect)
    if check.check == "kv_usage":
        which = "min" if (check.value or 0.0) < 0 else "max"
        where = f"name = 'kv_usage_ratio' AND {event_where(case, facts)}"
        sql = (
            f"SELECT {which}(value) AS usage FROM sample WHERE {where}"
            if facts.samples.get("kv_usage_ratio:max")
            else None
        )
        return [Evidence(check.statement, check.value, check.unit, sql, computed_by=BY_CHECKS)]
    counted = facts.samples.get(HITS, 0.0)
    told = [Evidence(check.statement, counted, "tokens by the counter", counter_sql(case, facts, HITS))]
    if check.check == "cached_tokens":
        cached = case.total(facts, "cached_tokens") or 0.0
        said = f"the requests of {facts.name} say that they found {number(cached)} prompt tokens in the cache"
        sql = request_sql(case, facts, f"{sum_sql(facts, 'cached_tokens')} AS tokens", "cached_tokens")
        told.append(Evidence(said, cached, "tokens by the requests", sql))
    return told
