"""Of equally good workers the router always takes the same one."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Excluded, cause
from diagnosis.claims.hotspot import hotspot


@cause("hotspot_tie_breaking", needs=("route.candidates_score",), rows=("hotspot_tie_breaking",))
def hotspot_tie_breaking(case: Case) -> Claim | Excluded | None:
    """The router broke ties always for the same worker: what several could have served as well went to one.

    Why: an argmax takes the first of equals, and equals are common: nobody holds the prefix, all hold it, or all loads read alike. The
    worker that stands first then gets everything that is not decided.

    Refuted by: ties that fell on several workers as chance would have it; best scores that no two workers shared.

    Remedy:
    - Dynamo: a --router-temperature above 0 draws among equals
    - SGLang router: lower --balance-abs-threshold and --balance-rel-threshold: past them the least loaded worker is taken
    - router: break ties by the least load, then at random, never by the place in the list
    - router: shuffle the order of the workers at each decision, where the code cannot be changed

    Experiment: turn the list of workers round; the hotspot must move to the one that now stands first.
    """
    return hotspot(case, "hotspot_tie_breaking")
