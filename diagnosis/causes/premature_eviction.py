"""Prompt blocks were computed, pushed out, and asked for again."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import BY_CHAINS, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.displaced import displaced, evicting_tenant
from diagnosis.claims.evidence_sql import HIT_RATE, evicted_sql, lost_sql, num_lost_sql, request_sql, restored_sql, text
from diagnosis.facts import LineageFacts
from diagnosis.sampled import count_words, num_requests, rate_of, sampled_words
from diagnosis.telling.wording import number, percent, seconds


@cause("premature_eviction", needs=("block.evicted",), rows=("premature_eviction",))
def premature_eviction(case: Case) -> Claim | Excluded | None:
    """Prompt blocks were computed, pushed out of the cache, and asked for again: their prefill was paid twice.

    Why: the reuse gap of a prefix is longer than the time a block stays in the cache, because live requests and other prefixes
    need the room. Counted by lineage: a miss is joined to the eviction of the very block it missed. Of a live window the hour
    before it counts too: what was stored earlier is taken for new.

    Refuted by: missed blocks that had never been stored (new prompts); evicted blocks that nobody asked for again.

    Remedy:
    - vLLM: more KV blocks (--gpu-memory-utilization, --num-gpu-blocks-override) or smaller KV (--kv-cache-dtype fp8)
    - vLLM: a host tier (--kv-offloading-size) that keeps evicted prefixes one copy away
    - router: keep a prefix on fewer workers, so that each cache has to hold fewer of them
    - application: fewer or shorter distinct prefixes (template diet, stable system prompts, tools in a fixed order)

    Experiment: replay the trace with more blocks (`kvscope capacity --store S --run NAME --policy lru --blocks N,N`); the hit
    rate must rise if eviction is the cause, and must not if the prompts are new.
    """
    facts = case.suspect
    lineage, totals = facts.lineage, facts.blocks
    evidence: list[Evidence] = []
    strength = 1.0
    if lineage is not None:
        if lineage.evicted_blocks == 0:
            return Excluded(
                f"of the prompt blocks that were missed none had been stored before{_how_far(case)} ({number(totals.evicted if totals else 0)} blocks "
                f"were evicted in the {case.suspect_word}, but nobody asked for them again)"
            )
        evidence += _by_lineage(case, lineage)
    elif totals is not None:
        if totals.evicted == 0:
            return Excluded(f"0 blocks were evicted in the {case.suspect_word}")
        if totals.restored is None:  # evictions alone, and no prompt tells its blocks
            return None
        strength = 0.8
        if not totals.restored:
            return Excluded(
                f"none of the {number(totals.evicted)} evicted blocks was stored again in the {case.suspect_word}"
            )
        evidence.append(
            Evidence(
                f"{number(totals.restored)} of {number(totals.stored)} stored blocks had been stored and evicted before in the {case.suspect_word}"
                + sampled_words(totals.sample_rate),
                float(totals.restored),
                "blocks",
                restored_sql(case),
            )
        )
    if totals is not None:
        then = f"{number(case.base.blocks.evicted)} in the {case.base_word}" if case.base.blocks else ""
        evidence.append(
            Evidence(
                f"{number(totals.evicted)} blocks were evicted in the {case.suspect_word}"
                + (f" ({then})" if then else "")
                + sampled_words(totals.sample_rate),
                float(totals.evicted),
                "blocks",
                evicted_sql(case, facts),
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
    tenant = evicting_tenant(facts)
    subject = case.worker_subject("premature_eviction") if tenant is None else ("tenant", tenant)
    return Claim(evidence, subject, case.when("premature_eviction"), strength)


def _how_far(case: Case) -> str:
    return "" if case.suspect_window.start_ns is None else ", in the window or the hour before it"


def _by_lineage(case: Case, lineage: LineageFacts) -> list[Evidence]:
    """Tokens computed twice, and the block that was lost most often."""
    requests = case.suspect.requests
    again, affected = lineage.lost_tokens, int((lineage.evicted_tokens > 0).sum())
    others = float(lineage.new_tokens.sum()) + float(lineage.cleared_tokens.sum()) + lineage.apart_tokens
    # the query finds all that had been stored before, whatever became of it
    sql = lost_sql(case, f"{num_lost_sql(case)} * {case.suspect.block_size()} AS tokens")
    missed = again + others / rate_of(requests)
    rates = [rate for rate in (requests.sample_rate, lineage.block_rate) if rate is not None]
    seen = (
        f"{number(affected)} requests"
        if not rates
        else f"at least {number(affected)} of {number(round(num_requests(requests)))} requests"
    )
    when = lineage.back_after_s
    back = "" if when is None else f", the most wanted in the median {seconds(when)} after their eviction"
    evidence = [
        Evidence(
            f"{number(again)}{count_words(lineage)} prompt tokens ({percent(again / missed)} of all that were missed) in {seen} had been "
            f"in the cache, were evicted and were computed again{back}{sampled_words(min(rates, default=None))}",
            again,
            "tokens",
            None if lineage.apart_tokens else sql,
            _affected(case),
            BY_CHAINS,
        )
    ]
    for worst in [] if lineage.apart_tokens else list(lineage.worst)[:1]:
        where = f"block_hash = {worst['block_hash']}"
        if lineage.by_worker:
            where += f" AND worker = {text(str(worst['worker']))}"
        evidence.append(
            Evidence(
                f"the block missed most often after its eviction was missed {number(worst['times'])} times"
                + (" by the requests of the sample" if rates else ""),
                float(worst["times"]),
                "misses",
                lost_sql(case, "count(*) AS misses", where),
                [str(r) for r in worst["request_ids"]],
            )
        )
    return [*evidence, *displaced(case, lineage)]


def _affected(case: Case, limit: int = 5) -> list[str]:
    lineage = case.suspect.lineage
    if lineage is None:
        return []
    order = np.argsort(lineage.evicted_tokens)[::-1][:limit]
    return [str(case.suspect.requests.request_id[i]) for i in order if lineage.evicted_tokens[i] > 0]
