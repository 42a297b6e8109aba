"""Callers gave up and asked again: the time of the attempts before counts."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import num_requests_sql, request_sql
from diagnosis.facts import Facts
from diagnosis.telling.wording import number, percent, seconds


@cause("client_retries", needs=("request.retry_count",), rows=("client_retries",))
def client_retries(case: Case) -> Claim | Excluded | None:
    """Callers gave up early and asked again: what the attempts before had waited is lost, and their work was thrown away.

    Why: a timeout below the TTFT of busy moments turns a slow answer into several requests. Each is prefilled, aborted and comes back,
    so load rises just when there is no room for it. A caller waits for all its attempts; the engine sees each alone. Where callers alone
    tell, an attempt has no instant of its own: what counts is the wait beyond that of others who were answered at that time and asked
    once, and of k + 1 attempts k parts of it at most. Spans of an engine show attempts as requests of their own, and nobody's wait.

    Refuted by: as few retries as in the baseline; attempts whose engine times are as long as the caller's.

    Remedy:
    - application: a timeout above P99 TTFT, fewer attempts, pauses that grow and differ from caller to caller
    - fleet: retry in one place (gateway or caller, not both), with a budget of retries for each tenant
    - vLLM: shed load early (--max-num-queued-reqs), so that a refusal costs no prefill

    Experiment: double the timeout of half of the callers; their TTFT must fall, and the engine's load with it.
    """
    now, then = _share(case.suspect), _share(case.base)
    if now is None:
        return None
    spent = case.suspect_ledger.column("client_retries")
    before = 0.0 if then is None else then
    if now <= before or not (spent > 0).any():
        return Excluded(f"{percent(now)} of the requests were asked again ({percent(before)} in the {case.base_word})")
    again = case.suspect.requests.get("retry_count") > 0
    return Claim(
        [
            Evidence(
                f"{percent(now)} of the requests of the {case.suspect_word} were asked again ({percent(before)} in the {case.base_word})",
                now,
                "ratio",
                request_sql(
                    case, case.suspect, "count(*) FILTER (retry_count > 0) / count(retry_count) AS share", "retry_count"
                ),
                case.worst_requests("client_retries"),
            ),
            Evidence(
                f"{number(float(again.sum()))} requests came in more than one attempt, {number(float(np.nansum(case.suspect.requests.get('retry_count'))))} "
                "attempts were given up",
                float(again.sum()),
                "requests",
                request_sql(
                    case,
                    case.suspect,
                    f"{num_requests_sql(case.suspect)} AS requests",
                    "retry_count",
                    "retry_count > 0",
                )
                if case.suspect.requests.sample_rate is None
                else None,
            ),
            Evidence(
                f"the attempts before the last cost a request {seconds(float(spent.mean()))} on average, one that was asked again "
                f"{seconds(float(spent[spent > 0].mean()))}",
                float(spent.mean()),
                "s",
            ),
        ],
        ("fleet", None),
        case.when("client_retries"),
    )


def _share(facts: Facts) -> float | None:
    """Share of the requests that were asked again, of those that tell; None where none does."""
    count = facts.requests.get("retry_count")
    known = np.isfinite(count)
    return float((count[known] > 0).mean()) if known.any() else None
