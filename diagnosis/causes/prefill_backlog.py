"""Prompts queue at the prefill workers of a split fleet."""

from __future__ import annotations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import request_sql
from diagnosis.claims.handover import busy_share, busy_sql, load_grew, spent
from diagnosis.facts import Facts
from diagnosis.sampled import total
from diagnosis.telling.wording import number, percent, seconds

ROWS = ("queue_load", "queue_seats", "queue_budget", "shared_prefill")
RISE = threshold(
    "prefill_backlog.rise",
    least=0.001,
    unit="s",
    says="rise of the mean queue at the prefill workers",
    why="less is a scheduler's own scatter",
)


@cause("prefill_backlog", needs=("transfer.wait_s", "request.queue_s"), rows=ROWS)
def prefill_backlog(case: Case) -> Claim | Excluded | None:
    """Prompts queued at the prefill workers, while those who decode kept up.

    Why: the split between workers that prefill and workers that decode no longer fits the traffic: too few prefill, or prompts have more
    to compute. TTFT goes up and TPOT stays, whatever the decode workers could still take.

    Refuted by: a queue at the decode workers that grew instead; prefill workers with idle time; more arrivals in all (then it is the load).

    Remedy:
    - fleet: let more workers prefill and fewer decode, until both are as busy
    - Dynamo: the planner moves workers from one to the other
    - vLLM: --max-num-batched-tokens higher on prefill workers; they have no TPOT to keep
    - SGLang: --chunked-prefill-size larger on prefill workers
    - router: send short prompts to decode workers whole, where these have time
    - application: shorter prompts, and prefixes that the prefill workers' caches hold

    Experiment: make one decode worker a prefill worker for a quarter of an hour; TTFT must fall, and TPOT tells the price.
    """
    found = spent(case, "decode_queue")
    queue, before = _queue(case.suspect), _queue(case.base)
    if found is None or queue is None:
        return None
    then = "" if found.before_s is None else f" ({seconds(found.before_s)})"
    said = (
        f"a request queued {seconds(queue)} at the prefill workers on average"
        + ("" if before is None else f" ({seconds(before)} in the {case.base_word})")
        + f"; at the decode workers it was {seconds(found.now_s)}{then}"
    )
    if not RISE.is_reached(queue - (before or 0.0)):
        return Excluded(said)
    grown = load_grew(case)
    if grown is not None:
        return Excluded(f"more arrived in all: {grown}; {said}")
    workers, workers_before = len(case.suspect.requests.worker_names), len(case.base.requests.worker_names)
    evidence = [
        Evidence(
            said,
            queue,
            "s",
            request_sql(case, case.suspect, "avg(queue_s) AS mean_queue_s", "queue_s"),
            case.worst_requests("queue_load") or case.worst_requests("queue_budget"),
        ),
        Evidence(
            f"{number(workers)} workers prefilled ({number(workers_before)} in the {case.base_word})",
            float(workers),
            "workers",
            computed_by="the workers that requests were prefilled at",
        ),
    ]
    tokens, tokens_before = (_tokens_a_worker(facts) for facts in (case.suspect, case.base))
    if tokens is not None:
        evidence.append(
            Evidence(
                f"each had {number(round(tokens))} prompt tokens a second to compute"
                + ("" if tokens_before is None else f" ({number(round(tokens_before))} in the {case.base_word})"),
                tokens,
                "tokens/s",
                computed_by="the requests' computed tokens over the window and its prefill workers",
            )
        )
    names = [name for name in case.suspect.requests.worker_names if name is not None]
    decoding = () if case.suspect.handover is None else case.suspect.handover.worker_names
    busy, others = busy_share(case.suspect, names), busy_share(case.suspect, decoding)
    if busy is not None and others is not None:
        evidence.append(
            Evidence(
                f"prefill workers were in a step {percent(busy)} of the time, decode workers {percent(others)}",
                busy,
                "ratio",
                busy_sql(case, names),
            )
        )
    return Claim(evidence, case.worker_subject("queue_load"), case.when("queue_load"))


def _queue(facts: Facts) -> float | None:
    queue = facts.requests.get("queue_s")
    return float(np.nanmean(queue)) if np.isfinite(queue).any() else None


def _tokens_a_worker(facts: Facts) -> float | None:
    tokens = total(facts.requests, "computed_tokens")
    return None if tokens is None else tokens / max(facts.offered_s, 1e-9) / max(len(facts.requests.worker_names), 1)
