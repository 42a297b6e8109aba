"""A slower tier of KV is written to and never read."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.causes.tier_saves_nothing import GONE, lost_rows, lost_seconds
from diagnosis.claims.evidence_sql import counter_sql, event_where
from diagnosis.claims.onset import met_here_alone
from diagnosis.ledger.tiers import given_up_share, read_per_request, tier_tokens, written
from diagnosis.telling.wording import number, percent, size

NEVER = 0.01
"""Share of what the tier saved a request before, up to which it is never read."""

MOST = 0.8
"""Share of what requests find no more that the tier must have given them, before all of it is the tier's."""


@cause(
    "tier_never_read",
    needs=("block.offloaded|sample.tier_written_bytes_total",),
    rows=("premature_eviction", "admission_blocked_on_blocks", "preemption_recompute", "reuse_lost"),
)
def tier_never_read(case: Case) -> Claim | Excluded | None:
    """A slower tier of KV takes blocks in, keeps them, and is never read: what it was there for is computed again.

    Why: the shortest run that is worth a load is set longer than any prefix, keys differ between who writes and who reads (another
    salt, hash seed, model name or layout), a lookup is switched off, or a load fails and nobody says so.

    Refuted by: tokens that came from the tier; blocks that it had given up before they were asked for (then it saves nothing, for it
    is too small); nothing written to it.

    Remedy:
    - vLLM: compare the connector's keys and shortest run (--kv-transfer-config) with the prompts'; one --prefix-caching-hash-algo and one PYTHONHASHSEED for all who share a tier
    - SGLang: --hicache-storage-prefetch-policy, and a prefetch threshold below the length of the shared prefixes
    - fleet: one model name, dtype and layout for all who share a tier; look for load errors in the engine's log
    - application: none is needed; its prompts are written, and could be read

    Experiment: ask twice for one prompt that the device has given up in between; the second must load.
    """
    told = written(case.suspect)
    if told is None:
        return None
    amount, unit = told
    said = size(amount) if unit == "bytes" else f"{number(amount)} blocks"
    read, before = read_per_request(case.suspect), read_per_request(case.base)
    if read is None:
        return None
    if amount == 0 or read > NEVER * max(before or 0.0, 1.0):
        return Excluded(f"the tier took in {said} and saved a request {number(read)} prompt tokens on average")
    if not before:
        there = written(case.base)
        return Excluded(
            f"the tier took in {said} and was never read"
            + (
                f", in the {case.base_word} neither"
                if there is not None and there[0] > 0
                else f"; the {case.base_word} had none to read"
            )
        )
    gone = given_up_share(case.suspect)
    if gone is not None and gone >= GONE:
        return Excluded(f"of {said} that the tier took in it gave {percent(gone)} up before they could be read")
    rows = (*lost_rows(case), "reuse_lost") if _all_by_tier(case) else lost_rows(case)
    counted = unit == "blocks" and case.suspect.blocks is not None and case.suspect.blocks.sample_rate is None
    evidence = [
        Evidence(
            f"the tier took in {said}"
            + (f" and gave {percent(gone)} of them up" if gone is not None else "")
            + f"; it saved a request {number(read)} prompt tokens ({number(before)} in the {case.base_word})",
            amount,
            unit,
            counter_sql(case, case.suspect, "tier_written_bytes_total")
            if unit == "bytes"
            else f"SELECT count(*) AS blocks FROM block WHERE (change = 'offloaded' OR (change = 'stored' AND coalesce(tier, 'device') <> 'device')) "
            f"AND {event_where(case, case.suspect)}"
            if counted
            else None,
            case.worst_requests("premature_eviction"),
        ),
        *lost_seconds(case, rows),
    ]
    strength = 1.0 if gone is not None else 0.8
    return Claim(
        evidence,
        case.worker_subject("premature_eviction"),
        case.when("premature_eviction"),
        strength,
        rows=rows,
        began=met_here_alone(tier_tokens(case.base) > 0, tier_tokens(case.suspect) > 0),
    )


def _all_by_tier(case: Case) -> bool:
    """Whether what requests find no more is what the tier gave them: as much as the device gave, they have of it still."""
    found = [case.total(facts, "cached_tokens") for facts in (case.base, case.suspect)]
    saved = [tier_tokens(facts) for facts in (case.base, case.suspect)]
    if None in found or not all(np.isfinite(tokens).any() for tokens in saved):
        return False
    prompts = [case.total(facts, "prompt_tokens") or 1.0 for facts in (case.base, case.suspect)]
    fell = float(found[0] or 0.0) / prompts[0] - float(found[1] or 0.0) / prompts[1]
    of_tier = float(np.nansum(saved[0])) / prompts[0] - float(np.nansum(saved[1])) / prompts[1]
    return fell > 0.0 and of_tier >= MOST * fell
