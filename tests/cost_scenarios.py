"""Hand-made pairs of windows, as in `cause_scenarios.py`, for what is neither room nor load: front end, bookkeeping, settings.

Requests come one each 2 s and do not meet unless told so; 60 a window. The arithmetic stands beside each pair.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from diagnosis.facts import BlockTotals, Facts, LineageFacts, StepFacts
from tests.cause_scenarios import JITTER, N, Pair, Scenarios, bare_pair, pair, plain, without_blocks, worker
from tests.factories import facts

# front_end: 100 ms of prefill behind the front end


def _front(front: float, prefill: float = 0.1) -> Facts:
    requests = plain(prefill, frontend_s=front * JITTER)
    requests.first_token_s[:] += front * JITTER
    return facts(requests)


def before_the_engine() -> Pair:
    """400 ms in place of 10 before the engine: all of the change."""
    return pair(_front(0.01), _front(0.4))


def as_long_before_the_engine() -> Pair:
    """400 ms in both windows."""
    return pair(_front(0.4), _front(0.4))


def a_little_before_the_engine() -> Pair:
    """5 ms more before the engine, 300 ms more of prefill: 2 % of the change."""
    return pair(_front(0.01), _front(0.015, prefill=0.4))


# bookkeeping: a request is prefilled in 100 ms of one step; what the step did beside is in its columns


def _steps(duration: Any, **numbers: Any) -> StepFacts:
    """One step a request, that begins when it arrives."""
    lasted = np.broadcast_to(np.asarray(duration, dtype=float), N)
    columns = {"prefill_tokens": 160.0, "decode_tokens": 1.0, "num_running": 1.0, "blocks_evicted": 0.0} | numbers
    spread = {name: np.broadcast_to(np.asarray(value, dtype=float), N) for name, value in columns.items()}
    return StepFacts(np.zeros(N, dtype=np.int64), ("w0",), np.arange(N) * 2.0 + lasted, lasted, spread)


WORKING = 0.1 * JITTER
TOKENS = 150.0 + np.arange(N) % 5 * 5.0
"""Prompts differ, so that what a token costs can be fitted: 160 of them in the mean."""


def _work(**more: Any) -> Facts:
    """The request's own phases: prefill of `WORKING` s and `beside` s of bookkeeping in the same step."""
    beside = more.pop("beside", 0.0)
    own = more.pop("own", {})
    told = _steps(WORKING + beside, prefill_tokens=TOKENS, **more)
    requests = plain((WORKING + beside) / JITTER, computed_tokens=TOKENS, **own)
    known = facts(requests, steps=told)
    seen = {f"step.{name}" for name, values in told.numbers.items() if np.isfinite(values).any()}
    return replace(known, visible=known.visible | seen)


def looked_up(lookup: float, prefill: float = 0.1) -> Facts:
    """The look-up is a phase of its own before prefill; nobody else is in the step."""
    requests = plain(prefill, cache_lookup_s=lookup)
    requests.first_token_s[:] += lookup
    return facts(requests)


def dear_lookups() -> Pair:
    """Each look-up takes 80 ms in place of 0.1: all of the change."""
    return pair(looked_up(0.0001), looked_up(0.08))


def cheap_lookups() -> Pair:
    """0.1 ms in both windows."""
    return pair(looked_up(0.0001), looked_up(0.0001))


def lookups_a_little_dearer() -> Pair:
    """5 ms a look-up, and prefill takes 300 ms longer."""
    return pair(looked_up(0.0001), looked_up(0.005, prefill=0.4))


def dear_evictions() -> Pair:
    """Each step evicts 10 blocks, which takes 6 ms each: 60 ms, all of the change. Making room is no phase of the request."""
    cheap = _work(blocks_evicted=10.0, alloc_s=0.00001)
    return pair(cheap, _work(beside=0.06, blocks_evicted=10.0, alloc_s=0.06))


def cheap_evictions() -> Pair:
    """10 blocks in 10 us in both windows."""
    return pair(_work(blocks_evicted=10.0, alloc_s=0.00001), _work(blocks_evicted=10.0, alloc_s=0.00001))


def nothing_evicted() -> Pair:
    """Allocating got dearer, but no block was evicted."""
    return pair(_work(alloc_s=0.00001), _work(beside=0.06, alloc_s=0.06))


