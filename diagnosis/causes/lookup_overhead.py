"""Looking prompts up in the prefix cache took longer."""

from __future__ import annotations

import numpy as np

from diagnosis.calibration import threshold
from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import request_sql
from diagnosis.ledger.overheads import lookup_parts
from diagnosis.telling.wording import number, seconds

RISE = threshold(
    "lookup_overhead.rise",
    least=0.0005,
    unit="s",
    says="rise of the mean look-up",
    why="less than a tenth of a short step, and far above a look-up in a table",
)


@cause("lookup_overhead", needs=("request.cache_lookup_s",), rows=("lookup_overhead",))
def lookup_overhead(case: Case) -> Claim | Excluded | None:
    """Looking a prompt up in the prefix cache took longer: a cost of every request, whether it hits or not.

    Why: the prompt's blocks are hashed and looked for before anything is computed, often while the scheduler holds the step: then
    whoever waits for that step, or is in it, pays too. Long prompts, small blocks, a slow hash, a remote index or others who
    hold it up make it dear. This is what a look-up costs as a rule, at whatever load; what it waits beside is `cache_lock_contention`.

    Refuted by: look-ups that are as short as in the baseline but for a few that waited; a TTFT that is the same with prefix caching off.

    Remedy:
    - vLLM: a faster hash (--prefix-caching-hash-algo xxhash or xxhash_cbor where prompts come from one's own application), larger blocks (--block-size)
    - vLLM: --no-enable-prefix-caching on workers whose traffic hits little; it pays for look-ups and gains nothing
    - host: cores for the scheduler's process that nothing else takes
    - application: shorter prompts have fewer blocks to look for

    Experiment: switch prefix caching off on one worker for prompts that never hit; the fixed part of TTFT must go.
    """
    looked, before = (facts.requests.get("cache_lookup_s") for facts in (case.suspect, case.base))
    if not np.isfinite(before).any():
        return None
    mean, mean_before = float(np.nanmean(looked)), float(np.nanmean(before))
    usual, usual_before = (float(np.nanmean(lookup_parts(facts.requests)[0])) for facts in (case.suspect, case.base))
    if not RISE.is_reached(usual - usual_before):
        return Excluded(
            f"a look-up takes {seconds(usual)} as a rule ({seconds(usual_before)} in the {case.base_word}), {seconds(mean)} with what it waited"
        )
    spent = case.suspect_ledger.column("lookup_overhead")
    middle, worst = (float(np.nanquantile(looked, q)) for q in (0.5, 0.99))
    own = float(np.nansum(lookup_parts(case.suspect.requests)[0][case.suspect_ledger.rows])) / max(len(spent), 1)
    return Claim(
        [
            Evidence(
                f"a look-up took {seconds(mean)} on average ({seconds(mean_before)} in the {case.base_word}); half took up to "
                f"{seconds(middle)}, 99 in 100 up to {seconds(worst)}",
                mean,
                "s",
                request_sql(case, case.suspect, "avg(cache_lookup_s) AS mean_s", "cache_lookup_s"),
                case.worst_requests("lookup_overhead"),
            ),
            Evidence(
                f"look-ups cost {number(len(spent))} requests {seconds(float(spent.mean()))} each on average: {seconds(min(own, float(spent.mean())))} by "
                "their own, the rest by those of others in the steps that they waited for or shared",
                float(spent.mean()),
                "s",
            ),
        ],
        case.worker_subject("lookup_overhead"),
        case.when("lookup_overhead"),
    )
