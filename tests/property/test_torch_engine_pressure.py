"""The whole engine on real tensors, under any pressure: what a request says is what it would say alone.

Tiny pools, blocks of one token, chunks of one token, swap space for hardly anybody, answers that share a prompt and part by
copy on write, aborts and resets in between: whatever is done to the KV, tokens are those of the model alone, greedy or drawn.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.torch_executor.executor import TorchExecutor
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.errors import PromptRefused
from engine_probe.recording.recorder import Recorder
from engine_probe.sending.sink import MemorySink
from tests.torch_models import alone, tiny_executor

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.4, "top_p": 0.8, "seed": 5},
]
MOST_TOKENS = 10


@cache
def executor(block_size: int, num_blocks: int, num_host_blocks: int) -> TorchExecutor:
    """Its blocks keep what earlier examples wrote, as in an engine."""
    return tiny_executor(
        block_size=block_size, num_blocks=num_blocks, num_host_blocks=num_host_blocks, max_context=64, check_every=2
    )


@cache
def answer(prompt: tuple[int, ...], sampling: int) -> list[int]:
    """What the model says to it when nothing else runs."""
    return alone(tiny_executor(num_blocks=64), prompt, MOST_TOKENS, **SAMPLINGS[sampling])


@settings(max_examples=25, deadline=None)
@given(
    block_size=st.sampled_from([1, 2, 4]),
    num_blocks=st.sampled_from([2, 4, 9, 20]),
    swap_blocks=st.sampled_from([0, 1, 5]),
    preemption=st.sampled_from(["recompute", "swap"]),
    caching=st.booleans(),
    chunk=st.sampled_from([None, 1, 3]),
    is_chunked=st.booleans(),
    seats=st.integers(1, 5),
    budget=st.integers(0, 12),
    policy=st.sampled_from(["fcfs", "shortest", "priority"]),
    eviction=st.sampled_from(["lru", "lfu", "fifo", "length"]),
    seed=st.integers(0, 1 << 16),
)
def test_every_answer_is_the_one_it_would_be_alone(
    block_size: int,
    num_blocks: int,
    swap_blocks: int,
    preemption: str,
    caching: bool,
    chunk: int | None,
    is_chunked: bool,
    seats: int,
    budget: int,
    policy: str,
    eviction: str,
    seed: int,
) -> None:
    """Finished answers are whole, those cut off are beginnings; blocks add up after each step; no check of a batch fails."""
    scheduler = SchedulerConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=seats + budget,
        max_chunk_tokens=chunk,
        chunked_prefill=is_chunked,
        policy=policy,
        preemption=preemption,
        watermark_ratio=0.0,
        max_wait_s=0.05,
    )
    config = EngineConfig(
        block_size=block_size,
        prefix_caching=caching,
        eviction=eviction,
        swap_blocks=swap_blocks,
        scheduler=scheduler,
        ttl_s=0.04 if seed % 3 == 0 else None,
    )
    clock, sink, draw = VirtualClock(), MemorySink(), random.Random(seed)
    recorder = Recorder(sink, worker="w0", clock=clock, flush_s=0)
    engine = Engine(config, executor(block_size, num_blocks, swap_blocks), recorder)
    sent: list[tuple[Sequence, int]] = []
    for _ in range(60):
        if draw.random() < 0.3:
            sent += submit(engine, draw, len(sent))
        elif draw.random() < 0.1 and sent:
            engine.abort(draw.choice(sent)[0].request_id)
        elif draw.random() < 0.05:
            engine.reset_prefix_cache()
        step(engine, clock)
    for _ in range(2000):
        if not engine.has_work:
            break
        step(engine, clock)
    assert not engine.has_work, "a request starves"
    assert engine.kv.pool.num_referenced == 0
    assert engine.host.num_free == engine.host.num_blocks
    for sequence, sampling in sent:
        said = sequence.token_ids[sequence.num_prompt :]
        assert said == answer(tuple(sequence.token_ids[: sequence.num_prompt]), sampling)[: len(said)]
        if sequence.finish_reason == "length":
            assert len(said) == min(sequence.params.max_tokens, engine.max_context - sequence.num_prompt)
    recorder.flush()
    assert {row["outcome"] for row in sink.table("check").to_pylist()} <= {"passed"}


def submit(engine: Engine, draw: random.Random, first: int) -> list[tuple[Sequence, int]]:
    """One request, or several answers to one prompt, and how each is sampled; prompts begin alike."""
    length = draw.randint(1, 14)
    shared = draw.randint(0, length)
    prompt = [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4][:shared] + [
        draw.randint(0, 257) for _ in range(length - shared)
    ]
    number, priority = draw.choice([1, 1, 2, 3]), draw.randint(0, 2)
    made = []
    for index in range(first, first + number):
        sampling = draw.randrange(len(SAMPLINGS))
        params = SamplingParams(**{"max_tokens": draw.randint(1, MOST_TOKENS), **SAMPLINGS[sampling]})
        now_ns = engine.clock.monotonic_ns()
        made.append(
            (Sequence(f"r{index}", length, params, now_ns, token_ids=list(prompt), priority=priority), sampling)
        )
    try:
        if number == 1:
            engine.submit(made[0][0])
        else:
            engine.submit_siblings([sequence for sequence, _ in made])
    except PromptRefused:
        return []
    return made


def step(engine: Engine, clock: VirtualClock) -> None:
    """Ten milliseconds, and the books."""
    engine.step()
    clock.advance(0.01)
    engine.check_integrity()
