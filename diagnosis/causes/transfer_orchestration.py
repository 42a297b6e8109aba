"""Hand-overs waited though nothing was in their way."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.handover import cost, quiet, spent, transfer_sql
from diagnosis.telling.wording import seconds

ROW = "transfer_orchestration"
WITHOUT_ROOM = 0.45
"""Strength where nobody tells whether the decode worker had room, or a seat: a guess between two."""


@cause(ROW, needs=("transfer.wait_s",), rows=(ROW,))
def transfer_orchestration(case: Case) -> Claim | Excluded | None:
    """Between the end of a prefill and its hand-over time went by in which no byte moved, though link and decode worker were free.

    Why: the router hears late that a prefill ended, asks in turns, sets up a connection or registers memory each time, or a poll
    interval lies between the two halves. The seconds are the same for small prompts and large ones.

    Refuted by: KV under way meanwhile; a link that carried others; a decode worker without blocks or a seat for it; a wait that grows
    with the size of the prompt.

    Remedy:
    - vLLM: keep connections between the workers open (NIXL handshakes at the first hand-over); newest patch release of the connector
    - SGLang: look at the bootstrap server (--disaggregation-bootstrap-port) and at what polls it
    - Dynamo: look at the queue of remote prefills, and at the event plane between its workers
    - router: send to the decode worker when the prefill begins, not when it ends, so that it can prepare
    - fleet: fewer hops between router and workers

    Experiment: hand over ten prompts of 100 tokens on an idle fleet; what that takes is orchestration, for there are hardly bytes.
    """
    found = spent(case, ROW)
    if found is None:
        return None
    if not found.grew:
        return Excluded(quiet(case, found, "hand-overs in which nothing moved and nothing was in the way"))
    now = case.suspect.handover
    assert now is not None, "seconds of a hand-over come from hand-overs"
    unknown = [what for what, seen in (("room", now.sees_room), ("a seat", now.sees_seats)) if not seen]
    evidence = [
        cost(
            case,
            ROW,
            "waiting while nothing was in the way"
            if not unknown
            else f"waiting while no byte moved, for orchestration or for {' or '.join(unknown)} at the decode worker,",
            found,
        ),
        Evidence(
            f"from the end of a prefill to the first byte passed {seconds(float(now.wait_s.mean()))} on average, whatever the reason",
            float(now.wait_s.mean()),
            "s",
            transfer_sql(case, case.suspect, "avg(coalesce(wait_s, 0)) AS wait_s"),
        ),
        Evidence(
            f"of that the link carried others for {seconds(float(now.link_s.mean()))}"
            + (
                ", and the decode worker had room and seats"
                if not unknown
                else f"; whether there was {' or '.join(unknown)} at the decode worker no step and no gauge tells"
            ),
            float(now.link_s.mean()),
            "s",
            computed_by="each transfer beside those into the same worker",
        ),
    ]
    return Claim(evidence, case.worker_subject(ROW), case.when(ROW), WITHOUT_ROOM if unknown else 1.0)
