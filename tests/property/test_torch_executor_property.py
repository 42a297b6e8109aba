"""However the work of a sequence is cut, packed, moved or thrown away: the same tokens come out, one for one.

float32 and greedy, on tiny seeded models of several head layouts; draws by chance are held to the same promise.
"""

from __future__ import annotations

import random
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_probe.engine.sequence import Sequence
from engine_probe.engine.torch_executor.executor import TorchExecutor
from tests.torch_models import Tables, alone, tiny_executor, with_heads

LAYOUTS = [(4, 2), (4, 4), (4, 1)]
BLOCK_SIZES = [1, 4, 5]
NUM_OUTPUT = 6

prompts = st.lists(st.integers(0, 257), min_size=1, max_size=40)
samplings = st.sampled_from([{}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.5, "top_p": 0.9, "seed": 8}])
executors = st.builds(
    lambda layout, size: executor(layout, size), st.sampled_from(LAYOUTS), st.sampled_from(BLOCK_SIZES)
)


@cache
def executor(layout: tuple[int, int], block_size: int) -> TorchExecutor:
    """One model a layout; its blocks keep what earlier examples wrote, as in an engine."""
    return tiny_executor(with_heads(*layout), block_size=block_size, num_blocks=400, num_host_blocks=400)


def in_chunks(tables: Tables, sequence: Sequence, draw: random.Random, *, leave: int = 0) -> None:
    """Compute its pending tokens in chunks of any size, all but `leave` of them."""
    while sequence.num_pending > max(leave, 0):
        count = draw.randint(1, sequence.num_pending - leave)
        is_last = count == sequence.num_pending
        tables.step(chunks=[(sequence, count)])
        if is_last:
            return


@settings(max_examples=25)
@given(executors, prompts, samplings, st.randoms(use_true_random=False))
def test_chunked_equals_whole_prefill(
    made: TorchExecutor, prompt: list[int], params: dict, draw: random.Random
) -> None:
    """Wherever a prompt is cut, its answer is that of the whole."""
    tables = Tables(made)
    sequence = tables.sequence(prompt, **params)
    in_chunks(tables, sequence, draw)
    assert tables.finish(sequence, NUM_OUTPUT) == alone(made, prompt, NUM_OUTPUT, **params)


@settings(max_examples=25)
@given(executors, prompts, prompts, samplings)
def test_cached_equals_uncached(made: TorchExecutor, shared: list[int], own: list[int], params: dict) -> None:
    """Full blocks that another request computed serve as well as one's own."""
    tables = Tables(made)
    first = tables.sequence([*shared, 9, 9], "first")
    tables.finish(first, 2)
    prompt = [*shared, *own]
    second = tables.sequence(prompt, "second", **params)
    num_cached = len(shared) // made.block_size
    second.blocks = first.blocks[:num_cached]
    second.num_computed = num_cached * made.block_size
    assert tables.finish(second, NUM_OUTPUT) == alone(made, prompt, NUM_OUTPUT, **params)


@settings(max_examples=25)
@given(executors, st.lists(st.tuples(prompts, samplings), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_batched_equals_alone(made: TorchExecutor, asked: list[tuple[list[int], dict]], draw: random.Random) -> None:
    """Prefill chunks and decodes of several requests in one packed batch do not touch each other."""
    tables = Tables(made)
    running = [tables.sequence(prompt, f"r{at}", **params) for at, (prompt, params) in enumerate(asked)]
    while pending := [sequence for sequence in running if sequence.num_output < NUM_OUTPUT]:
        step = draw.sample(pending, draw.randint(1, len(pending)))
        decodes = [sequence for sequence in step if sequence.num_output]
        chunks = [(one, draw.randint(1, one.num_pending)) for one in step if not one.num_output]
        tables.step(decodes, chunks)
    for sequence, (prompt, params) in zip(running, asked, strict=True):
        assert sequence.token_ids[len(prompt) :] == alone(made, prompt, NUM_OUTPUT, **params)


@settings(max_examples=25)
@given(executors, prompts, samplings, st.integers(0, NUM_OUTPUT - 1), st.randoms(use_true_random=False))
def test_preempted_and_resumed_equals_undisturbed(
    made: TorchExecutor, prompt: list[int], params: dict, at: int, draw: random.Random
) -> None:
    """Its blocks go to others, its KV is computed again from the tokens that it has, in any chunks."""
    tables = Tables(made)
    sequence = tables.sequence(prompt, **params)
    tables.finish(sequence, at)
    tables.drop(sequence)
    tables.free.reverse()
    tables.finish(tables.sequence([1, 2, 3, 4, 5], "other"), 3)  # takes the blocks that it had
    in_chunks(tables, sequence, draw)
    assert tables.finish(sequence, NUM_OUTPUT) == alone(made, prompt, NUM_OUTPUT, **params)


@settings(max_examples=25)
@given(executors, prompts, samplings, st.integers(1, NUM_OUTPUT - 1))
def test_swapped_equals_undisturbed(made: TorchExecutor, prompt: list[int], params: dict, at: int) -> None:
    """Its KV waits on the host while others use its blocks, and comes back into other blocks."""
    tables = Tables(made)
    sequence = tables.sequence(prompt, **params)
    tables.finish(sequence, at)
    host = [tables.free_host.pop() for _ in sequence.blocks]
    other = tables.sequence([1, 2, 3, 4, 5], "other")
    left, sequence.blocks = sequence.blocks, []
    tables.free = [*tables.free, *left]  # the other takes them in the very step in which they are moved out
    tables.step(chunks=[(other, 5)], swap_out=list(zip(left, host, strict=True)))
    back = [tables.free.pop(0) for _ in left]
    sequence.blocks = back
    tables.step([other, sequence], swap_in=list(zip(back, host, strict=True)))
    assert tables.finish(sequence, NUM_OUTPUT) == alone(made, prompt, NUM_OUTPUT, **params)


@settings(max_examples=15)
@given(executors, prompts, st.integers(0, 257))
def test_fork_copies_what_it_writes(made: TorchExecutor, prompt: list[int], other_token: int) -> None:
    """Two sequences share a last block that is not full; the one that writes gets its own copy first."""
    tables = Tables(made)
    first = tables.sequence(prompt, "first")
    tables.finish(first, 2)
    fork = tables.sequence([*prompt, other_token], "fork")
    fork.num_computed = len(prompt)
    kept = len(prompt) // made.block_size
    copies = []
    fork.blocks = first.blocks[:kept]
    if len(prompt) % made.block_size:
        copy = tables.free.pop()
        copies.append((first.blocks[kept], copy))
        fork.blocks.append(copy)
    tables.step([first], chunks=[(fork, 1)], copies=copies)
    answers = tables.finish(fork, NUM_OUTPUT), tables.finish(first, NUM_OUTPUT)
    assert answers[0] == alone(made, [*prompt, other_token], NUM_OUTPUT)
    assert answers[1] == alone(made, prompt, NUM_OUTPUT)
