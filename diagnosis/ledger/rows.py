"""The rows of the ledger: where a request's seconds can go, and who may answer for them.

Precedence, where several rows could claim the same second (first match wins):

| # | seconds | row |
|---|---|---|
| 0 | waiting and prefill beyond what the best worker of that instant would have taken, of requests that went to a hotspot; a straggler's share of its requests' engine time | `hotspot_straggler`, `hotspot_dead_signal`, `hotspot_tie_breaking`, `hotspot_affinity` |
| 1 | engine time that slower steps added (share 1 - 1/slow_factor); where they were slow for a spell only, of what 10 to 14 call ordinary work in it | `slow_steps` |
| 2 | waiting, bound by KV blocks | `admission_blocked_on_blocks` |
| 3 | waiting, bound by a dependency (adapter, transfer, grammar) | `queue_dependency` |
| 4 | waiting through steps (bound by budget, seats or unknown) whose time went into bookkeeping: look-ups, the cache's lock, evictions, the probe, adapters, compiling, loads from a tier that the step stands still for; or that stood still and nothing tells why | `lookup_overhead`, `cache_lock_contention`, `eviction_overhead`, `probe_overhead`, `adapter_swap`, `recompile`, `tier_load`; `slow_steps` |
| 4a | ... that computed what another worker held and the router did not know of or go by | `hotspot_stale_index`, `hotspot_unreachable_threshold` |
| 5 | ... that computed blocks again that had been evicted for room, given up by age, or were there and too few to be used | `premature_eviction`, `ttl_expiry`, `reuse_below_unit` |
| 6 | ... that computed again after preemption | `preemption_recompute` |
| 7 | ... that computed what a cache would have kept, were it on, or did prompts begin alike as they did in the other window | `prefix_caching_off`, `prompt_uncacheable` |
| 8 | ... that filled an empty cache after a start | `cold_start` |
| 9 | ... that computed a long prompt of another request | `long_prefill_interference` |
| 10 | waiting through steps of ordinary work: all seats taken, the token budget used up, or bound by what nobody tells | `queue_seats`, `queue_budget`, `queue_load` |
| 11 | own prefill: the parts above in the same order, by tokens times seconds a token; then the steps it shared | as 4 to 9, `shared_prefill`, `decode_bandwidth` |
| 12 | own prefill, the rest | `own_prefill` |
| 13 | own look-up and allocation; own load from a tier; attempts that were given up; a fixed time that no phase tells of; before the engine: HTTP, parsing, the way in; the first token's way back; either way, where clocks do not tell which | `lookup_overhead`, `cache_lock_contention`, `eviction_overhead`, `tier_load`, `client_retries`, `fixed_offset`, `front_end`, `behind_engine`, `either_way` |
| 13a | hand-over to a decode worker, before or after the first token: bytes under way and the link's queue; no room there; neither; broken ones; its queue | `transfer_wire`, `decode_block_shortage`, `transfer_orchestration`, `transfer_failures`, `decode_queue` |
| 14 | decode: stalls after preemption, steps shared with prefills, steps that accepted drafts would have saved, fuller batches, the rest | `preemption_recompute`, as 4 to 9, `shared_prefill`, `speculation_collapse`, `decode_bandwidth`, `own_decode` |
| 15 | time between phases that no phase owns | `unexplained` |

A request whose first token never came is split like any other, up to its end: given up in the queue it waited (2 to 10), given
up after it was scheduled it prefilled (11, 12). Where the windows were reweighted to a common mix, what that took away from
the raw change stands beside these rows in `length_shift` (prompts or answers moved) or `mix_shift` (workloads or tenants).
Tokens that the other window's hit rate would have found cached, lost for a reason that no block event tells, stand in
`reuse_lost`. An answer that came at once stands in `answer_unobserved`. Where the queue or the prefill was not observed, their seconds stand in one `..._unobserved` row, less what callers
tell of attempts that were given up: unknown is not guessed.
"""

from __future__ import annotations

from typing import Final

