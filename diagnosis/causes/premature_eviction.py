"""Prompt blocks were computed, pushed out, and asked for again."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import Case, Claim, Evidence, Excluded, cause
from diagnosis.evidence_sql import lineage_sql
from diagnosis.wording import number, percent, seconds


@cause("premature_eviction", needs=("block.evicted",), rows=("premature_eviction",))
def premature_eviction(case: Case) -> Claim | Excluded | None:
    """Prompt blocks were computed, pushed out of the cache, and asked for again: their prefill was paid twice.

    Why: the reuse gap of a prefix is longer than the time a block stays in the cache, because live requests and other prefixes
    need the room. Counted by lineage: a miss is joined to the eviction of the very block it missed.

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
    where = case.sql_where(case.suspect_window, "at_ns")
    evidence: list[Evidence] = []
    strength = 1.0
    if lineage is not None:
        again = float(lineage.evicted_tokens.sum())
        new = float(lineage.new_tokens.sum())
        affected = int((lineage.evicted_tokens > 0).sum())
        if lineage.evicted_blocks == 0:
            return Excluded(
                f"of the prompt blocks that were missed none had been stored before ({number(totals.evicted if totals else 0)} blocks "
                f"were evicted in the window, but nobody asked for them again)"
            )
        missed = again + new + float(lineage.cleared_tokens.sum())
        back = (
            ""
            if lineage.back_after_s is None
            else f", in the median {seconds(lineage.back_after_s)} after its eviction"
        )
        evidence.append(
            Evidence(
                f"{number(again)} prompt tokens ({percent(again / missed)} of all that were missed) in {number(affected)} requests had been "
                f"in the cache, were evicted and were computed again{back}",
                again,
                "tokens",
                lineage_sql(case),
                _affected(case),
            )
        )
        for worst in list(lineage.worst)[:1]:
            evidence.append(
                Evidence(
                    f"the block missed most often after its eviction was missed {worst['times']} times",
                    float(worst["times"]),
                    "misses",
                    f"SELECT at_ns, change, age_s FROM block WHERE block_hash = {worst['block_hash']} AND {where} ORDER BY at_ns",
                    [str(r) for r in worst["request_ids"]],
                )
            )
    elif totals is not None:
        strength = 0.8
        if not totals.restored:
            return Excluded(f"none of the {number(totals.evicted)} evicted blocks was stored again in the window")
        evidence.append(
            Evidence(
                f"{number(totals.restored)} of {number(totals.stored)} stored blocks had been stored and evicted before in the same window",
                float(totals.restored),
                "blocks",
                "SELECT count(*) FROM (SELECT change, lag(change) OVER (PARTITION BY worker, block_hash ORDER BY at_ns) AS before FROM block "
                f"WHERE {where}) WHERE change = 'stored' AND before = 'evicted'",
            )
        )
    if totals is not None:
        evidence.append(
            Evidence(
                f"{number(totals.evicted)} blocks were evicted in the window ({number(case.base.blocks.evicted) if case.base.blocks else 'unknown'} in the baseline)",
                float(totals.evicted),
                "blocks",
                f"SELECT count(*) FROM block WHERE change = 'evicted' AND {where}",
            )
        )
    for name, window_facts in (("baseline", case.base), ("suspect", case.suspect)):
        cached, prompt = case.total(window_facts, "cached_tokens"), case.total(window_facts, "prompt_tokens")
        if cached is not None and prompt:
            evidence.append(
                Evidence(
                    f"token-weighted hit rate in the {name}: {percent(cached / prompt)}",
                    cached / prompt,
                    "ratio",
                    f"SELECT sum(cached_tokens) / sum(prompt_tokens) FROM request WHERE vantage = '{window_facts.requests.vantage}' AND "
                    + case.sql_where(case.base_window if name == "baseline" else case.suspect_window, "arrival_ns"),
                )
            )
    return Claim(evidence, case.worker_subject("premature_eviction"), case.when("premature_eviction"), strength)


def _affected(case: Case, limit: int = 5) -> list[str]:
    lineage = case.suspect.lineage
    if lineage is None:
        return []
    order = np.argsort(lineage.evicted_tokens)[::-1][:limit]
    return [str(case.suspect.requests.request_id[i]) for i in order if lineage.evicted_tokens[i] > 0]
