"""What is told of a window as a whole: one sentence, the regret by worker and by prefix, and what cannot be told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from diagnosis.hotspots.detection import Detected
from diagnosis.hotspots.finding import Hotspot
from diagnosis.hotspots.intervals import INTERVAL_S
from diagnosis.hotspots.observed import Observed
from diagnosis.hotspots.regret import Regret
from diagnosis.telling.wording import listing, percent, seconds

JOINED = 0.95
"""Share of the decisions whose request is known, below which that is said."""
CLOCKS_APART_S = INTERVAL_S / 10
"""How long after or before they were routed a worker's requests may reach it, by its clock, before that is said."""
MOST_PREFIXES = 20
"""Prefixes that are listed, those with most regret first."""


def verdict(seen: Observed, regret: Regret, detected: Detected, spots: list[Hotspot], status: str) -> str:
    """One sentence or a few: the costliest hotspot, or that there is none."""
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


def totals(seen: Observed, regret: Regret) -> dict[str, Any]:
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


def cannot_tell(seen: Observed, regret: Regret, detected: Detected) -> Iterator[str]:
    """What is missing, and what is therefore not known; one sentence each."""
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
    yield from _apart(seen)
    for worker in np.flatnonzero(np.isfinite(detected.by_design)).tolist():
        yield (
            f"{seen.workers[worker]} takes {detected.by_design[worker]:.2f} times as long as the others for the same steps all the time, and is "
            "sent less for that: it is taken for slower by design, and for no hotspot; whether something slows it down is not known"
        )
    joined = float((decisions.request >= 0).mean()) if len(decisions) else 1.0
    if joined < JOINED:
        yield f"{percent(1 - joined)} of the decisions have no request row at the chosen worker (still open, or not recorded)"


def _apart(seen: Observed) -> Iterator[str]:
    """Workers that requests reach, by their clock, long after they were routed, or long before."""
    decisions = seen.decisions
    if not seen.has_routes or not len(seen.served):
        return
    arrived = seen.served.arrival_s[np.maximum(decisions.request, 0)]
    lag = np.where(decisions.request >= 0, arrived - decisions.at_s, np.nan)
    for worker, name in enumerate(seen.workers):
        mine = lag[(decisions.chosen == worker) & np.isfinite(lag)]
        off = float(np.median(mine)) if len(mine) else 0.0
        if abs(off) > CLOCKS_APART_S:
            yield (
                f"by its clock requests reach {name} {seconds(abs(off))} {'after' if off > 0 else 'before'} they were routed: its clock "
                f"differs from the router's{', or the way is that long' if off > 0 else ''}; what queued there when it was chosen, or passed "
                "over, is not known"
            )
