"""`find`: a window of a fleet in, its hotspots out, ranked by the seconds that they lost.

Neighbouring intervals in which the same worker is found (one quiet interval between them is bridged) are one hotspot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from diagnosis.facts import I64, Bool
from diagnosis.hotspots import evidence as proof
from diagnosis.hotspots.advice import advise
from diagnosis.hotspots.detection import Detected, detect
from diagnosis.hotspots.finding import Evidence, Hotspot, Hotspots
from diagnosis.hotspots.holders import informed
from diagnosis.hotspots.intervals import FALSE_ALARMS, INTERVAL_S, LONG
from diagnosis.hotspots.kinds import Chances, Named, chances, dead, ignored, name_load
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.reading import read
from diagnosis.hotspots.regret import Regret, regret_of
from diagnosis.telling.wording import listing, percent, seconds
from store.interface import Store, Window

JOINED = 0.95
"""Share of the decisions whose request is known, below which that is said."""
MOST_PREFIXES = 20
"""Prefixes that are listed, those with most regret first."""


def hotspots(store: Store, window: Window, baseline: Window | None = None) -> Hotspots:
    """Hotspots of a stored window, beside those of a baseline. Raises BadWindow where a window holds nothing to judge."""
    found, *before = (find(informed(store, each, read(store, each))) for each in (window, baseline) if each is not None)
    return found.beside(before[0]) if before else found


def find(seen: Observed) -> Hotspots:
    """The same from facts at hand."""
    return judged(seen)[0]


def judged(seen: Observed) -> tuple[Hotspots, Regret]:
    """Hotspots, and the regret of every decision that they rest on."""
    regret = regret_of(seen)
    detected = detect(seen, regret)
    spots = [] if seen.num_workers < 2 else sorted(_all(seen, regret, detected), key=_rank)
    status = "not_observable" if seen.num_workers < 2 else "hotspots" if spots else "none"
    start_ns, end_ns = seen.origin_ns, seen.origin_ns + round(seen.end_s * 1e9)
    found = Hotspots(
        status,
        _verdict(seen, regret, detected, spots, status),
        {"text": str(seen.window), "run_id": seen.window.run_id, "start_ns": start_ns, "end_ns": end_ns},
        None,
        INTERVAL_S,
        detected.num,
        FALSE_ALARMS,
        len(seen.decisions),
        seen.has_routes,
        seen.policies,
        _totals(seen, regret),
        tuple(spots),
        tuple(_cannot_tell(seen, regret)),
    )
    return found, regret


def _rank(spot: Hotspot) -> tuple[float, int]:
    return -(spot.regret_s or 0.0), spot.interval["start_ns"]


def _all(seen: Observed, regret: Regret, detected: Detected) -> Iterator[Hotspot]:
    spots = list(_at_workers(seen, regret, detected))
    yield from spots
    if not any(spot.kind == "dead_signal" for spot in spots):
        for first, last in _runs(dead(seen, regret, detected)):
            yield _dead(seen, regret, detected, first, last)
    for first, last in _runs(detected.wrong):
        yield _stale(seen, regret, detected, first, last)
    found = chances(seen)
    for first, last in _runs(ignored(regret, detected, found)):
        yield _unreachable(seen, regret, detected, first, last, found)


def _at_workers(seen: Observed, regret: Regret, detected: Detected) -> Iterator[Hotspot]:
    for worker in range(seen.num_workers):
        for first, last in _runs(detected.slow[:, worker]):
            slowness = detected.slowness[first : last + 1, worker]
            named = Named("straggler", {"slowness": float(np.nanmedian(slowness))})
            yield _at_worker(seen, regret, detected, worker, first, last, named)
        for first, last in _runs(detected.load[:, worker]):
            rows = _rows(detected, first, last)
            yield _at_worker(seen, regret, detected, worker, first, last, name_load(seen, regret, rows, worker))


def _runs(flags: Bool) -> Iterator[tuple[int, int]]:
    """(first, last) of the flagged intervals, those with one between them joined."""
    first = last = -1
    for index in np.flatnonzero(flags).tolist():
        if first >= 0 and index - last > 2:
            yield first, last
            first = index
        first = index if first < 0 else first
        last = index
    if first >= 0:
        yield first, last


def _rows(detected: Detected, first: int, last: int) -> I64:
    return np.flatnonzero((detected.of >= first) & (detected.of <= last))


def _instants(
    seen: Observed, detected: Detected, first: int, last: int, at_once: Bool | None = None
) -> tuple[int, int, int]:
    """(start, end, end of the first test that found it) in ns; at_once: intervals that told it alone, None: all did."""
    found = first
    if at_once is not None:
        alone = np.flatnonzero(at_once[first : last + 1])
        found = min((first // LONG + 1) * LONG, detected.num) - 1
        found = min(found, first + int(alone[0])) if len(alone) else found

    def at(edge: int) -> int:
        return seen.origin_ns + round(float(detected.edges_s[edge]) * 1e9)

    return at(first), at(last + 1), at(found + 1)


def _at_worker(
    seen: Observed, regret: Regret, detected: Detected, worker: int, first: int, last: int, named: Named
) -> Hotspot:
    rows, name = _rows(detected, first, last), seen.workers[worker]
    mine = rows[seen.decisions.chosen[rows] == worker]
    at_once = None if named.kind == "straggler" else detected.load_at_once[:, worker]
    start_ns, end_ns, found_ns = _instants(seen, detected, first, last, at_once)
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
        statement = f"{name} is a hotspot: {_reason(seen, named)}"
        if named.kind is None:
            because = (
                "there are no route rows, so what the router believed is not known"
                if not seen.has_routes
                else "neither its loads, nor its ties, nor a prefix or tenant that stays at one worker explain it"
            )
    facts.append(proof.queue_of(seen, regret, rows, worker, start_ns, end_ns))
    return Hotspot(
        named.kind,
        None if named.kind is None else f"hotspot_{named.kind}",
        {"kind": "worker", "id": name},
        {"start_ns": start_ns, "end_ns": end_ns},
        found_ns,
        *_lost(regret, mine),
        len(mine),
        statement,
        because,
        tuple(fact for fact in facts if fact is not None),
        advise(seen, regret, rows, worker, named, name),
    )


def _reason(seen: Observed, named: Named) -> str:
    if named.kind == "dead_signal" and "of_one" in named.numbers:
        return "the load that the router reads of it stands still, so nothing holds it back"
    if named.kind == "dead_signal":
        return "the load that the router reads is dead, so nothing holds it back"
    if named.kind == "tie_breaking":
        return "the router breaks ties always its way"
    if named.kind == "affinity" and named.key_kind == "match":
        return "the router follows the longest match, and the longest match is always there"
    if named.kind == "affinity" and named.key_kind == "session":
        return "the router keeps conversations where they began, and too many stay there"
    if named.kind == "affinity":
        return (
            f"the router keeps {named.key_kind} {proof.key_name(seen, named)} there, which is too much for one worker"
        )
    return "it gets more than its share, and the reason cannot be told"


def _dead(seen: Observed, regret: Regret, detected: Detected, first: int, last: int) -> Hotspot:
    """The load signal is dead, and no worker stands out for it."""
    rows = _rows(detected, first, last)
    start_ns, end_ns, found_ns = _instants(seen, detected, first, last)
    waiting = np.nan_to_num(regret.waiting[rows])
    load = seen.decisions.load[rows]
    named = Named("dead_signal", {"load": float(load[np.isfinite(load)][0]), "max_waiting": float(waiting.max())})
    return Hotspot(
        "dead_signal",
        "hotspot_dead_signal",
        {"kind": "fleet", "id": None},
        {"start_ns": start_ns, "end_ns": end_ns},
        found_ns,
        *_lost(regret, rows),
        len(rows),
        f"the router's load signal is dead: {_reason(seen, named)}, and no single worker stands out",
        None,
        tuple(
            fact
            for fact in (proof.of_kind(seen, named, rows, 0, start_ns, end_ns), proof.lost_by(seen, regret, rows))
            if fact is not None
        ),
        advise(seen, regret, rows, None, named, "the fleet"),
    )


def _stale(seen: Observed, regret: Regret, detected: Detected, first: int, last: int) -> Hotspot:
    rows = _rows(detected, first, last)
    told, wrong = rows[detected.can_err[rows]], rows[detected.is_wrong[rows]]
    start_ns, end_ns, found_ns = _instants(seen, detected, first, last)
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
        _share(regret, total),
        len(wrong),
        statement,
        None,
        (Evidence(statement, share, "ratio", None), parts),
        advise(seen, regret, rows, None, named, "the fleet"),
    )


def _unreachable(seen: Observed, regret: Regret, detected: Detected, first: int, last: int, found: Chances) -> Hotspot:
    rows = _rows(detected, first, last)
    could, did, by_chance = found
    able = rows[could[rows]]
    start_ns, end_ns, found_ns = _instants(seen, detected, first, last)
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
        *_lost(regret, able),
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


def _lost(regret: Regret, rows: I64) -> tuple[float | None, float | None]:
    """(seconds that these decisions lost, their share of all that was lost)."""
    lost = regret.seconds[rows]
    if not np.isfinite(lost).any():
        return None, None
    total = float(np.nansum(lost))
    return total, _share(regret, total)


def _share(regret: Regret, part: float) -> float | None:
    total = float(np.nansum(regret.seconds))
    return min(part / total, 1.0) if total > 0 else None


def _totals(seen: Observed, regret: Regret) -> dict[str, Any]:
    """Regret of the window, by worker and by prefix (the most expensive ones)."""
    decisions = seen.decisions
    known = np.isfinite(regret.seconds)
    lost = np.where(known, regret.seconds, 0.0)
    by_worker = []
    for worker, name in enumerate(seen.workers):
        mine = decisions.chosen == worker
        told = int((mine & known).sum())
        token_s = float(regret.token_s[worker])
        by_worker.append(
            {
                "worker": name,
                "decisions": int(mine.sum()),
                "regret_s": float(lost[mine].sum()) if told else None,
                "tokens_per_s": 1 / token_s if token_s > 0 else None,
            }
        )
    by_prefix = []
    if len(seen.prefixes):
        inside = decisions.prefix >= 0
        size = len(seen.prefixes)
        sums = np.bincount(decisions.prefix[inside], lost[inside], size)
        count = np.bincount(decisions.prefix[inside], minlength=size)
        for code in np.argsort(-sums, kind="stable")[:MOST_PREFIXES].tolist():
            if count[code]:
                by_prefix.append(
                    {
                        "prefix": seen.prefixes[code],
                        "decisions": int(count[code]),
                        "regret_s": float(sums[code]) if known.any() else None,
                    }
                )
    num = int(known.sum())
    return {
        "total_s": float(lost.sum()) if num else None,
        "mean_s": float(lost.sum()) / num if num else None,
        "num_known": num,
        "by_worker": by_worker,
        "by_prefix": by_prefix,
    }


def _verdict(seen: Observed, regret: Regret, detected: Detected, spots: list[Hotspot], status: str) -> str:
    what = "routing decisions" if seen.has_routes else "requests"
    about = f"{len(seen.decisions):,} {what} in {detected.num} intervals of {INTERVAL_S:g} s"
    if status == "not_observable":
        return f"One worker served all of {about}: there is no other to compare it with."
    if not spots:
        return f"No hotspot in {about} over {seen.num_workers} workers."
    kinds = listing(list(dict.fromkeys(spot.kind or "unexplained" for spot in spots)))
    top = spots[0]
    more = "" if len(spots) == 1 else f" {len(spots)} hotspots in all ({kinds})."
    cost = "" if top.regret_s is None else f" It cost {seconds(top.regret_s)}"
    share = "" if top.regret_share is None else f", {percent(top.regret_share)} of all that routing lost"
    told = "The" + top.statement[3:] if top.statement.startswith("the ") else top.statement
    return f"{told}.{cost}{share}{'.' if cost else ''}{more}"


def _cannot_tell(seen: Observed, regret: Regret) -> Iterator[str]:
    decisions = seen.decisions
    if not seen.has_routes:
        yield (
            "no route rows: judged by outcome only (who got how much, who queued, who was slow). Whether the router goes by "
            "affinity, a dead load, ties, a stale index or a threshold is not known"
        )
    elif not np.isfinite(decisions.matched).any():
        yield "the router tells no matched tokens: its index cannot be judged, and regret counts no prefix of the other workers"
    if seen.has_routes and not np.isfinite(decisions.load).any():
        yield "the router tells no loads: whether its load signal lives is not known"
    if seen.steps is None:
        yield "no step rows: queues are counted from the requests' own instants, and speeds from their prefills"
    if not np.isfinite(regret.seconds).any():
        yield "no measured rate or no lengths of prompts: what was lost (regret) is unknown, so an excess counts whatever it cost"
    joined = float((decisions.request >= 0).mean()) if len(decisions) else 1.0
    if joined < JOINED:
        yield f"{percent(1 - joined)} of the decisions have no request row at the chosen worker (still open, or not recorded)"
