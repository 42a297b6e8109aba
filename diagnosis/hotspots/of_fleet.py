"""Hotspots of the whole fleet, where the router is at fault for no worker in particular: a dead load, a stale index, prefixes not gone by."""

from __future__ import annotations

import numpy as np

from diagnosis.hotspots import evidence as proof
from diagnosis.hotspots.advice import advise
from diagnosis.hotspots.at_worker import reason
from diagnosis.hotspots.detection import Detected
from diagnosis.hotspots.finding import Evidence, Hotspot
from diagnosis.hotspots.kinds import Chances, Named
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Regret
from diagnosis.hotspots.spans import cost_of, instants, rows_in, share_of_all
from diagnosis.telling.wording import percent


def dead_signal(seen: Observed, regret: Regret, detected: Detected, first: int, last: int) -> Hotspot:
    """The load signal is dead, and no worker stands out for it."""
    rows = rows_in(detected, first, last)
    start_ns, end_ns, found_ns = instants(seen, detected, first, last)
    waiting = np.nan_to_num(regret.waiting[rows])
    load = seen.decisions.load[rows]
    named = Named("dead_signal", {"load": float(load[np.isfinite(load)][0]), "max_waiting": float(waiting.max())})
    return Hotspot(
        "dead_signal",
        "hotspot_dead_signal",
        {"kind": "fleet", "id": None},
        {"start_ns": start_ns, "end_ns": end_ns},
        found_ns,
        *cost_of(regret, rows),
        len(rows),
        f"the router's load signal is dead: {reason(seen, named)}, and no single worker stands out",
        None,
        tuple(
            fact
            for fact in (proof.of_kind(seen, named, rows, 0, start_ns, end_ns), proof.lost_by(seen, regret, rows))
            if fact is not None
        ),
        advise(seen, regret, rows, None, named, "the fleet"),
    )


def stale_index(seen: Observed, regret: Regret, detected: Detected, first: int, last: int) -> Hotspot:
    """What the router believes that its workers hold is wrong more often than it may be."""
    rows = rows_in(detected, first, last)
    told, wrong = rows[detected.can_err[rows]], rows[detected.is_wrong[rows]]
    start_ns, end_ns, found_ns = instants(seen, detected, first, last)
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
    named = Named("stale_index", {})
    return Hotspot(
        "stale_index",
        "hotspot_stale_index",
        {"kind": "fleet", "id": None},
        {"start_ns": start_ns, "end_ns": end_ns},
        found_ns,
        total,
        share_of_all(regret, total),
        len(wrong),
        statement,
        None,
        (Evidence(statement, share, "ratio", None), parts),
        advise(seen, regret, rows, None, named, "the fleet"),
    )


def unreachable_threshold(
    seen: Observed, regret: Regret, detected: Detected, first: int, last: int, found: Chances
) -> Hotspot:
    """The router knows who holds a prompt and does not go by it."""
    rows = rows_in(detected, first, last)
    could, did, by_chance = found
    able = rows[could[rows]]
    start_ns, end_ns, found_ns = instants(seen, detected, first, last)
    went, chance = float(did[able].mean()), float(by_chance[able].mean())
    statement = (
        f"the router does not go by the prefixes it knows of: in {len(able)} decisions some worker held much more of the prompt "
        f"than others, and it took such a one in {percent(went)}, as chance would ({percent(chance)})"
    )
    named = Named("unreachable_threshold", {"went": went, "chance": chance})
    return Hotspot(
        "unreachable_threshold",
        "hotspot_unreachable_threshold",
        {"kind": "fleet", "id": None},
        {"start_ns": start_ns, "end_ns": end_ns},
        found_ns,
        *cost_of(regret, able),
        len(able),
        statement,
        None,
        tuple(
            fact
            for fact in (Evidence(statement, went, "ratio", None), proof.lost_by(seen, regret, able))
            if fact is not None
        ),
        advise(seen, regret, able, None, named, "the fleet"),
    )
