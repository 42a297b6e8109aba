"""A hotspot of one worker: it gets too much, or is slow; its statement with the reason, its evidence, its advice."""

from __future__ import annotations

from diagnosis.hotspots import evidence as proof
from diagnosis.hotspots.advice import advise
from diagnosis.hotspots.detection import Detected
from diagnosis.hotspots.finding import Evidence, Hotspot
from diagnosis.hotspots.kinds import Named
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Regret
from diagnosis.hotspots.spans import cost_of, instants, rows_in


def at_worker(
    seen: Observed, regret: Regret, detected: Detected, worker: int, first: int, last: int, named: Named
) -> Hotspot:
    """`worker` in the intervals from `first` to `last`, for the reason that `named` gives."""
    rows, name = rows_in(detected, first, last), seen.workers[worker]
    mine = rows[seen.decisions.chosen[rows] == worker]
    at_once = (detected.slow_at_once if named.kind == "straggler" else detected.load_at_once)[:, worker]
    start_ns, end_ns, found_ns = instants(seen, detected, first, last, at_once)
    share = proof.share_of(seen, regret, rows, worker, start_ns, end_ns)
    facts: list[Evidence | None] = [proof.lost_by(seen, regret, mine)]
    because = None
    if named.kind == "straggler":
        slowness = named.numbers["slowness"]
        statement = (
            f"{name} is a straggler: its steps took {slowness:.2f} times as long as steps of the same shape elsewhere"
        )
        facts = [Evidence(statement, slowness, "ratio", None), *facts, share]
    else:
        facts = [share, *facts, proof.of_kind(seen, named, rows, worker, start_ns, end_ns)]
        statement = f"{name} is a hotspot: {reason(seen, named)}"
        if named.kind is None:
            because = (
                "there are no route rows, so what the router believed is not known"
                if not seen.has_routes
                else "neither its loads, nor its ties, nor a prefix or tenant that stays at one worker explain it"
            )
    facts.append(proof.queue_of(seen, regret, rows, worker, start_ns, end_ns))
    regret_s, regret_share = cost_of(regret, mine)
    return Hotspot(
        kind=named.kind,
        cause=None if named.kind is None else f"hotspot_{named.kind}",
        subject={"kind": "worker", "id": name},
        interval={"start_ns": start_ns, "end_ns": end_ns},
        detected_ns=found_ns,
        regret_s=regret_s,
        regret_share=regret_share,
        num_requests=len(mine),
        statement=statement,
        because=because,
        evidence=tuple(fact for fact in facts if fact is not None),
        advice=advise(seen, regret, rows, worker, named, name),
    )


def reason(seen: Observed, named: Named) -> str:
    """Why so much goes there, as the end of a sentence."""
    if named.kind == "dead_signal" and "of_one" in named.numbers:
        return "the load that the router reads of it stands still, so nothing holds it back"
    if named.kind == "dead_signal":
        return "the load that the router reads is dead, so nothing holds it back"
    if named.kind == "tie_breaking":
        return "the router breaks ties always its way"
    if named.kind == "affinity" and named.key_kind == "match":
        few = named.numbers["holders"]
        where = "always there" if few == 1 else f"at {few:.0f} workers only, of which it is one"
        return f"the router follows the longest match, and the longest match is {where}"
    if named.kind == "affinity" and named.key_kind == "session":
        return "the router keeps conversations where they began, and too many stay there"
    if named.kind == "affinity":
        return (
            f"the router keeps {named.key_kind} {proof.key_name(seen, named)} there, which is too much for one worker"
        )
    return "it gets more than its share, and the reason cannot be told"
