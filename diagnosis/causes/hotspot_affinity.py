"""The router keeps a prefix, a tenant or the longest match at one worker, and that is too much for it."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Excluded, cause
from diagnosis.claims.hotspot import hotspot


@cause("hotspot_affinity", needs=("route.chosen",), rows=("hotspot_affinity",))
def hotspot_affinity(case: Case) -> Claim | Excluded | None:
    """The router kept a prefix or a tenant at one worker that could not serve it alone, while others had time.

    Why: going where the prefix is saves its prefill, until the queue there costs more than computing it again elsewhere. A rule that
    looks at the match alone never leaves; a block that all requests share pins the whole fleet to one worker.

    Refuted by: requests that cost as much at every other worker of that instant (no regret); no prefix, tenant or longest match of
    which nine in ten requests went there; queues as long everywhere.

    Remedy:
    - SGLang router: lower --balance-abs-threshold and --balance-rel-threshold, so that the router leaves the cache when queues differ
    - Dynamo: lower --router-kv-overlap-score-credit, or raise --router-temperature, so that load counts beside the match
    - router: add the load to the score (llm-d: queue-scorer and kv-cache-utilization-scorer beside the prefix scorer), and spill
    - router: replicate a hot prefix on several workers before it is hot (a warming request to each)
    - application: one system prompt a tenant and not one for all, where the shared part is short and only pins

    Experiment: route the same traffic by load alone for a quarter of an hour; the worker's queue must go, and the hit rate tells the price.
    """
    return hotspot(case, "hotspot_affinity")
