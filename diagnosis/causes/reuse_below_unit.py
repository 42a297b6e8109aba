"""What prompts share was in the cache, and too short to be used."""

from __future__ import annotations

import numpy as np

from diagnosis.bound_wait import setting
from diagnosis.cause import BY_CHAINS, Case, Claim, Evidence, Excluded, cause
from diagnosis.evidence_sql import HIT_RATE, request_sql
from diagnosis.wording import number, percent, seconds


@cause("reuse_below_unit", needs=("block.evicted", "request.prompt_blocks"), rows=("reuse_below_unit",))
def reuse_below_unit(case: Case) -> Claim | Excluded | None:
    """What prompts share is shorter than the smallest piece that the cache gives back: it was there, and was computed again.

    Why: a cache gives back whole units: blocks, snapshots of a state, or runs of a minimum length. A shared prefix below that
    length is stored each time and never found. Counted by lineage: the block at which the chain broke was in the cache when it was
    asked for.

    Refuted by: blocks that had been evicted or given up by age before they were asked for; prompts that had never been stored.

    Remedy:
    - vLLM: a smaller --block-size, where the unit is the block (for hybrid models: where the state's block follows from it)
    - fleet: lower the cache's or connector's smallest reusable run below the length of the shared prefixes
    - application: make the shared part of the prompts longer than the unit: system text, tools and examples first, in a fixed order

    Experiment: halve the smallest reusable unit on one worker; the hit rate must rise there from nothing.
    """
    lineage = case.suspect.lineage
    if lineage is None:
        return None
    unused = lineage.unused_tokens
    if unused is None:
        return None if lineage.evicted_tokens.any() else Excluded(_nothing(case))
    if not unused.any():
        return Excluded(_nothing(case))
    missed = lineage.lost_tokens + lineage.apart_tokens + float(lineage.new_tokens.sum() + lineage.cleared_tokens.sum())
    spent = case.suspect_ledger.column("reuse_below_unit")
    worst = np.argsort(unused)[::-1][:5]
    shared = unused[unused > 0]
    evidence = [
        Evidence(
            f"{number(float(unused.sum()))} prompt tokens ({percent(float(unused.sum()) / missed)} of all that were missed) in "
            f"{number(len(shared))} requests were in the cache when they were asked for, and were computed again all the same",
            float(unused.sum()),
            "tokens",
            None,
            [str(case.suspect.requests.request_id[i]) for i in worst if unused[i] > 0],
            BY_CHAINS,
        ),
        Evidence(
            f"what such a prompt shares is {number(float(np.median(shared)))} tokens long in the median",
            float(np.median(shared)),
            "tokens",
            computed_by=BY_CHAINS,
        ),
        Evidence(
            f"computing them costs a request {seconds(float(spent.mean()))} on average, its own and those of others that it waited for or shared steps with",
            float(spent.mean()),
            "s",
        ),
    ]
    unit = setting(case.suspect, "min_reuse_tokens")
    if unit:
        evidence.append(
            Evidence(
                f"the cache gives back no less than {number(unit)} tokens at once (`min_reuse_tokens`)",
                float(unit),
                "tokens",
                computed_by="the workers' own settings",
            )
        )
    for side in (case.base, case.suspect):
        cached, prompt = case.total(side, "cached_tokens"), case.total(side, "prompt_tokens")
        if cached is not None and prompt:
            evidence.append(
                Evidence(
                    f"token-weighted hit rate in the {case.word_of(side)}: {percent(cached / prompt)}",
                    cached / prompt,
                    "ratio",
                    request_sql(case, side, HIT_RATE, "cached_tokens prompt_tokens"),
                )
            )
    return Claim(evidence, case.worker_subject("reuse_below_unit"), case.when("reuse_below_unit"))


def _nothing(case: Case) -> str:
    return f"0 tokens that the {case.suspect_word} missed were in the cache when they were asked for"
