"""Requests waited for seats while there was room for them."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.bound_wait import ROOM, bound_by, lowered, setting
from diagnosis.claims.evidence_sql import event_where
from diagnosis.claims.onset import waited_here_alone
from diagnosis.facts import Facts
from diagnosis.telling.wording import number, percent, seconds

BY_TIMES = 0.75
"""What it is worth where nobody tells whether the pool had room."""


@cause(
    "small_batch",
    needs=("step.waiting_on_seats|request.queue_s", "step.waiting_on_seats|worker.flags"),
    rows=("queue_seats",),
)
def small_batch(case: Case) -> Claim | Excluded | None:
    """Too few seats: requests queued behind full seats although the pool had room for them.

    Why: the engine admits no more requests at once than it has seats, however much KV memory is free. A seat is taken until the
    last token, so the queue moves only as fast as answers end. Claimed where there were fewer seats than in the baseline. Where no step
    tells what requests wait for, the workers' own settings and the requests' times do: all seats were taken meanwhile.

    Refuted by: as many seats as in the baseline (then more work, or slower work, filled them); a pool that was nearly full while
    requests waited; waiting that the scheduler put down to blocks or to the token budget.

    Remedy:
    - vLLM: raise --max-num-seqs to what the KV blocks can hold at the usual length of prompt and answer; watch TPOT and preemptions
    - SGLang: raise --max-running-requests likewise
    - llama.cpp: raise --parallel, and --ctx-size with it where slots share it
    - fleet: more workers, where fuller batches would make TPOT miss its target
    - application: shorter answers (max_tokens, stop sequences) give seats back earlier

    Experiment: raise --max-num-seqs by a half on one worker; its queue must go, and TPOT tells the price.
    """
    bound = bound_by(case.suspect, "seats")
    if bound is None:
        return _by_settings(case)
    if bound.num_steps == 0:
        return Excluded(f"in 0 of {number(bound.num_known)} steps a request waited for a seat")
    seats, before = _lowered(case) or (_seats(case.suspect), _seats(case.base))
    if seats is None or before is None:
        return None
    if seats >= before:
        return Excluded(
            f"there were {number(seats)} seats a worker ({number(before)} in the {case.base_word}): what filled them is another cause"
        )
    if not bound.had_room:
        return Excluded(
            f"while requests waited for seats {percent(bound.blocks_used)} of the blocks were in use, so more seats would not have "
            f"been served (up to {percent(ROOM)} there is room)"
        )
    waits = case.suspect_ledger.column("queue_seats")
    where = event_where(case, case.suspect)
    return Claim(
        [
            Evidence(
                f"in {number(bound.num_steps)} of {number(bound.num_known)} steps requests waited for a seat",
                float(bound.num_steps),
                "steps",
                f"SELECT count(*) AS steps FROM step WHERE waiting_on.seats > 0 AND {where}",
                case.worst_requests("queue_seats"),
            ),
            Evidence(
                f"a worker has {number(seats)} seats ({number(before)} in the {case.base_word})",
                float(seats),
                "seats",
                computed_by="the workers' own settings, else the most requests that one ran while others waited for a seat",
            ),
            Evidence(
                f"meanwhile {percent(bound.blocks_used)} of the KV blocks were in use in the median",
                bound.blocks_used,
                "ratio",
                f"SELECT median(blocks_used / blocks_total) AS used FROM step WHERE waiting_on.seats > 0 AND blocks_total > 0 AND {where}",
            ),
            Evidence(
                f"the wait behind full seats costs a request {seconds(float(waits.mean()))} on average",
                float(waits.mean()),
                "s",
            ),
        ],
        case.worker_subject("queue_seats"),
        case.when("queue_seats"),
        # where there were more seats hardly anybody waited for one: no draw of one traffic does that
        began=waited_here_alone(case, "queue_seats"),
    )


def _by_settings(case: Case) -> Claim | Excluded | None:
    """Where no step tells what requests wait for: fewer seats by the workers' settings, all taken while requests queued, and room."""
    seats = _lowered(case)
    if seats is None:
        return None
    waits = case.suspect_ledger.column("queue_seats")
    if not waits.any():
        return Excluded(
            f"a worker has {number(seats[0])} seats ({number(seats[1])} in the {case.base_word}), and nobody waited for one"
        )
    used = case.suspect.samples.get("kv_usage_ratio:max")
    if used is not None and used >= ROOM:
        return Excluded(f"up to {percent(used)} of the blocks were in use, so more seats might not have been served")
    room = (
        []
        if used is None
        else [
            Evidence(
                f"at most {percent(used)} of the KV blocks were in use",
                used,
                "ratio",
                computed_by="the scraped usage of the window",
            )
        ]
    )
    return Claim(
        [
            Evidence(
                f"a worker has {number(seats[0])} seats ({number(seats[1])} in the {case.base_word})",
                float(seats[0]),
                "seats",
                computed_by="the workers' own settings",
            ),
            Evidence(
                f"the wait while as many requests ran costs a request {seconds(float(waits.mean()))} on average",
                float(waits.mean()),
                "s",
                None,
                case.worst_requests("queue_seats"),
                "the requests' own times: how many ran while one waited",
            ),
            *room,
        ],
        case.worker_subject("queue_seats"),
        case.when("queue_seats"),
        BY_TIMES if used is None else 1.0,
        # where there were more seats hardly anybody waited for one: no draw of one traffic does that
        began=waited_here_alone(case, "queue_seats"),
    )


def _lowered(case: Case) -> tuple[int, int] | None:
    """Seats now and before, where they were lowered: of the worker at which nearly all wait for one, where there is one."""
    kind, worker = case.worker_subject("queue_seats")
    return lowered(case.base, case.suspect, "max_num_seqs", worker if kind == "worker" else None)


def _seats(facts: Facts) -> int | None:
    """Seats of each worker: as set, else the most requests that ran in a step; a lower bound where nobody waited for one."""
    told = setting(facts, "max_num_seqs")
    if told is not None or facts.steps is None:
        return told
    running = facts.steps.get("num_running")
    return int(np.nanmax(running)) if np.isfinite(running).any() else None
