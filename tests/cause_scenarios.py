"""Hand-made pairs of windows for every cause: it fires, it is quiet, it is close to firing, it cannot be seen.

Each function gives (baseline, suspect, metric). 60 requests a window, so the mean carries the verdict; latencies have a
small fixed jitter, since equal ones would have no spread to judge by. The arithmetic stands beside each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diagnosis.facts import BlockTotals, Facts, Gaps, LineageFacts, MarkFact, RequestFacts, StepFacts, WorkerFacts
from tests.factories import facts, request_facts

N = 60
Pair = tuple[Facts, Facts, str]
JITTER = 1.0 + 0.02 * np.sin(np.arange(N) * 2.3)
"""Within 2 % of 1."""


@dataclass(frozen=True)
class Scenarios:
    """The four pairs of a cause; `blind` None where the cause needs nothing but arrivals.

    share   of the change of the mean that the cause owns where it fires, worked by hand
    """

    fires: Callable[[], Pair]
    quiet: Callable[[], Pair]
    edge: Callable[[], Pair]
    blind: Callable[[], Pair] | None
    share: float = 1.0


def plain(
    prefill: Any = 0.1, queue: Any = 0.0, decode: Any = 0.9, every: float = 2.0, start: float = 0.0, **numbers: Any
) -> RequestFacts:
    """One request each `every` seconds: they do not meet unless told so. Scalars are spread over all."""

    def spread(value: Any) -> list[float]:
        return list(np.broadcast_to(np.asarray(value, dtype=float), N))

    columns = {"prompt_tokens": 160.0, "output_tokens": 10.0, "computed_tokens": 160.0} | numbers
    return request_facts(
        start + np.arange(N) * every,
        queue=spread(queue),
        prefill=list(np.asarray(spread(prefill)) * JITTER),
        decode=list(np.asarray(spread(decode)) * JITTER),
        **{name: spread(value) for name, value in columns.items() if value is not None},
    )


def bare(ttft: float) -> RequestFacts:
    """Only arrivals and first tokens are known."""
    requests = request_facts(np.arange(N) * 2.0, prefill=list(ttft * JITTER))
    return replace(requests, last_token_s=np.full(N, np.nan))


def bare_pair(metric: str = "ttft") -> Pair:
    """TTFT rose from 0.1 to 0.3 s, and nothing else was seen."""
    return facts(bare(0.1), name="baseline"), facts(bare(0.3), name="suspect"), metric


def pair(base: Facts, suspect: Facts, metric: str = "ttft") -> Pair:
    return replace(base, name="baseline"), replace(suspect, name="suspect"), metric


def worker(num_blocks: int | None = None, seats: int = 8, caching: bool | None = None) -> WorkerFacts:
    return WorkerFacts(
        "w0", block_size=16, num_blocks=num_blocks, prefix_caching=caching, flags={"max_num_seqs": str(seats)}
    )


# admission_blocked_on_blocks: every other request comes 0.2 s after its neighbour, which holds 20 blocks for 1.2 s


def _twos(wait: float, num_blocks: int, seats: int = 8) -> Facts:
    at = np.repeat(np.arange(N / 2) * 5.0, 2) + np.tile([0.0, 0.2], N // 2)
    requests = request_facts(
        at,
        queue=np.tile([0.0, wait], N // 2),
        prefill=0.1 * JITTER,
        decode=np.tile([1.1, 0.5], N // 2),
        prompt_tokens=[320.0] * N,
        output_tokens=[8.0] * N,
        computed_tokens=[320.0] * N,
    )
    return facts(requests, workers=[worker(num_blocks, seats)], samples={"preemptions_total": 2.0})


def blocked() -> Pair:
    """A pool of 20 blocks: the second of each two waits 1 s with 7 of 8 seats free; 0.5 s a request, all of the change."""
    return pair(_twos(0.0, 80), _twos(1.0, 20))


def enough_blocks() -> Pair:
    """A pool of 80: nobody waits, although preemptions were counted."""
    return pair(_twos(0.0, 80), _twos(0.0, 80))


def seats_bind() -> Pair:
    """The same wait with one seat, which is taken: seats bind, not blocks."""
    return pair(_twos(0.0, 80, seats=1), _twos(1.0, 20, seats=1))


# premature_eviction: 60 tokens are computed in 60 ms; 100 evicted ones more take 100 ms


def _lost(evicted: float, prefill: float, front: float = 0.0) -> Facts:
    requests = plain(prefill, computed_tokens=60.0 + evicted, cached_tokens=100.0 - evicted)
    if front:
        requests = replace(requests, numbers={**requests.numbers, "frontend_s": np.full(N, front)})
        requests.first_token_s[:] += front
    blocks = int(evicted * N / 16)
    lineage = LineageFacts(np.full(N, evicted), np.full(N, 60.0), np.zeros(N), blocks, 3.0, ())
    return facts(requests, workers=[worker(500)], lineage=lineage, blocks=BlockTotals(500, 400, 0, 0))


def evicted() -> Pair:
    """Of 160 computed tokens 100 had been cached and evicted: 100 ms at 1 ms a token, all of the change."""
    return pair(_lost(0.0, 0.06), _lost(100.0, 0.16))


def evicted_unwanted() -> Pair:
    """400 blocks were evicted, but nobody asked for them again."""
    return pair(_lost(0.0, 0.06), _lost(0.0, 0.06))


def evicted_little() -> Pair:
    """5 evicted tokens (5 ms) beside 300 ms before the engine: 2 % of the change."""
    return pair(_lost(0.0, 0.06), _lost(5.0, 0.065, front=0.3))


# preemption_recompute: ten tokens 100 ms apart; a preempted request stalls 2 s after its fifth


def _stalls(stall: float, preemptions: float, longer: float = 0.0) -> Facts:
    gap = np.full((N, 9), 0.1 + longer) * JITTER[:, None]
    gap[:, 4] += stall
    at = 0.1 * JITTER[:, None] + np.cumsum(gap, axis=1) + (np.arange(N) * 5.0)[:, None]
    gaps = Gaps(np.repeat(np.arange(N), 9), at.ravel(), gap.ravel(), np.ones(9 * N))
    requests = plain(decode=gap.sum(axis=1) / JITTER, every=5.0)
    return facts(replace(requests, gaps=gaps), samples={"preemptions_total": preemptions})


def preempted() -> Pair:
    """Every request stalls 2 s after a preemption: 2 s of E2E, all of the change."""
    return pair(_stalls(0.0, 0.0), _stalls(2.0, 60.0), "e2e")


def not_preempted() -> Pair:
    """The same stalls, but the preemption counter stands still."""
    return pair(_stalls(0.0, 0.0), _stalls(2.0, 0.0), "e2e")


def preempted_without_stall() -> Pair:
    """60 preemptions were counted, but no request stalled: every gap is 50 ms longer."""
    return pair(_stalls(0.0, 0.0), _stalls(0.0, 60.0, longer=0.05), "e2e")


# prefix_caching_off: 100 of 160 prompt tokens came from the cache


def _cache(cached: float, caching: bool | None, prefill: float) -> Facts:
    requests = plain(prefill, cached_tokens=cached, computed_tokens=160.0 - cached)
    return facts(requests, workers=[worker(500, caching=caching)], samples={"prefix_queries_tokens_total": 9600.0})


def caching_off() -> Pair:
    """The worker says that caching is off; 100 tokens more are computed: 100 ms at 1 ms a token."""
    return pair(_cache(100.0, True, 0.06), _cache(0.0, False, 0.16))


def caching_on() -> Pair:
    """Caching is on in both windows."""
    return pair(_cache(100.0, True, 0.06), _cache(100.0, True, 0.06))


def caching_off_before() -> Pair:
    """Off in both windows: it is no change, although prefill got longer."""
    return pair(_cache(0.0, False, 0.16), _cache(0.0, False, 0.26))


# cold_start: four starts, 150 s apart; the 7 requests in the minute after each miss everything, others find 100 of 160

COLD = np.arange(N) % 15 < 7


def _start(is_cold: bool, marked: bool, prefill: Any) -> Facts:
    cached = np.where(COLD & is_cold, 0.0, 100.0)
    requests = plain(prefill, cached_tokens=cached, computed_tokens=160.0 - cached, every=10.0)
    marks = [MarkFact("worker_up", at, "w0", "started", {}) for at in (0.0, 150.0, 300.0, 450.0)] if marked else []
    return facts(requests, workers=[worker(500)], marks=marks, blocks=BlockTotals(500, 0, 0, 0))


def cold() -> Pair:
    """28 of 60 requests compute 100 tokens (100 ms) more after a start: 47 ms a request, all of the change."""
    return pair(_start(False, False, 0.06), _start(True, True, np.where(COLD, 0.16, 0.06)))


def cold_without_start() -> Pair:
    """The same misses, but nothing started and nothing was reset."""
    return pair(_start(False, False, 0.06), _start(True, False, np.where(COLD, 0.16, 0.06)))


def warm_start() -> Pair:
    """Starts, after which requests missed no more than later ones; prefill got longer for all."""
    return pair(_start(False, False, 0.06), _start(False, True, 0.12))


# slow_steps: ten steps, one sequence at a time


def _pace(gap_s: float) -> Facts:
    gap = np.full((N, 9), gap_s) * JITTER[:, None]
    at = gap_s * JITTER[:, None] + np.cumsum(gap, axis=1) + (np.arange(N) * 2.0)[:, None]
    gaps = Gaps(np.repeat(np.arange(N), 9), at.ravel(), gap.ravel(), np.ones(9 * N))
    return facts(replace(plain(gap_s, decode=gap.sum(axis=1) / JITTER), gaps=gaps))


def slower() -> Pair:
    """A step took 160 ms in place of 100 at the same batch of one: 600 ms of E2E, all of the change."""
    return pair(_pace(0.1), _pace(0.16), "e2e")


def as_fast() -> Pair:
    """Steps took as long as before."""
    return pair(_pace(0.1), _pace(0.1), "e2e")


def a_little_slower() -> Pair:
    """6 % is below the 10 % from which on we speak of slower steps."""
    return pair(_pace(0.1), _pace(0.106), "e2e")


# decode_bandwidth: 100 steps of 10 ms + 1 ms a sequence; a request each 0.3 s, in turns to two workers and then all but one
# to the first. In turns: 2 at once, 1.2 s = 2 * 0.6 s. On one: 5 at once, 1.5 s = 5 * 0.3 s. The load is that of two workers in both.


def _batch(used: int, per_seq: float = 0.001) -> Facts:
    running = {1: 5, 2: 2}[used]
    worker = np.arange(N) % used
    worker[-1] = 1
    requests = request_facts(
        np.arange(N) * 0.3,
        queue=[0.0] * N,
        prefill=[0.01] * N,
        decode=100 * (0.01 + 0.001 * running) * JITTER,
        worker=worker,
        worker_names=("w0", "w1"),
        prompt_tokens=[160.0] * N,
        output_tokens=[101.0] * N,
    )
    level = 1.0 + np.arange(400) % (2 * running - 1)
    steps = StepFacts(
        worker=np.zeros(400, dtype=np.int64),
        worker_names=("w0",),
        at_s=np.arange(400) * 0.03,
        duration_s=(0.01 + per_seq * level) * (1 + 0.001 * np.sin(np.arange(400))),
        numbers={"num_running": level, "decode_tokens": level, "prefill_tokens": np.arange(400) % 2 * 10.0},
    )
    return facts(requests, steps=steps)


def fuller() -> Pair:
    """One worker serves nearly all that two did: 5 at once in place of 2, each 1 ms a step: 12 -> 15 ms a token."""
    return pair(_batch(2), _batch(1), "tpot")


def as_full() -> Pair:
    """The same batches."""
    return pair(_batch(2), _batch(2), "tpot")


def free_seats() -> Pair:
    """Batches got fuller and tokens slower, but a step takes 10 ms whatever it serves."""
    return pair(_batch(2, per_seq=0.0), _batch(1, per_seq=0.0), "tpot")


# load_step: the queue grows with the arrivals


def _load(every: float, queue: float) -> Facts:
    return facts(plain(queue=queue, every=every, decode=0.1), samples={"preemptions_total": 0.0})


def more_load() -> Pair:
    """Twice the arrivals, and 0.4 s of queue behind ordinary work."""
    return pair(_load(2.0, 0.0), _load(1.0, 0.4))


def as_much_load() -> Pair:
    """The same arrivals."""
    return pair(_load(2.0, 0.0), _load(2.0, 0.0))


def a_little_more_load() -> Pair:
    """5 % more arrivals are below the 10 % from which on load can be a cause, whatever the queue does."""
    return pair(_load(2.0, 0.0), _load(1.9, 0.4))


def more_load_on_more_workers() -> Pair:
    """Twice the arrivals on twice the workers: each has as much to do as before, whatever the queue does."""
    base, suspect, metric = more_load()
    requests = replace(suspect.requests, worker=np.arange(N) % 2, worker_names=("w0", "w1"))
    return base, replace(suspect, requests=requests), metric


# long_prefill_interference: 160 tokens in 160 ms; every other request computes 2,000 in 2 s, and its neighbour waits 1 s


def _long(tokens: float, wait: float) -> Facts:
    computed = np.tile([tokens, 160.0], N // 2)
    requests = request_facts(
        np.repeat(np.arange(N / 2) * 10.0, 2) + np.tile([0.0, 1.0], N // 2),
        queue=np.tile([0.0, wait], N // 2),
        prefill=computed * 0.001 * JITTER,
        decode=[0.1] * N,
        prompt_tokens=computed,
        computed_tokens=computed,
        output_tokens=[10.0] * N,
    )
    return facts(requests)


def _among(base: Facts, suspect: Facts) -> Pair:
    """Prompt lengths hidden, so that the shift of the mix is not what is judged here."""
    return pair(
        *(replace(f, requests=replace(f.requests, numbers=_without_prompt(f.requests))) for f in (base, suspect))
    )


def _without_prompt(requests: RequestFacts) -> dict[str, Any]:
    return {name: values for name, values in requests.numbers.items() if name not in ("prompt_tokens", "output_tokens")}


def long_prompts() -> Pair:
    """The neighbours of 2,000-token prompts wait 0.99 s (0.495 a request); 1.84 s more of prefill (0.92) is the long ones' own."""
    return _among(_long(160.0, 0.0), _long(2000.0, 0.99))


