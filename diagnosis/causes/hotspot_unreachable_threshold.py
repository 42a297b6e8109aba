"""The router asks for a match that prompts do not reach, so it never goes by prefix."""

from __future__ import annotations

from diagnosis.cause import Case, Claim, Excluded, cause
from diagnosis.claims.hotspot import hotspot, of_index


@cause(
    "hotspot_unreachable_threshold",
    needs=("route.candidates_matched_tokens",),
    rows=("hotspot_unreachable_threshold", "admission_blocked_on_blocks"),
)
def hotspot_unreachable_threshold(case: Case) -> Claim | Excluded | None:
    """The router knew who held a prompt's prefix and did not go there: the match that it asks for is never reached.

    Why: a threshold on the matched share of the prompt fails once what requests add is long, or once it stands above 1. Every worker
    then computes every prefix, and the caches of all hold the same few.

    Refuted by: choices that follow the match more than chance would; a policy that is not meant to look at prefixes; no worker that
    held much more of the prompt than the others.

    Remedy:
    - SGLang router: lower --cache-threshold below the share of the prompt that really matches
    - Dynamo: raise --router-kv-overlap-score-credit (0 turns the prefix off, 1 is all)
    - router: state the threshold in tokens, not as a share of the prompt (others: minimum prefix match)
    - application: put what is shared first and keep what differs short, so that the matched share is large

    Experiment: set the threshold to half of the median match for ten minutes; the hit rate must rise, and TTFT fall.
    """
    return of_index(case, "hotspot_unreachable_threshold", hotspot(case, "hotspot_unreachable_threshold"))
