"""KV blocks: running out soon, waiting for them, preemptions, blocks evicted too early, blocks that never come back."""

from __future__ import annotations

from typing import Final

from alerts.rules.rule import Alerting, Rule, increase, lately, rate, select
from store.metric_catalogue import (
    BLOCK_EVICTIONS,
    KV_USAGE,
    NEWEST_STEP,
    PREEMPTIONS,
    PREMATURE_EVICTIONS,
    REQUESTS,
    REQUESTS_RUNNING,
    WAITING_ON,
)

_USED = select(KV_USAGE)
_RUNNING = select(REQUESTS_RUNNING)

RULES: Final[tuple[Rule, ...]] = (
    Alerting(
        "KvscopeKvExhaustion",
        f"predict_linear({_USED}[15m], 1800) > 1 and {_USED} > 0.6",
        "{{ $labels.worker }} runs out of KV blocks within half an hour",
        "By the trend of 15 minutes the live requests of {{ $labels.worker }} need {{ $value | humanizePercentage }} of its blocks in half "
        "an hour. What waits then waits for blocks, and running requests are preempted.",
        wait="5m",
        cause="admission_blocked_on_blocks",
        labels={"role": "cause"},
        todo=(
            "is the load rising (requests running), or the length of requests, or do blocks not come back (KvscopeBlockLeak)?",
        ),
    ),
    Alerting(
        "KvscopeKvBlocked",
        f"min_over_time({select(WAITING_ON, on='blocks')}[5m]) > 0{lately(NEWEST_STEP, 'worker')}",
        "{{ $labels.worker }}: requests wait for KV blocks",
        "For 5 minutes there was always somebody in the queue of {{ $labels.worker }} that no blocks were free for.",
        wait="5m",
        cause="admission_blocked_on_blocks",
        labels={"role": "cause", "metric": "ttft"},
    ),
    Alerting(
        "KvscopePreemptionStorm",
        f"{rate(PREEMPTIONS, '5m', 'worker', 'model')} / {rate(REQUESTS, '5m', 'worker', 'model')} > 0.1 "
        f"and {increase(PREEMPTIONS, '5m', 'worker', 'model')} >= 10",
        "{{ $labels.worker }} preempts its requests",
        "{{ $value | humanize }} preemptions for each request of 5 minutes at {{ $labels.worker }}: they stall, and what they had computed "
        "is computed again.",
        wait="5m",
        cause="preemption_recompute",
        labels={"role": "cause", "metric": "ttft"},
    ),
    Alerting(
        "KvscopePrematureEviction",
        # Two kinds of rows may tell the same evictions: the larger number, never the sum.
        f"{rate(PREMATURE_EVICTIONS, '10m', 'worker')} "
        f"/ max by (worker) ({rate(BLOCK_EVICTIONS, '10m', 'worker', 'kind')}) > 0.25 "
        f"and {increase(PREMATURE_EVICTIONS, '10m', 'worker')} >= 100",
        "{{ $labels.worker }} evicts blocks that are asked for again",
        "{{ $value | humanizePercentage }} of the blocks that {{ $labels.worker }} evicted in 10 minutes had to be computed again: the cache "
        "keeps them for a shorter time than their reuse takes.",
        wait="10m",
        cause="premature_eviction",
        labels={"role": "cause", "metric": "ttft"},
    ),
    Alerting(
        "KvscopeBlockLeak",
        f"min_over_time({_USED}[15m]) - min_over_time({_USED}[15m] offset 1h) > 0.1 "
        f"and max_over_time({_RUNNING}[15m]) <= max_over_time({_RUNNING}[15m] offset 1h)",
        "{{ $labels.worker }}: blocks in use do not come back",
        "The floor of the blocks in use at {{ $labels.worker }} is {{ $value | humanizePercentage }} of the pool higher than an hour ago, though "
        "no more requests run.",
        wait="15m",
        keep="15m",
        cause="block_leak",
        labels={"role": "cause"},
    ),
)