def short_prompts() -> Pair:
    """No prompt is longer than before."""
    return _among(_long(160.0, 0.0), _long(160.0, 0.0))


def long_prompts_alone() -> Pair:
    """2,000-token prompts that nobody meets: 100 s lie between any two requests."""
    requests = plain(np.tile([2.0, 0.16], N // 2), every=100.0, computed_tokens=np.tile([2000.0, 160.0], N // 2))
    return _among(facts(plain(0.16, every=100.0)), facts(requests))


# length_shift and mix_shift


def _lengths(share: float, long: float = 400.0) -> Facts:
    """`share` of the prompts are long; prefill takes 1 ms a token."""
    prompt = np.where(np.arange(N) % 10 < round(share * 10), long, 100.0)
    requests = plain(prompt * 0.001, prompt_tokens=prompt, computed_tokens=prompt)
    return facts(requests)


def longer_prompts() -> Pair:
    """20 % long prompts, then 80 %: at equal length nothing changed."""
    return pair(_lengths(0.2), _lengths(0.8))


def as_long_prompts() -> Pair:
    return pair(_lengths(0.5), _lengths(0.5))


def a_few_longer_prompts() -> Pair:
    """50 % long prompts, then 60 %: six of 60 requests are within what chance gives."""
    return pair(_lengths(0.5), _lengths(0.6))


def _tenants(share: float, *, named: bool = True) -> Facts:
    """`share` of the requests are of tenant slow, whose front end takes 0.4 s."""
    slow = np.arange(N) % 10 < round(share * 10)
    requests = plain(prompt_tokens=None, output_tokens=None, computed_tokens=None, frontend_s=np.where(slow, 0.4, 0.0))
    requests.first_token_s[:] += np.where(slow, 0.4, 0.0)
    tenant = np.where(slow, "slow", "fast").astype(object) if named else requests.tenant
    return facts(replace(requests, tenant=tenant))


def more_of_a_slow_tenant() -> Pair:
    """20 % of the traffic is the slow tenant's, then 80 %: within each tenant nothing changed."""
    return pair(_tenants(0.2), _tenants(0.8))


def as_much_of_a_slow_tenant() -> Pair:
    return pair(_tenants(0.5), _tenants(0.5))


def tenants_known_in_one_window() -> Pair:
    """The baseline does not name tenants: they cannot be compared."""
    return pair(_tenants(0.2, named=False), _tenants(0.8))


def without_blocks(made: Callable[[], Pair]) -> Callable[[], Pair]:
    """The same pair, where nobody saw block events."""

    def blinded() -> Pair:
        base, suspect, metric = made()
        hidden = [replace(f, blocks=None, lineage=None, visible=f.visible - {"block.evicted"}) for f in (base, suspect)]
        return hidden[0], hidden[1], metric

    return blinded


SCENARIOS: dict[str, Scenarios] = {
    "admission_blocked_on_blocks": Scenarios(blocked, enough_blocks, seats_bind, bare_pair),
    "premature_eviction": Scenarios(evicted, evicted_unwanted, evicted_little, without_blocks(evicted)),
    "preemption_recompute": Scenarios(preempted, not_preempted, preempted_without_stall, bare_pair),
    "prefix_caching_off": Scenarios(caching_off, caching_on, caching_off_before, bare_pair),
    "cold_start": Scenarios(cold, cold_without_start, warm_start, bare_pair),
    "slow_steps": Scenarios(slower, as_fast, a_little_slower, bare_pair),
    "decode_bandwidth": Scenarios(fuller, as_full, free_seats, bare_pair),
    "load_step": Scenarios(more_load, as_much_load, a_little_more_load, None),
    "long_prefill_interference": Scenarios(long_prompts, short_prompts, long_prompts_alone, bare_pair, 0.35),
    "length_shift": Scenarios(longer_prompts, as_long_prompts, a_few_longer_prompts, bare_pair),
    "mix_shift": Scenarios(more_of_a_slow_tenant, as_much_of_a_slow_tenant, tenants_known_in_one_window, bare_pair),
}


def names(found: Sequence[Any]) -> list[str]:
    """Names of causes in a list of rows."""
    return [row["cause"] if isinstance(row, dict) else row.cause for row in found]
