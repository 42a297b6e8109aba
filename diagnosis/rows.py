"""The rows of the ledger: where a request's seconds can go, and who may answer for them.

Precedence, where several rows could claim the same second (first match wins):

| # | seconds | row |
|---|---|---|
| 1 | engine time that slower steps added (share 1 - 1/slow_factor); where they were slow for a spell only, of what 9 to 13 call ordinary work in it | `slow_steps` |
| 2 | waiting, bound by KV blocks | `admission_blocked_on_blocks` |
| 3 | waiting, bound by a dependency (adapter, transfer, grammar) | `queue_dependency` |
| 4 | waiting through steps (bound by budget, seats or unknown) that computed evicted blocks again | `premature_eviction` |
| 5 | ... that computed again after preemption | `preemption_recompute` |
| 6 | ... that computed what a cache would have kept, were it on | `prefix_caching_off` |
| 7 | ... that filled an empty cache after a start | `cold_start` |
| 8 | ... that computed a long prompt of another request | `long_prefill_interference` |
| 9 | waiting through steps of ordinary work | `queue_load` |
| 10 | own prefill: the parts above in the same order, by tokens times seconds a token; then the steps it shared | as 4 to 8, `shared_prefill`, `decode_bandwidth` |
| 11 | own prefill, the rest | `own_prefill` |
| 12 | before the engine: HTTP, parsing, network | `front_end` |
| 13 | decode: stalls after preemption, steps shared with prefills, fuller batches, the rest | `preemption_recompute`, as 4 to 8, `shared_prefill`, `decode_bandwidth`, `own_decode` |
| 14 | time between phases that no phase owns | `unexplained` |

A request whose first token never came is split like any other, up to its end: given up in the queue it waited (2 to 9), given
up after it was scheduled it prefilled (10, 11). Where the windows were reweighted to a common mix, what that took away from
the raw change stands beside these rows in `length_shift` (prompts or answers moved) or `mix_shift` (workloads or tenants).
Tokens that the baseline's hit rate would have found cached, lost for a reason that no block event tells, stand in
`reuse_lost`. Where the queue or the prefill was not observed, their seconds stand in one `..._unobserved` row: unknown is not guessed.
"""

from __future__ import annotations

from typing import Final

ROWS: Final[dict[str, str]] = {
    "front_end": "before the engine: HTTP, parsing, tokenising, network",
    "admission_blocked_on_blocks": "waiting for KV blocks",
    "queue_dependency": "waiting for an adapter, a transfer or a grammar",
    "premature_eviction": "computing evicted prompt blocks again, own and others'",
    "preemption_recompute": "preempted: stalls and computing again, own and others'",
    "prefix_caching_off": "computing what a prefix cache would have kept",
    "cold_start": "filling an empty cache after a start",
    "long_prefill_interference": "steps shared with, or waited through, long prompts of others",
    "slow_steps": "the same work took longer per step",
    "queue_load": "waiting behind ordinary work",
    "shared_prefill": "steps shared with ordinary prompts of others",
    "reuse_lost": "computing what the baseline found cached; why it was lost is not observable here",
    "own_prefill": "computing its own prompt",
    "decode_bandwidth": "fuller batches: each step serves more sequences",
    "own_decode": "decoding at the speed of a single sequence",
    "decode_stall": "stalls between tokens, cause not observable here",
    "unexplained": "time that no phase owns",
    "queue_unobserved": "queue, cause not observable here",
    "ttft_unobserved": "time to first token, cause not observable here",
    "decode_unobserved": "decode, cause not observable here",
    "length_shift": "longer or shorter prompts and answers in the traffic",
    "mix_shift": "another mix of workloads or tenants in the traffic",
}

PASSED_ON: Final = (
    "premature_eviction",
    "preemption_recompute",
    "prefix_caching_off",
    "cold_start",
    "long_prefill_interference",
)
"""What a step can spend its prefill time on that somebody answers for; the rest is ordinary work."""

KINDS: Final = (*PASSED_ON, "reuse_lost", "shared_prefill")
"""All kinds of prefill a step can spend its time on; the last is ordinary work."""

ORDINARY: Final = frozenset(
    {
        "queue_load",
        "queue_unobserved",
        "ttft_unobserved",
        "shared_prefill",
        "own_prefill",
        "decode_bandwidth",
        "own_decode",
    }
)
"""Rows of which a spell of slow steps takes its share; all others have their seconds by tokens, blocks or stalls."""

NEUTRAL: Final = frozenset(
    {"own_prefill", "own_decode", "queue_load", "shared_prefill", "front_end", "other", "queue_dependency"}
)
"""Rows that describe work; a cause has to claim them before anybody is to blame."""

UNOBSERVED: Final = frozenset(
    {"queue_unobserved", "ttft_unobserved", "decode_unobserved", "decode_stall", "reuse_lost"}
)