def recorded_at_length() -> Pair:
    """The recorder takes 60 ms of each step in place of 20 us: all of the change."""
    return pair(_work(probe_s=0.00002), _work(beside=0.06, probe_s=0.06))


def recorded_quickly() -> Pair:
    """20 us a step in both windows."""
    return pair(_work(probe_s=0.00002), _work(probe_s=0.00002))


def recorded_a_little_longer() -> Pair:
    """2 ms of recording, and 58 ms a step that nobody accounts for."""
    return pair(_work(probe_s=0.00002), _work(beside=0.06, probe_s=0.002))


# small settings: every request waits 0.5 s in a step that ends when it is scheduled


def _bound(
    wait: float, what: str, used: Any = 100.0, *, seats: int = 8, chunks: Any = 1.0, tokens: Any = 160.0
) -> Facts:
    requests = plain(0.1, queue=wait, prefill_chunks=chunks, computed_tokens=tokens)
    waiting = {f"waiting_on_{name}": np.full(N, float(name == what and wait > 0)) for name in WAITING_ON}
    told = StepFacts(
        np.zeros(N, dtype=np.int64),
        ("w0",),
        np.arange(N) * 2.0 + wait,
        np.full(N, max(wait, 0.001)),
        {
            "num_running": np.full(N, float(seats)),
            "blocks_used": np.broadcast_to(np.asarray(used, dtype=float), N),
            "blocks_total": np.full(N, 1000.0),
        }
        | waiting,
    )
    known = facts(requests, workers=[worker(1000, seats)], steps=told)
    return replace(known, visible=known.visible | {f"step.{name}" for name in told.numbers})


WAITING_ON = ("blocks", "budget", "seats", "dependency")


def few_seats() -> Pair:
    """8 seats in place of 32, all taken for 0.5 s before each request, with a tenth of the pool in use: all of the change."""
    return pair(_bound(0.0, "seats", seats=32), _bound(0.5, "seats"))


def enough_seats() -> Pair:
    """Nobody waits for a seat."""
    return pair(_bound(0.0, "seats", seats=32), _bound(0.0, "seats"))


def as_many_seats() -> Pair:
    """The same wait behind the same number of seats: what fills them is not for their number to answer."""
    return pair(_bound(0.0, "seats"), _bound(0.5, "seats"))


def few_seats_in_a_full_pool() -> Pair:
    """Fewer seats, but 95 % of the blocks are in use while requests wait."""
    return pair(_bound(0.0, "seats", seats=32), _bound(0.5, "seats", used=950.0))


def small_chunks() -> Pair:
    """160 tokens in 4 steps in place of 1, and 0.5 s of waiting for the budget: all of the change."""
    return pair(_bound(0.0, "budget"), _bound(0.5, "budget", chunks=4.0))


LONG = np.arange(N) % 10 == 0


def small_chunks_of_few() -> Pair:
    """Six of 60 prompts compute 3,200 tokens, in 8 steps in place of 1; the others 160 in one, as before."""
    tokens = np.where(LONG, 3200.0, 160.0)
    cut = _bound(0.5, "budget", tokens=tokens, chunks=np.where(LONG, 8.0, 1.0))
    return pair(_bound(0.0, "budget", tokens=tokens), cut)


def whole_prompts() -> Pair:
    """Nobody waits for the budget."""
    return pair(_bound(0.0, "budget"), _bound(0.0, "budget"))


def as_large_chunks() -> Pair:
    """The same wait for the budget, with prompts computed in one step as before: more work, not smaller steps."""
    return pair(_bound(0.0, "budget"), _bound(0.5, "budget"))


# blocks that were given up by age, or were there and not used: 60 tokens are computed in 60 ms; 100 more take 100 ms


def _missed(expired: float = 0.0, unused: float = 0.0, evicted: float = 0.0, prefill: float = 0.06) -> Facts:
    lost = expired + unused + evicted
    requests = plain(prefill, computed_tokens=60.0 + lost, cached_tokens=100.0 - lost)
    lineage = LineageFacts(
        np.full(N, evicted),
        np.full(N, 60.0),
        np.zeros(N),
        int(evicted * N / 16),
        3.0,
        (),
        expired_tokens=np.full(N, expired),
        unused_tokens=np.full(N, unused),
    )
    known = facts(requests, workers=[worker(500)], lineage=lineage, blocks=BlockTotals(500, 400, 0, 0))
    return replace(known, visible=known.visible | {"request.prompt_blocks"})


