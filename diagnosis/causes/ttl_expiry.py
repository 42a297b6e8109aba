"""Cached blocks were given up by age before they were asked for again."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import BY_CHAINS, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import HIT_RATE, event_where, request_sql
from diagnosis.telling.wording import number, percent, seconds
from store.evidence.lineage import ON_DEVICE


@cause("ttl_expiry", needs=("block.evicted", "request.prompt_blocks"), rows=("ttl_expiry",))
def ttl_expiry(case: Case) -> Claim | Excluded | None:
    """Cached blocks were given up by age, and asked for again afterwards: their prefill was paid twice.

    Why: a time to live, or a rule that frees what was not used for a while, takes blocks although the pool has room. The prefixes'
    reuse gap is longer than that time. Counted by lineage: the block at which a request's chain broke had gone with the reason `ttl`.

    Refuted by: blocks that went for want of room (then it is `premature_eviction`); missed blocks that had never been stored.

    Remedy:
    - fleet: raise the cache's time to live above the reuse gap of the prefixes, or do without one where the pool has room
    - vLLM: it has none on the device; look at the connector's or the tier's own setting (--kv-transfer-config)
    - application: ask again within that time (keep sessions warm, send related work together)

    Experiment: double the time to live on one worker; the hit rate must rise there.
    """
    lineage = case.suspect.lineage
    if lineage is None or lineage.expired_tokens is None:
        return None if lineage is None or lineage.evicted_tokens.any() else Excluded(_nothing(case))
    expired = lineage.expired_tokens
    if not expired.any():
        return Excluded(_nothing(case))
    missed = lineage.lost_tokens + lineage.apart_tokens + float(lineage.new_tokens.sum() + lineage.cleared_tokens.sum())
    spent = case.suspect_ledger.column("ttl_expiry")
    worst = np.argsort(expired)[::-1][:5]
    evidence = [
        Evidence(
            f"{number(float(expired.sum()))} prompt tokens ({percent(float(expired.sum()) / missed)} of all that were missed) in "
            f"{number(int((expired > 0).sum()))} requests had been in the cache, were given up by age and were computed again",
            float(expired.sum()),
            "tokens",
            None,
            [str(case.suspect.requests.request_id[i]) for i in worst if expired[i] > 0],
            BY_CHAINS,
        ),
        Evidence(
            f"computing them costs a request {seconds(float(spent.mean()))} on average, its own and those of others that it waited for or shared steps with",
            float(spent.mean()),
            "s",
        ),
    ]
    if case.suspect.blocks is not None and case.suspect.blocks.sample_rate is None:
        evidence.append(_gone_by_age(case))
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
    return Claim(evidence, case.worker_subject("ttl_expiry"), case.when("ttl_expiry"))


def _nothing(case: Case) -> str:
    return f"0 tokens that the {case.suspect_word} missed had been given up by age"


def _gone_by_age(case: Case) -> Evidence:
    """How full the pool was: who gives blocks up by age while there is room gains nothing by it."""
    evicted = case.suspect.blocks.evicted if case.suspect.blocks is not None else 0
    return Evidence(
        f"{number(evicted)} blocks left the cache in the {case.suspect_word}, for whatever reason",
        float(evicted),
        "blocks",
        f"SELECT count(*) AS blocks FROM block WHERE change IN ('evicted', 'removed') AND {ON_DEVICE} AND {event_where(case, case.suspect)}",
    )
