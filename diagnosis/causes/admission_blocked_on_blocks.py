"""Requests wait for KV blocks while seats are free."""

from __future__ import annotations

import numpy as np

from diagnosis.cause import BY_CHAINS, Case, Claim, Evidence, Excluded, cause
from diagnosis.claims.evidence_sql import counter_sql, event_where, lost_sql, num_lost_sql, pool_sql, request_sql
from diagnosis.ledger.smaller_pool import smaller_pool
from diagnosis.ledger.timeline import SEEN_IN
from diagnosis.sampled import count_words
from diagnosis.telling.wording import number, percent, seconds

BY_GEOMETRY, BY_TRACES = 0.78, 0.6
"""What it is worth where no scheduler says what requests wait for: the pool and what was wanted of it, or traces of shortage alone."""
BY_SETTINGS = 0.45
"""What a smaller pool is worth as the only trace where nobody tells whether the machine is as fast as it was: that makes queues too."""
WAITED_S = 0.001
"""Waits shorter than this are a scheduler's own pace."""


@cause(
    "admission_blocked_on_blocks",
    needs=("request.queue_s|step.waiting_on_blocks",),
    rows=("admission_blocked_on_blocks",),
)
def admission_blocked_on_blocks(case: Case) -> Claim | Excluded | None:
    """Requests waited for KV blocks: the pool was too small for what ran at once.

    Why: a request is admitted only when the blocks of its prompt are free. Live requests hold theirs until they end, so with
    a small pool the queue grows although the engine has seats and the steps are not longer. Where no event and no counter could tell of
    a shortage, a pool that the workers say was made smaller does, with less confidence.

    Refuted by: waiting only while all seats are taken, or while another prompt is being computed; no eviction and no
    preemption in the window; more free blocks than the waiting prompts need.

    Remedy:
    - vLLM: raise --gpu-memory-utilization or --num-gpu-blocks-override, or store KV smaller with --kv-cache-dtype fp8
    - vLLM: --max-num-seqs no higher than what the pool can hold avoids preemptions (it does not shorten this wait)
    - fleet: add workers; a host tier for evicted prefixes does not help, for what waits needs room to run
    - application: shorter prompts (history growth, RAG top-k, template diet) and lower max_tokens hold fewer blocks for less time

    Experiment: run the same traffic with 1.5 times the KV blocks; waiting on blocks should vanish, waiting for seats would stay.
    """
    facts, base = case.suspect, case.base
    waits = case.suspect_ledger.column("admission_blocked_on_blocks")
    waited = int((waits > WAITED_S).sum())
    queue = facts.requests.get("queue_s")
    if waited == 0:
        return Excluded(
            f"no request waited for blocks while seats were free (queueing in all: {seconds(float(np.nansum(queue)))})"
        )
    evidence = [
        Evidence(
            f"{number(waited)} of {number(len(waits))} requests of the {case.suspect_word} waited for blocks while seats were free and no "
            f"other reason was seen; the wait costs {seconds(float(waits.mean()))} a request on average",
            float(waits.mean()),
            "s",
            None,
            case.worst_requests("admission_blocked_on_blocks"),
        )
    ]
    if np.isfinite(queue).any():
        before = base.requests.get("queue_s")
        then = f" ({seconds(float(np.nanmean(before)))} in the {case.base_word})" if np.isfinite(before).any() else ""
        evidence.append(
            Evidence(
                f"a request queued {seconds(float(np.nanmean(queue)))} on average{then}",
                float(np.nanmean(queue)),
                "s",
                request_sql(case, facts, "avg(queue_s) AS mean_queue_s", "queue_s"),
            )
        )
    blocks_now, blocks_then = facts.num_blocks(), base.num_blocks()
    if blocks_now is not None:
        then = "" if blocks_then in (None, blocks_now) else f" ({number(blocks_then)} in the {case.base_word})"
        evidence.append(
            Evidence(
                f"the pool has {number(blocks_now)} usable KV blocks{then}", blocks_now, "blocks", pool_sql(case, facts)
            )
        )
    preemptions = facts.samples.get("preemptions_total")
    if preemptions:
        evidence.append(
            Evidence(
                f"the engine preempted {number(preemptions)} times in the {case.suspect_word}: blocks ran out under running requests too",
                preemptions,
                "preemptions",
                counter_sql(case, facts, "preemptions_total"),
            )
        )
    lineage = facts.lineage
    if lineage is not None and lineage.evicted_blocks:
        evidence.append(
            Evidence(
                f"to admit others, {number(lineage.evicted_blocks)} blocks were evicted that later prompts asked for again "
                f"({number(lineage.lost_tokens)}{count_words(lineage)} tokens computed twice)",
                float(lineage.evicted_blocks),
                "blocks",
                None
                if lineage.apart_tokens
                else lost_sql(
                    case, f"round({num_lost_sql(case)}) AS blocks" if lineage.margin_tokens else "count(*) AS blocks"
                ),
                computed_by=BY_CHAINS,
            )
        )
    usage = facts.samples.get("kv_usage_ratio:mean")
    if usage is not None:
        evidence.append(
            Evidence(
                f"scraped KV usage averaged {percent(usage)}: a gauge that is read once a second misses most of the shortage",
                usage,
                "ratio",
                f"SELECT avg(value) AS mean FROM sample WHERE name = 'kv_usage_ratio' AND {event_where(case, facts)}",
            )
        )
    told = "step.waiting_on_blocks" in facts.visible
    smaller = smaller_pool(facts, base)
    unseen = smaller is not None and facts.blocks is None and not facts.visible & SEEN_IN and not told
    if unseen and smaller is not None:
        evidence.append(
            Evidence(
                f"no event and no counter could tell of a shortage; a worker's pool has {number(smaller[0])} blocks ({number(smaller[1])} in the "
                f"{case.base_word}), and while they waited the running requests and the next one wanted as many",
                float(smaller[0]),
                "blocks",
                computed_by="the workers' own settings, and what the requests' lengths want of them",
            )
        )
    by_settings = BY_TRACES if case.model.slow_raw is not None else BY_SETTINGS
    geometry = facts.num_blocks() is not None and facts.seats(facts.requests.worker_names[0]) is not None
    return Claim(
        evidence,
        subject=case.worker_subject("admission_blocked_on_blocks"),
        interval_s=case.when("admission_blocked_on_blocks"),
        strength=by_settings if unseen else 1.0 if told else BY_GEOMETRY if geometry else BY_TRACES,
    )
