"""One reading of a window's hotspots for the causes that are one: the claim, or the number that speaks against it.

The hotspots are those that `kvscope hotspots` shows for the same window; the seconds stand in the ledger row of the cause's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded
from diagnosis.facts import RoutingFacts
from diagnosis.hotspots.finding import Evidence as Fact
from diagnosis.hotspots.finding import Hotspot
from diagnosis.telling.wording import number, percent, seconds

BY_HOTSPOTS = "the judgement of the routing (`kvscope hotspots`), from each decision and each worker's queue and speed at its instant"
WITHOUT_COST = 0.8
"""Strength where nothing tells what the hotspot cost."""
WITHOUT_BLOCKS = 0.8
"""Strength where no block tells what other workers held: what was lost is then told by the baseline's hit rate."""


def hotspot(case: Case, name: str, extra: Sequence[Evidence] = ()) -> Claim | Excluded | None:
    """What the cause `name` says of the suspect window. `extra`: more evidence of its own."""
    now = case.suspect.routing
    if now is None:
        named = sum(worker is not None for worker in case.suspect.requests.worker_names)
        if named == 1:
            return Excluded(f"1 worker served all {number(len(case.suspect.requests))} requests: there is no other")
        return None
    spots = of_cause(now, name)
    if not spots:
        return Excluded(_quiet(now, name))
    worst = max(spots, key=lambda spot: spot.regret_s or 0.0)
    same = [spot for spot in spots if spot.subject == worst.subject]
    start_ns, end_ns = min(s.interval["start_ns"] for s in same), max(s.interval["end_ns"] for s in same)
    origin = case.suspect.requests.origin_ns
    mean = float(case.suspect_ledger.column(name).mean())
    evidence = [*_evidence(worst.evidence), *extra, *_others(spots, worst)]
    if mean > 0:
        evidence.insert(
            1,
            Evidence(
                f"it costs a request of the {case.suspect_word} {seconds(mean)} on average ({number(worst.num_requests)} requests "
                f"went there in {seconds((end_ns - start_ns) / 1e9)})",
                mean,
                "s",
                None,
                case.worst_requests(name),
            ),
        )
    before = [] if case.base.routing is None else of_cause(case.base.routing, name)
    if case.base.routing is not None:
        evidence.append(
            Evidence(
                f"the {case.base_word} has {number(len(before))} hotspots of this kind",
                float(len(before)),
                "hotspots",
                computed_by=BY_HOTSPOTS,
            )
        )
    return Claim(
        evidence,
        (worst.subject["kind"] or "fleet", worst.subject["id"]),
        ((start_ns - origin) / 1e9, (end_ns - origin) / 1e9),
        1.0 if worst.regret_s is not None else WITHOUT_COST,
        (f"router: {worst.advice.text}",),
    )


def of_cause(routing: RoutingFacts, name: str) -> list[Hotspot]:
    return [spot for spot in routing.spots if spot.cause == name]


def _quiet(routing: RoutingFacts, name: str) -> str:
    what = "routing decisions" if routing.has_routes else "requests"
    told = f"{number(routing.num_decisions)} {what} to {number(routing.num_workers)} workers in {number(routing.num_intervals)} intervals"
    kinds = sorted({spot.cause for spot in routing.spots if spot.cause is not None})
    kind = name.removeprefix("hotspot_").replace("_", " ")
    if kinds:
        return f"no {kind} hotspot in {told}; what was found is {', '.join(kinds)}"
    return f"no {kind} hotspot in {told}"


def _evidence(facts: Sequence[Fact]) -> list[Evidence]:
    return [Evidence(f.statement, f.value, f.unit, f.sql, f.request_ids, BY_HOTSPOTS) for f in facts]


def _others(spots: Sequence[Hotspot], worst: Hotspot) -> list[Evidence]:
    """That there are more of the kind than the one whose numbers are told."""
    others = [spot for spot in spots if spot is not worst]
    if not others:
        return []
    total = sum(spot.regret_s or 0.0 for spot in spots)
    share = (worst.regret_s or 0.0) / total if total else 0.0
    where = sorted({str(spot.subject["id"] or "the fleet") for spot in others})
    return [
        Evidence(
            f"{number(len(others))} more of the kind were found ({', '.join(where)}); the one above owns {percent(share)} of what all lost",
            float(len(others)),
            "hotspots",
            computed_by=BY_HOTSPOTS,
        )
    ]


def of_index(case: Case, name: str, answer: Claim | Excluded | None) -> Claim | Excluded | None:
    """The answer of a hotspot that the index makes: what waits for blocks follows from it where the pool is as large as before.

    Prompts that are computed where they are not held share no blocks, so as many requests need more of them.
    """
    if not isinstance(answer, Claim):
        return answer
    lost = None if case.suspect.routing is None else case.suspect.routing.lost_tokens.get(name)
    held = []
    if lost is not None and lost.any() and case.suspect.lineage is not None:
        held.append(
            Evidence(
                f"{number(round(float(lost.sum())))} prompt tokens that were computed stood in another worker's cache at that instant "
                f"({number(int((lost > 0).sum()))} requests): the workers still hold them",
                float(lost.sum()),
                "tokens",
                None,
                [str(rid) for rid in case.suspect.requests.request_id[np.argsort(-lost)[:5]]],
                "the life of each block at each worker, and the queue there",
            )
        )
    pools = [facts.num_blocks() for facts in (case.base, case.suspect)]
    told_by_blocks = case.suspect.lineage is not None
    return replace(
        answer,
        evidence=[*answer.evidence, *held],
        strength=min(answer.strength, 1.0 if told_by_blocks else WITHOUT_BLOCKS),
        rows=None if pools[0] is not None and pools[0] == pools[1] else (name,),
    )
