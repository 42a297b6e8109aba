"""Hand-made pairs of windows, as in `cause_scenarios.py`, for what a cache, its tiers and the executor do beside the plain step.

Requests come one each 2 s and do not meet; 60 a window. The arithmetic stands beside each pair.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from diagnosis.facts import BlockTotals, Facts, LineageFacts, SharingFacts, StepFacts
from tests.cause_scenarios import JITTER, N, Pair, Scenarios, bare_pair, pair, plain, without_blocks, worker
from tests.cost_scenarios import looked_up
from tests.factories import facts

TOKENS = 150.0 + np.arange(N) % 5 * 5.0
"""Prompts differ, so that what a token costs (1 ms) can be fitted: 160 of them in the mean."""
THIRD = np.arange(N) % 3 == 0
HALF = np.arange(N) % 2 == 0


# Tiers: 100 tokens come from the tier or are computed in 100 ms, 150 to 170 others are computed


def _loaded(load: float, *, host: float = 100.0, device: float = 0.0, cached: float | None = None) -> Facts:
    requests = plain(
        TOKENS * 0.001 / JITTER,
        computed_tokens=TOKENS,
        prompt_tokens=TOKENS + 100.0,
        cached_tokens=host + device if cached is None else cached,
        cached_tokens_host=host,
        cached_tokens_device=device,
        kv_load_s=load,
    )
    requests.first_token_s[:] += load
    return facts(requests, workers=[worker(500)])


def slow_loads() -> Pair:
    """400 ms to load what is computed in 100, 50 ms before: 350 ms a request, all of the change."""
    return pair(_loaded(0.05), _loaded(0.4))


def quick_loads() -> Pair:
    """50 ms a load in both windows."""
    return pair(_loaded(0.05), _loaded(0.05))


def loads_still_worth_it() -> Pair:
    """80 ms in place of 50, for what is computed in 100: slower, and still quicker than computing."""
    return pair(_loaded(0.05), _loaded(0.08))


def hits_that_the_device_has() -> Pair:
    """The tier reports the 100 tokens that the device holds, and takes 60 ms over them: all of the change."""
    no_tier = plain(TOKENS * 0.001 / JITTER, computed_tokens=TOKENS, prompt_tokens=TOKENS + 100.0, cached_tokens=100.0)
    return pair(facts(no_tier, workers=[worker(500)]), _loaded(0.06, host=100.0, device=100.0, cached=100.0))


def a_tier_that_saves() -> Pair:
    """As much read as before: 100 tokens (100 ms) for 50 ms."""
    return pair(_loaded(0.05), _loaded(0.05))


# What the tier took in, gave up and served: 100 tokens a request are 375 blocks of 16


def _behind(served: float, lost: float, given_up: int, prefill: float, taken: int = 500) -> Facts:
    requests = plain(prefill, computed_tokens=60.0 + lost, cached_tokens=100.0 - lost, prompt_tokens=160.0)
    lineage = LineageFacts(np.full(N, lost), np.full(N, 60.0), np.zeros(N), int(lost * N / 16), 3.0, ())
    blocks = BlockTotals(500, 400, 0, 0, tier_taken=taken, tier_given_up=given_up, tier_loaded=round(served * N / 16))
    known = facts(requests, workers=[worker(500)], lineage=lineage, blocks=blocks)
    return replace(known, visible=known.visible | {"block.offloaded"})


def never_read() -> Pair:
    """The tier served 100 tokens a request and serves none, though it keeps its 500 blocks: 100 ms to compute, all of the change."""
    return pair(_behind(100.0, 0.0, 0, 0.06), _behind(0.0, 100.0, 0, 0.16))


def read_as_before() -> Pair:
    """100 tokens a request in both windows."""
    return pair(_behind(100.0, 0.0, 0, 0.06), _behind(100.0, 0.0, 0, 0.06))


def gone_before_it_is_read() -> Pair:
    """The same, but it gave 450 of 500 blocks up: it is too small, which is another cause."""
    return pair(_behind(100.0, 0.0, 0, 0.06), _behind(0.0, 100.0, 450, 0.16))


def blind_to_tiers() -> Pair:
    base, suspect, metric = without_blocks(never_read)()
    hidden = [replace(f, visible=f.visible - {"block.offloaded"}) for f in (base, suspect)]
    return hidden[0], hidden[1], metric


# cache_lock_contention: a look-up takes 0.1 ms


def _waited(wait: float, prefill: float = 0.1) -> Facts:
    took = 0.0001 + np.where(THIRD, wait, 0.0)
    requests = plain(prefill, cache_lookup_s=took)
    requests.first_token_s[:] += took
    return facts(requests)


def waiting_for_the_lock() -> Pair:
    """A third of the look-ups wait 240 ms: 80 ms a request, all of the change."""
    return pair(_waited(0.0), _waited(0.24))


def never_waiting() -> Pair:
    """0.1 ms each in both windows."""
    return pair(_waited(0.0), _waited(0.0))


def dear_for_all() -> Pair:
    """Every look-up takes 80 ms: nobody waits for anybody."""
    return pair(looked_up(0.0001), looked_up(0.08))


# fixed_offset: 100 ms of prefill, and seconds that no phase owns


def _beside(more: Any, prefill: float = 0.1) -> Facts:
    requests = plain(prefill)
    requests.first_token_s[:] += more
    return facts(requests)


def held_back() -> Pair:
    """Half of the requests take 400 ms longer, the others none of it: 200 ms a request, all of the change."""
    return pair(_beside(0.0), _beside(np.where(HALF, 0.4, 0.0)))


def as_often_held_back() -> Pair:
    """The same half in both windows."""
    return pair(_beside(np.where(HALF, 0.4, 0.0)), _beside(np.where(HALF, 0.4, 0.0)))


def scattered() -> Pair:
    """As much on average, but anything from 0 to 800 ms: no fixed time."""
    return pair(_beside(0.0), _beside(np.arange(N) * 37 % N / N * 0.8))


# prompt_uncacheable: prompts of 160 tokens that begin alike for 100


def _alike(common: float, cached: float, prefill: float) -> Facts:
    requests = plain(prefill, cached_tokens=cached, computed_tokens=160.0 - cached)
    new = np.full(N, 160.0 - cached)
    lineage = LineageFacts(np.zeros(N), new, np.zeros(N), 0, None, ())
    known = facts(requests, workers=[worker(500)], lineage=lineage, blocks=BlockTotals(500, 0, 0, 0))
    sharing = SharingFacts(np.arange(N), np.full(N, common))
    return replace(known, sharing=sharing, visible=known.visible | {"request.prompt_blocks"})


def no_longer_alike() -> Pair:
    """Nothing in common in place of 100 tokens, and none of them cached: 100 ms to compute, all of the change."""
    return pair(_alike(100.0, 100.0, 0.06), _alike(0.0, 0.0, 0.16))


def as_alike() -> Pair:
    """100 tokens in both windows."""
    return pair(_alike(100.0, 100.0, 0.06), _alike(100.0, 100.0, 0.06))


def alike_and_not_found() -> Pair:
    """Prompts begin alike as before, and nothing is found cached: it is not the prompts."""
    return pair(_alike(100.0, 100.0, 0.06), _alike(100.0, 0.0, 0.16))


def without_chains() -> Pair:
    base, suspect, metric = no_longer_alike()
    hidden = [
        replace(f, lineage=None, sharing=None, visible=f.visible - {"request.prompt_blocks"}) for f in (base, suspect)
    ]
    return hidden[0], hidden[1], metric


# recompile, adapter_swap: each request has one step of prefill (1 ms a token) and one of decode (10 ms)

SHAPES = np.where(HALF, 150.0 + np.arange(N) / 2, 160.0)
"""Every other prompt has a length of its own, 150 to 179."""
PAIRS = np.array([f"adapter-{i // 2 % 2}" for i in range(N)], dtype=object)
"""Two adapters in turn, two requests each: the first of each two asks for one that has been away."""


def _stepped(extra: Any, tokens: Any = SHAPES, model: Any = None) -> Facts:
    """`extra` [N] s that each step of prefill takes beyond its work."""
    more = np.broadcast_to(np.asarray(extra, dtype=float), N)
    work = np.broadcast_to(np.asarray(tokens, dtype=float), N) * 0.001 + 0.01
    lasted = np.stack([work + more, np.full(N, 0.01)], axis=1) * (1.0 + 0.001 * np.sin(np.arange(2 * N)).reshape(N, 2))
    end = np.arange(N)[:, None] * 2.0 + np.cumsum(lasted, axis=1)
    spread = np.broadcast_to(np.asarray(tokens, dtype=float), N)
    steps = StepFacts(
        worker=np.zeros(2 * N, dtype=np.int64),
        worker_names=("w0",),
        at_s=end.ravel(),
        duration_s=lasted.ravel(),
        numbers={
            "prefill_tokens": np.stack([spread, np.zeros(N)], axis=1).ravel(),
            "decode_tokens": np.tile([0.0, 1.0], N),
            "num_running": np.ones(2 * N),
        },
    )
    requests = plain(
        lasted[:, 0] / JITTER, decode=0.01, computed_tokens=tokens, prompt_tokens=tokens, output_tokens=2.0
    )
    requests = replace(requests, model=model)
    known = facts(requests, steps=steps)
    seen = {f"step.{name}" for name in steps.numbers} | ({"request.model"} if model is not None else set())
    return replace(known, visible=known.visible | seen)


def compiling() -> Pair:
    """The 30 steps of a shape of their own take 300 ms longer: 150 ms a request, all of the change."""
    return pair(_stepped(0.0), _stepped(np.where(HALF, 0.3, 0.0)))


def compiled() -> Pair:
    """No step is longer than its work."""
    return pair(_stepped(0.0), _stepped(0.0))


def long_steps_of_known_shapes() -> Pair:
    """The same stalls, in steps of the one length that all others have: nothing about them is new."""
    return pair(_stepped(0.0), _stepped(np.where(HALF, 0.0, 0.3)))


def swapping() -> Pair:
    """Each first of two requests for an adapter that had been away takes 300 ms longer: 150 ms a request, all of the change."""
    return pair(_stepped(0.0, TOKENS, PAIRS), _stepped(np.where(HALF, 0.3, 0.0), TOKENS, PAIRS))


def all_resident() -> Pair:
    """Two adapters in turn, and no step is longer for it."""
    return pair(_stepped(0.0, TOKENS, PAIRS), _stepped(0.0, TOKENS, PAIRS))


def long_steps_of_resident_adapters() -> Pair:
    """The second of each two takes longer, whose adapter was there."""
    return pair(_stepped(0.0, TOKENS, PAIRS), _stepped(np.where(HALF, 0.0, 0.3), TOKENS, PAIRS))


# speculation_collapse: 9 tokens after the first; with 6 accepted drafts in 3 steps of 100 ms


def _drafted(accepted: float, step_s: float = 0.1) -> Facts:
    return facts(plain(decode=(9.0 - accepted) * step_s, draft_tokens=12.0, accepted_tokens=accepted))


def refused() -> Pair:
    """No draft is accepted: 9 steps in place of 3, all of the change."""
    return pair(_drafted(6.0), _drafted(0.0), "tpot")


def accepted() -> Pair:
    """3 tokens a step in both windows."""
    return pair(_drafted(6.0), _drafted(6.0), "tpot")


def accepted_in_longer_steps() -> Pair:
    """As many tokens a step, and each step takes three times as long."""
    return pair(_drafted(6.0), _drafted(6.0, step_s=0.3), "tpot")


CACHING: dict[str, Scenarios] = {
    "tier_slower_than_recompute": Scenarios(slow_loads, quick_loads, loads_still_worth_it, bare_pair),
    "tier_saves_nothing": Scenarios(hits_that_the_device_has, a_tier_that_saves, loads_still_worth_it, bare_pair),
    "tier_never_read": Scenarios(never_read, read_as_before, gone_before_it_is_read, blind_to_tiers),
    "cache_lock_contention": Scenarios(waiting_for_the_lock, never_waiting, dear_for_all, bare_pair),
    "fixed_offset": Scenarios(held_back, as_often_held_back, scattered, bare_pair),
    "prompt_uncacheable": Scenarios(no_longer_alike, as_alike, alike_and_not_found, without_chains),
    "recompile": Scenarios(compiling, compiled, long_steps_of_known_shapes, bare_pair),
    "adapter_swap": Scenarios(swapping, all_resident, long_steps_of_resident_adapters, bare_pair),
    "speculation_collapse": Scenarios(refused, accepted, accepted_in_longer_steps, bare_pair),
}
