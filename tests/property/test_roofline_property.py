"""The clock of virtual time against plain sums, over any steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_probe.engine.executor import StepPlan
from engine_probe.engine.roofline.executor import RooflineExecutor
from engine_probe.engine.roofline.hardware import HARDWARE
from engine_probe.engine.roofline.model_shape import find_shape
from engine_probe.engine.roofline.step_time import StepTime, causal_pairs
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.virtual_clock import VirtualClock

whole = st.integers(0, 10_000)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 200) | st.none())
def test_pairs_are_what_counting_gives(start: int, number: int, window: int | None) -> None:
    """Query p sees p + 1 keys, or its window."""
    seen = (query + 1 if window is None else min(query + 1, window) for query in range(start, start + number))
    assert causal_pairs(start, number, window) == sum(seen)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_chunks_sum_to_the_whole(chunks: list[int]) -> None:
    """However a prompt is cut, its pairs stay."""
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    assert sum(map(causal_pairs, starts, chunks)) == causal_pairs(0, sum(chunks))


@given(whole, whole, whole, whole, st.sampled_from(["llama-3-8b", "mixtral-8x7b"]))
def test_more_work_never_takes_less_time(tokens: int, more: int, keys: int, pairs: int, model: str) -> None:
    """Tokens, keys and pairs each only add."""
    times = StepTime(find_shape(model), HARDWARE["h100"])
    less = times.parts(tokens, tokens, decode_keys=keys, prefill_pairs=pairs, prefill_keys=keys).total_s
    for grown in (
        times.parts(tokens + more, tokens, decode_keys=keys, prefill_pairs=pairs, prefill_keys=keys),
        times.parts(tokens, tokens, decode_keys=keys + more, prefill_pairs=pairs, prefill_keys=keys),
        times.parts(tokens, tokens, decode_keys=keys, prefill_pairs=pairs + more, prefill_keys=keys + more),
    ):
        assert grown.total_s >= less


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from(["llama-3-8b", "mistral-7b-v0.1"]),
    st.sampled_from([1.0, 3.0, 1 / 3]),
)
def test_steps_take_what_was_foreseen_of_them(contexts: list[int], most: int, model: str, slow: float) -> None:
    """To the nanosecond, and each one's forward pass to the last bit."""
    running = RooflineExecutor(find_shape(model), HARDWARE["h100"], VirtualClock(), slow_factor=slow)
    sequences = [
        Sequence(f"r{i}", context, SamplingParams(), 0, num_computed=context, num_output=1)
        for i, context in enumerate(contexts)
    ]
    foreseen = running.foresee(sequences, most)
    assert foreseen is not None
    for taken_ns, forward_s in zip(*foreseen, strict=True):
        before_ns = running.clock.monotonic_ns()
        assert running.execute(StepPlan(decodes=sequences)).forward_s == forward_s
        assert running.clock.monotonic_ns() - before_ns == taken_ns
        for sequence in sequences:
            sequence.num_computed += 1
