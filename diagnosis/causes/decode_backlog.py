"""Prefilled requests queue at the decode workers of a split fleet."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import event_where, text
from diagnosis.claims.handover import cost, decode_worker, load_grew, quiet, spent
from diagnosis.facts import Facts
from diagnosis.telling.wording import number, seconds

ROW = "decode_queue"
WAITING = "waiting for a seat at the decode worker"


@cause("decode_backlog", needs=("transfer.wait_s",), rows=(ROW, "decode_bandwidth"))
def decode_backlog(case: Case) -> Claim | Excluded | None:
    """Prefilled requests waited for a seat at the decode workers, their KV there or not yet sent, and batches there were full.

    Why: too few workers decode for what is prefilled, or answers got longer: a seat is held until the answer ends. TPOT goes up and
    TTFT stays, whatever the prefill workers could still take.

    Refuted by: a queue at the prefill workers that grew instead; free seats at the decode workers; KV that had not arrived though seats were
    free (then it is the wire, room, or orchestration); more arrivals in all (then fuller batches are the load's).

    Remedy:
    - fleet: let more workers decode and fewer prefill, until both are as busy
    - Dynamo: the planner moves workers from one to the other
    - vLLM: --max-num-seqs higher on decode workers, where blocks and TPOT allow fuller batches
    - SGLang: --max-running-requests higher on decode workers
    - router: hand over to the worker with the most free seats
    - application: lower max_tokens and stop sequences give seats back earlier

    Experiment: make one prefill worker a decode worker for a quarter of an hour; TPOT must fall, and TTFT tells the price.
    """
    found = spent(case, ROW)
    now, base = case.suspect.handover, case.base.handover
    if found is None or now is None:
        return None
    if not found.grew:
        return Excluded(quiet(case, found, WAITING))
    workers = len(now.worker_names)
    evidence = [
        cost(case, ROW, WAITING, found),
        Evidence(
            f"{number(workers)} workers decoded"
            + ("" if base is None else f" ({number(len(base.worker_names))} in the {case.base_word})"),
            float(workers),
            "workers",
            computed_by="the workers that transfers went to",
        ),
    ]
    if now.seats:
        evidence.append(_seats(case, now.seats, {} if base is None else base.seats))
    running, before = _running(case.suspect), _running(case.base)
    if running is not None:
        evidence.append(
            Evidence(
                f"a step there served {number(running)} requests on average"
                + ("" if before is None else f" ({number(before)} in the {case.base_word})"),
                running,
                "requests",
                f"SELECT avg(num_running) AS running FROM step WHERE {event_where(case, case.suspect)} AND num_running > 0 "
                f"AND worker IN ({', '.join(map(text, now.worker_names))})",
            )
        )
    queues = [facts.requests.get("queue_s") for facts in (case.suspect, case.base)]
    if all(np.isfinite(queue).any() for queue in queues):
        prefill, prefill_before = (float(np.nanmean(queue)) for queue in queues)
        evidence.append(
            Evidence(
                f"at the prefill workers a request queued {seconds(prefill)} ({seconds(prefill_before)} in the {case.base_word})",
                prefill,
                "s",
                computed_by="the queue of the worker that prefilled each request",
            )
        )
    return Claim(
        evidence,
        decode_worker(now, ROW),
        case.when(ROW),
        rows=None if load_grew(case) is None else (ROW,),
    )


def _seats(case: Case, now: Mapping[str, int], before: Mapping[str, int]) -> Evidence:
    """How many requests the decode workers may run at once."""
    least = min(now, key=lambda worker: (now[worker], worker))
    then = f" ({number(before[least])} in the {case.base_word})" if least in before else ""
    return Evidence(
        f"{least} has seats for {number(now[least])} requests at once{then}",
        float(now[least]),
        "requests",
        computed_by="the worker's own settings",
    )


def _running(facts: Facts) -> float | None:
    """Requests in a step of the decode workers that had any, on average; None where no step tells."""
    steps, moves = facts.steps, facts.handover
    if steps is None or moves is None:
        return None
    codes = [code for code, name in enumerate(steps.worker_names) if name in moves.worker_names]
    running = steps.get("num_running")
    busy = np.isin(steps.worker, codes) & (running > 0) & (steps.at_s >= facts.start_s) & (steps.at_s < facts.end_s)
    return float(running[busy].mean()) if busy.any() else None