def expired() -> Pair:
    """100 of 160 computed tokens had been given up by age: 100 ms at 1 ms a token, all of the change."""
    return pair(_missed(), _missed(expired=100.0, prefill=0.16))


def nothing_lost() -> Pair:
    """400 blocks left the cache, and nobody missed one."""
    return pair(_missed(), _missed())


def evicted_for_room() -> Pair:
    """The same tokens, lost for want of room."""
    return pair(_missed(), _missed(evicted=100.0, prefill=0.16))


def too_short_to_be_used() -> Pair:
    """100 of 160 computed tokens were in the cache: 100 ms, all of the change."""
    return pair(_missed(), _missed(unused=100.0, prefill=0.16))


# block_leak: requests wait 0.5 s for blocks while one runs; the pool has 1,000


def _leaking(wait: float, used: Any, aborted: bool) -> Facts:
    known = _bound(wait, "blocks", used, seats=1)
    finished = np.arange(N) % 3 > 0 if aborted else np.ones(N, dtype=bool)
    return replace(known, requests=replace(known.requests, finished=finished))


FILLING = 20.0 + np.arange(N) * 15.0
"""Blocks in use: 20 at first, 905 in the end."""


def leaking() -> Pair:
    """20 of 60 requests are aborted and the floor rises to nine tenths of the pool; 0.5 s of waiting for blocks, all of the change."""
    return pair(_leaking(0.0, 20.0, aborted=True), _leaking(0.5, FILLING, aborted=True))


def giving_back() -> Pair:
    """As many aborted, and the floor stays where it was."""
    return pair(_leaking(0.0, 20.0, aborted=True), _leaking(0.0, 20.0, aborted=True))


def filling_without_aborts() -> Pair:
    """The same rise, and nobody was aborted."""
    return pair(_leaking(0.0, 20.0, aborted=False), _leaking(0.5, FILLING, aborted=False))


# client_retries: 100 ms of prefill; every third request was asked again after 0.6 s

AGAIN = np.arange(N) % 3 == 0


def _asked_again(lost: float, retries: float, slower: float = 0.0) -> Facts:
    before = np.where(AGAIN, lost, 0.0) + 0.002
    requests = plain(0.1 + slower, network_s=before, retry_count=np.where(AGAIN, retries, 0.0))
    requests.first_token_s[:] += before
    return facts(requests)


def asked_again() -> Pair:
    """A third lost 0.6 s to an attempt before: 0.2 s a request, all of the change."""
    return pair(_asked_again(0.0, 0.0), _asked_again(0.6, 1.0))


def asked_once() -> Pair:
    """Nobody asked again."""
    return pair(_asked_again(0.0, 0.0), _asked_again(0.0, 0.0))


def asked_again_at_once() -> Pair:
    """A third asked again after 15 ms (5 ms a request), and prefill takes 300 ms longer: 2 % of the change."""
    return pair(_asked_again(0.0, 0.0), _asked_again(0.015, 1.0, slower=0.3))


COSTS: dict[str, Scenarios] = {
    "front_end": Scenarios(before_the_engine, as_long_before_the_engine, a_little_before_the_engine, bare_pair),
    "lookup_overhead": Scenarios(dear_lookups, cheap_lookups, lookups_a_little_dearer, bare_pair),
    "eviction_overhead": Scenarios(dear_evictions, cheap_evictions, nothing_evicted, bare_pair),
    "small_batch": Scenarios(few_seats, enough_seats, as_many_seats, bare_pair),
    "chunk_budget": Scenarios(small_chunks, whole_prompts, as_large_chunks, bare_pair),
    "ttl_expiry": Scenarios(expired, nothing_lost, evicted_for_room, without_blocks(expired)),
    "reuse_below_unit": Scenarios(
        too_short_to_be_used, nothing_lost, evicted_for_room, without_blocks(too_short_to_be_used)
    ),
    "block_leak": Scenarios(leaking, giving_back, filling_without_aborts, bare_pair),
    "client_retries": Scenarios(asked_again, asked_once, asked_again_at_once, bare_pair),
    "probe_overhead": Scenarios(recorded_at_length, recorded_quickly, recorded_a_little_longer, bare_pair),
}