ROWS: Final[dict[str, str]] = {
    "client_retries": "attempts that the caller gave up before the one that was served",
    "fixed_offset": "a fixed time that no phase tells of",
    "front_end": "before the engine: HTTP, parsing, tokenising, network",
    "behind_engine": "behind the engine, between its first token and the caller's",
    "either_way": "between caller and engine, on the way in or on the way back",
    "hotspot_affinity": "at a worker that the router keeps a prefix or tenant at, beyond the best worker",
    "hotspot_straggler": "at a worker whose steps were slower than the others'",
    "hotspot_dead_signal": "at a worker that the router's dead load signal sent too much to, beyond the best worker",
    "hotspot_tie_breaking": "at a worker that wins every tie, beyond the best worker",
    "hotspot_stale_index": "computing what another worker held and the router's index did not know, own and others'",
    "hotspot_unreachable_threshold": "computing what another worker held and the router did not go by, own and others'",
    "admission_blocked_on_blocks": "waiting for KV blocks",
    "queue_dependency": "waiting for an adapter, a transfer or a grammar",
    "lookup_overhead": "looking prompts up in the prefix cache, own and others'",
    "cache_lock_contention": "waiting to look a prompt up while others held the cache, own and others'",
    "eviction_overhead": "finding room for blocks: evicting, own and others'",
    "probe_overhead": "steps that recorded what they did",
    "adapter_swap": "steps that waited for a LoRA adapter's weights",
    "recompile": "steps that stood still for a shape that was new",
    "tier_load": "loading KV from a slower tier, own and others'",
    "premature_eviction": "computing evicted prompt blocks again, own and others'",
    "ttl_expiry": "computing prompt blocks again that were given up by age, own and others'",
    "reuse_below_unit": "computing what was in the cache and too short to be used, own and others'",
    "preemption_recompute": "preempted: stalls and computing again, own and others'",
    "prefix_caching_off": "computing what a prefix cache would have kept",
    "prompt_uncacheable": "computing what prompts no longer share, own and others'",
    "cold_start": "filling an empty cache after a start",
    "long_prefill_interference": "steps shared with, or waited through, long prompts of others",
    "slow_steps": "the same work took longer per step, or steps stood still, own and others'",
    "queue_seats": "waiting behind ordinary work while all seats were taken",
    "queue_budget": "waiting behind ordinary work that used up the steps' token budget",
    "queue_load": "waiting behind ordinary work",
    "shared_prefill": "steps shared with ordinary prompts of others",
    "reuse_lost": "computing what the other window found cached; why it was not found is not observable here",
    "own_prefill": "computing its own prompt",
    "transfer_wire": "KV on its way to the decode worker, or behind other KV on the link",
    "transfer_orchestration": "hand-over to the decode worker while no byte moved and there was room",
    "transfer_failures": "hand-overs that broke, and computing again what they should have brought",
    "decode_block_shortage": "hand-over waiting for KV blocks at the decode worker",
    "decode_queue": "waiting for a seat at the decode worker",
    "speculation_collapse": "steps that accepted drafts would have saved",
    "decode_bandwidth": "fuller batches: each step serves more sequences",
    "own_decode": "decoding at the speed of a single sequence",
    "decode_stall": "stalls between tokens, cause not observable here",
    "unexplained": "time that no phase owns",
    "queue_unobserved": "queue, cause not observable here",
    "ttft_unobserved": "time to first token, cause not observable here",
    "decode_unobserved": "decode, cause not observable here",
    "answer_unobserved": "the whole answer, which was not streamed: its parts are not observable here",
    "length_shift": "longer or shorter prompts and answers in the traffic",
    "mix_shift": "another mix of workloads or tenants in the traffic",
}

HANDOVER: Final = (
    "transfer_failures",
    "decode_block_shortage",
    "transfer_wire",
    "transfer_orchestration",
    "decode_queue",
)
"""What a hand-over can spend its time on."""

HOTSPOTS: Final = ("hotspot_straggler", "hotspot_dead_signal", "hotspot_tie_breaking", "hotspot_affinity")
"""Hotspots of one worker: their seconds are carved out first, in this order."""

OVERHEADS: Final = (
    "lookup_overhead",
    "cache_lock_contention",
    "eviction_overhead",
    "probe_overhead",
    "adapter_swap",
    "recompile",
    "tier_load",
    "slow_steps",
)
"""What a step can spend its time on beside the work of the model; whoever waits or is served meanwhile pays."""

PASSED_ON: Final = (
    "hotspot_stale_index",
    "hotspot_unreachable_threshold",
    "premature_eviction",
    "ttl_expiry",
    "reuse_below_unit",
    "preemption_recompute",
    "prefix_caching_off",
    "prompt_uncacheable",
    "cold_start",
    "long_prefill_interference",
)
"""What a step can spend its prefill time on that somebody answers for; the rest is ordinary work."""

KINDS: Final = (*PASSED_ON, "reuse_lost", "shared_prefill")
"""All kinds of prefill a step can spend its time on; the last is ordinary work."""

ORDINARY: Final = frozenset(
    {
        "queue_load",
        "queue_seats",
        "queue_budget",
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
    {
        "own_prefill",
        "own_decode",
        "queue_load",
        "queue_seats",
        "queue_budget",
        "shared_prefill",
        "front_end",
        "other",
        "queue_dependency",
        "decode_queue",
        "tier_load",
    }
)
"""Rows that describe work; a cause has to claim them before anybody is to blame."""

UNOBSERVED: Final = frozenset(
    {
        "queue_unobserved",
        "ttft_unobserved",
        "decode_unobserved",
        "answer_unobserved",
        "decode_stall",
        "reuse_lost",
        "behind_engine",
        "either_way",
    }
)
