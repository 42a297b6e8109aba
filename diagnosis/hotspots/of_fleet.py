"""Hotspots of the whole fleet, where the router is at fault for no worker in particular: a dead load, a stale index, prefixes not gone by."""

from __future__ import annotations

import numpy as np

from diagnosis.hotspots import evidence as proof
from diagnosis.hotspots.advice import advise
from diagnosis.hotspots.at_worker import reason
from diagnosis.hotspots.detection import Detected
from diagnosis.hotspots.finding import Advice, Evidence, Hotspot
from diagnosis.hotspots.kinds import Chances, Named
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Regret
from diagnosis.hotspots.spans import cost_of, instants, rows_in, share_of_all
from diagnosis.telling.wording import percent, seconds


def dead_signal(seen: Observed, regret: Regret, detected: Detected, first: int, last: int) -> Hotspot:
    """The load signal is dead, and no worker stands out for it."""
    rows = rows_in(detected, first, last)
    span = instants(seen, detected, first, last)
    waiting = np.nan_to_num(regret.waiting[rows])
    load = seen.decisions.load[rows]
    named = Named("dead_signal", {"load": float(load[np.isfinite(load)][0]), "max_waiting": float(waiting.max())})
    statement = f"the router's load signal is dead: {reason(seen, named)}, and no single worker stands out"
    facts = (proof.of_kind(seen, named, rows, 0, span[0], span[1]), proof.lost_by(seen, regret, rows))
    advice = advise(seen, regret, rows, None, named, "the fleet")
    return _of_fleet("dead_signal", span, cost_of(regret, rows), len(rows), statement, facts, advice)


def stale_index(seen: Observed, regret: Regret, detected: Detected, first: int, last: int) -> Hotspot:
    """What the router believes that its workers hold is wrong more often than it may be."""
    rows = rows_in(detected, first, last)
    told, wrong = rows[detected.can_err[rows]], rows[detected.is_wrong[rows]]
    span = instants(seen, detected, first, last)
    decisions = seen.decisions
    believed = decisions.matched[wrong, decisions.chosen[wrong]].astype(np.float64)
    found = seen.found_there()[wrong]
    missed_s = np.maximum(believed - found, 0.0) * regret.token_s[decisions.chosen[wrong]]
    lost = np.fmax(np.nan_to_num(regret.seconds[wrong]), np.nan_to_num(missed_s))
    total = float(lost.sum())
    share = len(wrong) / max(len(told), 1)
    statement = (
        f"the router's prefix index is stale: in {len(wrong)} of {len(told)} decisions ({percent(share)}) the match that it "
        "believed of the chosen worker was not what was found there"
    )
    over, under = int((believed > found).sum()), int((believed < found).sum())
    parts = Evidence(
        f"{over} times it believed in blocks that were gone, {under} times it did not know of blocks that were there",
        float(over),
        "requests",
        None,
        proof.worst(seen, regret, wrong),
    )
    again_s = float(np.nansum(missed_s))
    computed = Evidence(
        f"to compute what it believed to be there took {seconds(again_s)}, whether or not another worker held it",
        again_s,
        "s",
        None,
    )
    facts = (Evidence(statement, share, "ratio", None), parts, computed if again_s > 0 else None)
    advice = advise(seen, regret, rows, None, Named("stale_index", {}), "the fleet")
    return _of_fleet("stale_index", span, (total, share_of_all(regret, total)), len(wrong), statement, facts, advice)


def unreachable_threshold(
    seen: Observed, regret: Regret, detected: Detected, first: int, last: int, found: Chances
) -> Hotspot:
    """The router knows who holds a prompt and does not go by it."""
    rows = rows_in(detected, first, last)
    could, did, by_chance = found
    able = rows[could[rows]]
    span = instants(seen, detected, first, last)
    went, chance = float(did[able].mean()), float(by_chance[able].mean())
    statement = (
        f"the router does not go by the prefixes it knows of: in {len(able)} decisions some worker held much more of the prompt "
        f"than others, and it took such a one in {percent(went)}, as chance would ({percent(chance)})"
    )
    named = Named("unreachable_threshold", {"went": went, "chance": chance})
    facts = (Evidence(statement, went, "ratio", None), proof.lost_by(seen, regret, able))
    advice = advise(seen, regret, able, None, named, "the fleet")
    return _of_fleet("unreachable_threshold", span, cost_of(regret, able), len(able), statement, facts, advice)


def _of_fleet(
    kind: str,
    span: tuple[int, int, int],
    cost: tuple[float | None, float | None],
    num_requests: int,
    statement: str,
    facts: tuple[Evidence | None, ...],
    advice: Advice,
) -> Hotspot:
    """A hotspot whose subject is the fleet. span: (start, end, found) in ns; cost: (seconds lost, their share of all lost)."""
    start_ns, end_ns, found_ns = span
    return Hotspot(
        kind=kind,
        cause=f"hotspot_{kind}",
        subject={"kind": "fleet", "id": None},
        interval={"start_ns": start_ns, "end_ns": end_ns},
        detected_ns=found_ns,
        regret_s=cost[0],
        regret_share=cost[1],
        num_requests=num_requests,
        statement=statement,
        because=None,
        evidence=tuple(fact for fact in facts if fact is not None),
        advice=advice,
    )
