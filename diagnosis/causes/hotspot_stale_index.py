"""What the router believes of the caches is not what is in them."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.hotspot import hotspot, of_cause, of_index
from diagnosis.telling.wording import number, percent

UNKNOWN_FOR_GONE = 4.0
"""Wrong beliefs over those in blocks that were gone, from which on the index is one that began anew, and not one that is late."""


@cause(
    "hotspot_stale_index",
    needs=("route.candidates_matched_tokens",),
    rows=("hotspot_stale_index", "admission_blocked_on_blocks"),
)
def hotspot_stale_index(case: Case) -> Claim | Excluded | None:
    """The router's prefix index was stale: requests went where their prefix was not, though another worker held it.

    Why: block events come late, get lost, or were missed by a router that restarted: a block whose parent it never heard of cannot be
    attached. The workers' caches are as they were; only the map is wrong. Requests scatter, and every worker computes every prefix.

    Refuted by: matches that were found as they were believed; no worker that held the blocks which the chosen one had to compute.

    Remedy:
    - vLLM: --kv-events-config with a replay_endpoint, and a consumer that asks it for what it missed after a restart or a gap
    - Dynamo: --router-replica-sync for several routers; without reliable events --no-router-kv-events predicts from the router's own choices
    - router: rebuild the index from the engines' snapshot or replay at start, before it is used; count events whose parent is unknown
    - fleet: shorten the path of block events (batching, queues), and let evictions travel first

    Experiment: stop the router for a minute of traffic and start it again; hits fall for as long as the index needs, and no longer.
    """
    routing = case.suspect.routing
    spots = [] if routing is None else of_cause(routing, "hotspot_stale_index")
    return of_index(
        case, "hotspot_stale_index", hotspot(case, "hotspot_stale_index", _unattached(case) if spots else ())
    )


def _unattached(case: Case) -> list[Evidence]:
    """Stored blocks whose parent was announced before the index went wrong: a router that began then cannot attach them.

    Told where it did not know of blocks far more often than it believed in some that were gone: so looks an index that began anew.
    """
    routing = case.suspect.routing
    told = None if routing is None else routing.unattached
    if routing is None or told is None or not told.num_stored:
        return []
    spot = max(of_cause(routing, "hotspot_stale_index"), key=lambda each: each.num_requests)
    believed_gone = spot.evidence[1].value or 0.0
    if spot.num_requests < UNKNOWN_FOR_GONE * believed_gone:
        return []
    share = told.num_orphans / told.num_stored
    return [
        Evidence(
            f"{number(told.num_orphans)} of {number(told.num_stored)} blocks that were stored meanwhile ({percent(share)}) follow one that "
            "was announced before: an index that begins then cannot attach them",
            share,
            "ratio",
            computed_by="a replay of the block events from the begin of the hotspot on",
        )
    ]
