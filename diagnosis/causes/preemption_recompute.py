"""Running requests gave their blocks back and computed again."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import counter_sql, event_where, request_sql, sum_sql
from diagnosis.facts import Facts
from diagnosis.sampled import num_requests, sampled_words, total
from diagnosis.telling.wording import number, percent, seconds


@cause(
    "preemption_recompute",
    needs=("sample.preemptions_total|request.num_preemptions|step.num_preempted",),
    rows=("preemption_recompute",),
)
def preemption_recompute(case: Case) -> Claim | Excluded | None:
    """Running requests were preempted: they stalled, and what they had computed was computed again.

    Why: decoding needs new blocks; when none is free the scheduler takes them from a running request, which starts over later.
    Its own hits after that are self hits and never count as prefix hits.

    Refuted by: a preemption counter that stands still; stalls in requests that were never preempted.

    Remedy:
    - vLLM: more KV blocks (--gpu-memory-utilization, --num-gpu-blocks-override) or fewer seats (--max-num-seqs), so that what is admitted also fits
    - vLLM: --kv-cache-dtype fp8 halves the blocks a token needs
    - application: lower max_tokens, or state it truthfully, so that long answers are not admitted into a full pool

    Experiment: halve --max-num-seqs on one worker; preemptions should stop there at the price of a longer queue.
    """
    facts = case.suspect
    before, (suspect, sql) = _preemptions(case, case.base)[0], _preemptions(case, facts)
    if not suspect:
        return Excluded(f"{number(suspect or 0)} preemptions in the {case.suspect_word}")
    n = num_requests(facts.requests)
    stalls = case.suspect_ledger.column("preemption_recompute")
    then = "" if before is None else f", {number(before)} in the {case.base_word}"
    evidence = [
        Evidence(
            f"{number(suspect)} preemptions in {number(round(n))} requests of the {case.suspect_word} ({percent(suspect / n)}){then}"
            + sampled_words(facts.requests.sample_rate),
            suspect,
            "preemptions",
            sql,
            case.worst_requests("preemption_recompute"),
        )
    ]
    if (stalls > 0).any():
        evidence.append(
            Evidence(
                f"{number(int((stalls > 0).sum()))} requests lost {seconds(float(stalls[stalls > 0].mean()))} each on average to stalls and recomputing",
                float(stalls.sum()),
                "s",
                None,
                case.worst_requests("preemption_recompute"),
            )
        )
    own = total(facts.requests, "self_hit_tokens")
    if own:
        evidence.append(
            Evidence(
                f"{number(own)} tokens of their own were found again by preempted requests: self hits, no reuse across requests",
                own,
                "tokens",
                request_sql(case, facts, f"{sum_sql(facts, 'self_hit_tokens')} AS tokens", "self_hit_tokens"),
            )
        )
    exact = "request.num_preemptions" in facts.visible or "step.recomputed_tokens" in facts.visible
    return Claim(
        evidence, case.worker_subject("preemption_recompute"), case.when("preemption_recompute"), 1.0 if exact else 0.8
    )


def _preemptions(case: Case, facts: Facts) -> tuple[float | None, str | None]:
    """Preemptions in a window and their SQL: from the counter, else from requests, else from steps; None where none tells."""
    counted = facts.samples.get("preemptions_total")
    if counted is not None:
        return counted, counter_sql(case, facts, "preemptions_total")
    told = total(facts.requests, "num_preemptions")
    if told is not None:
        summed = f"{sum_sql(facts, 'num_preemptions')} AS preemptions"
        return told, request_sql(case, facts, summed, "num_preemptions")
    if facts.steps is not None and np.isfinite(facts.steps.get("num_preempted")).any():
        sql = f"SELECT sum(num_preempted) AS preemptions FROM step WHERE {event_where(case, facts)}"
        return float(np.nansum(facts.steps.get("num_preempted"))), sql
    return None, None
