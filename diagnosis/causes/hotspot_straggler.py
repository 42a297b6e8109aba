"""One worker's steps take longer than the others', and the router goes on sending."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Excluded, cause
from diagnosis.claims.hotspot import hotspot
from diagnosis.claims.straggler_reason import reasons


@cause("hotspot_straggler", needs=("step|request.prefill_s",), rows=("hotspot_straggler",))
def hotspot_straggler(case: Case) -> Claim | Excluded | None:
    """One worker was slower than the others for steps of the same shape, and got its full share all the same.

    Why: a throttled or shared GPU, a neighbour on the host, another driver or clock. A router that counts requests, or that goes by
    prefix or by turn, keeps feeding it; what waits there grows, and its callers are the tail.

    Refuted by: steps of the same shape that took as long at the others; a slowness of all workers alike (then it is no straggler); a
    worker that is slow because its steps are larger.

    Remedy:
    - host: look at clocks, power, temperature, neighbours and PCIe of that worker's GPU and host, and compare with another's
    - fleet: take it out of the rotation, and repeat one request on it and on a healthy worker
    - Dynamo: route by the workers' own load (--router-mode kv), not by turn
    - SGLang router: --policy power_of_two or cache_aware, whose loads see the queue, not round_robin
    - router: weigh outstanding tokens by each worker's measured rate, not requests

    Experiment: send the same request ten times to it and to a healthy worker, nothing else running; compare time per token.
    """
    spots = () if case.suspect.routing is None else case.suspect.routing.spots
    worker = next((spot.subject["id"] for spot in spots if spot.cause == "hotspot_straggler"), None)
    return hotspot(case, "hotspot_straggler", reasons(case, worker) if worker is not None else ())
