"""The executor: what it measures and says, what it refuses, and how it moves blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_probe.engine.executor import Chunk, StepPlan
from engine_probe.engine.torch_executor import device as devices
from engine_probe.engine.torch_executor.activation import StepShape
from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions, choose_attention
from engine_probe.engine.torch_executor.kv_cache import KvCache
from engine_probe.engine.torch_executor.weights import SeededTensors
from engine_probe.errors import DeviceMissing, UsageError
from tests.torch_models import TINY, Tables, alone, tiny_executor, with_heads

CPU = torch.device("cpu")


def test_greedy_answer_is_the_likeliest_token_each_time() -> None:
    """Temperature 0 asks nothing of chance: twice the same, and every token is in the vocabulary."""
    found = alone(tiny_executor(), [1, 2, 3], 12)
    assert found == alone(tiny_executor(), [1, 2, 3], 12)
    assert all(0 <= token < TINY.vocab_size for token in found)
    assert len(set(found)) > 3


def test_worker_facts_are_measured_or_exact() -> None:
    """Bytes by hand: 2 x 2 layers x 2 heads x 8 wide x 4 tokens x 4 bytes a block; 4 bytes a parameter."""
    executor = tiny_executor()
    facts = executor.worker_facts
    assert facts["kv_bytes_per_block"] == 2 * 2 * 2 * 8 * 4 * 4
    assert facts["weights_bytes"] == 4 * TINY.num_parameters
    assert (facts["model"], facts["dtype"], facts["gpu_id"]) == ("seeded-llama-0", "float32", None)
    assert facts["activation_peak_bytes"] is None  # nothing ran: unknown, not zero
    alone(executor, [1, 2, 3], 2)
    assert isinstance(executor.worker_facts["activation_peak_bytes"], int)


def test_times_are_measured_apart() -> None:
    """Forward and sampling are what the clock says between their ends; moving blocks is a third time."""
    ticks = iter(range(100))
    options = TorchOptions(device="cpu", num_blocks=8, block_size=4, num_host_blocks=8)
    executor = TorchExecutor("m", TINY, SeededTensors(0), options, clock=lambda: float(next(ticks)))
    tables = Tables(executor)
    sequence = tables.sequence([1, 2, 3])
    tables.grow(sequence, 3)
    result = executor.execute(StepPlan(prefills=[Chunk(sequence, 0, 3, emits=True)], swap_out=[(7, 0)]))
    assert (result.forward_s, result.sample_s, result.load_s) == (1.0, 1.0, 1.0)
    moved = executor.execute(StepPlan(swap_in=[(6, 0)]))
    assert (list(moved.tokens or ()), moved.forward_s, moved.load_s) == ([], 0.0, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [
        TINY,
        with_heads(8, 1, intermediate_size=512),
        with_heads(8, 8, head_dim=16, qk_norm=True, vocab_size=5000),
        replace(TINY, vocab_size=20_000, hidden_size=256),
    ],
    ids=["grouped", "one KV head", "normed heads", "large vocabulary"],
)
@pytest.mark.parametrize("work", ["prompt", "chunk", "decodes", "draws"])
def test_measured_memory_stays_below_the_prediction(config: object, dtype: str, work: str) -> None:
    """Of what torch held at once, the prediction is an upper bound, and at most four times too high."""
    executor = tiny_executor(replace(config, max_context=1024), dtype=dtype, num_blocks=256)  # type: ignore[type-var]
    tables = Tables(executor)
    if work == "prompt":
        executor.execute(plan_of(tables, 300, 300))
        shape = StepShape(300, 300)
    elif work == "chunk":
        executor.execute(plan_of(tables, 700, 20))
        shape = StepShape(20, 700)
    else:
        temperature = 0.7 if work == "draws" else 0.0
        plan = StepPlan()
        for _ in range(5):
            sequence = tables.sequence([0] * 180, temperature=temperature)
            tables.grow(sequence, 180)
            sequence.num_computed = 179
            plan.decodes.append(sequence)
        executor.execute(plan)
        shape = StepShape(5, 0, 5 * 180, 5, 5 if work == "draws" else 0)
    predicted = executor.predict_activation_bytes(shape)
    measured = executor.activation_peak_bytes
    assert measured is not None
    assert predicted / 4 <= measured <= predicted


def plan_of(tables: Tables, context: int, num_tokens: int) -> StepPlan:
    """The last `num_tokens` of a prompt of `context`."""
    sequence = tables.sequence([0] * context)
    tables.grow(sequence, context)
    return StepPlan(prefills=[Chunk(sequence, context - num_tokens, num_tokens, emits=True)])


def test_prompt_that_would_not_fit_is_refused_with_the_number() -> None:
    """Before anything is computed, and naming what it needs and what is there; a smaller chunk of it passes."""
    executor = tiny_executor(activation_limit_bytes=300_000)
    needed = executor.predict_activation_bytes(StepShape(250, 250, num_drawing=1))
    assert needed > 300_000
    refusal = executor.refusal(250, 250)
    assert refusal is not None
    assert f"250 tokens of a prompt in one step needs {needed} bytes of activations, 300000 are there" in refusal
    assert executor.refusal(32, 250) is None
    # A machine that cannot say what is free refuses nothing.
    executor.activation_limit_bytes = None
    assert executor.refusal(250, 250) is None


def test_warm_up_measures_a_step_of_that_size() -> None:
    """The worker's row has the peak of the largest step from the start, and no request is touched by it."""
    executor = tiny_executor(warm_up_tokens=500)  # more than a context: several made-up sequences
    assert executor.activation_peak_bytes is not None
    assert executor.activation_peak_bytes > 100_000
    assert alone(executor, [1, 2, 3], 5) == alone(tiny_executor(), [1, 2, 3], 5)


def test_blocks_move_in_order() -> None:
    """Out first, then in, then copies one after the other: a chain of copies carries a block all the way."""
    cache = KvCache(TINY, 6, 4, torch.float32, CPU, num_host_blocks=2)
    keys, values = cache.layer(1)
    for block in range(6):
        keys[block], values[block] = float(block), float(-block)
    cache.swap_out([(5, 1), (4, 0)])
    cache.swap_in([(0, 1)])
    cache.copy([(0, 4), (4, 5), (2, 0)])
    assert keys[:, 0, 0, 0].tolist() == [2, 1, 2, 3, 5, 5]
    assert values[:, 3, 1, 7].tolist() == [-2, -1, -2, -3, -5, -5]


def test_missing_cuda_is_said() -> None:
    """A GPU that is asked for and not there is DeviceMissing with the way out; auto takes what there is."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceMissing, match="use --device cpu"):
        tiny_executor(device="cuda")
    assert devices.choose_device("auto") == CPU


def test_type_is_the_published_one_or_one_that_the_device_multiplies() -> None:
    """float16 on a CPU becomes float32, unless it is asked for by name."""
    assert tiny_executor(replace(TINY, dtype="bfloat16")).dtype == torch.bfloat16
    assert tiny_executor(replace(TINY, dtype="float16")).dtype == torch.float32
    assert tiny_executor(replace(TINY, dtype="float16"), dtype="float16").dtype == torch.float16
    assert len(alone(tiny_executor(dtype="float16"), [1, 2], 3)) == 3


def test_absent_gpu_number_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several that is not among them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceMissing, match="no cuda:2: 2 CUDA devices"):
        devices.choose_device("cuda:2")
    assert devices.choose_device("cuda:1") == torch.device("cuda", 1)
    assert devices.choose_device("auto").type == "cuda"


@pytest.mark.parametrize(
    "options",
    [
        {"device": "tpu"},
        {"device": "cpu:0"},
        {"device": "cuda:x"},
        {"dtype": "int4"},
        {"attention": "magic"},
        {"block_size": 0},
    ],
    ids=str,
)
def test_unknown_options_are_named(options: dict[str, object]) -> None:
    """A device, type, attention or block size that is none is a usage error that names it."""
    with pytest.raises(UsageError, match=str(next(iter(options.values())))):
        tiny_executor(**options)


def test_too_many_blocks_are_refused() -> None:
    """Memory that nobody has ends in DeviceMissing with the bytes, not in a crash."""
    with pytest.raises(DeviceMissing, match="no room for 1000000000000 KV blocks"):
        tiny_executor(num_blocks=10**12)


def test_without_a_number_blocks_fit_into_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a CPU's free memory, at most 32 longest contexts; DeviceMissing where not one fits."""
    assert tiny_executor(num_blocks=None).num_blocks == 32 * 256 // 4
    module = "engine_probe.engine.torch_executor.executor.free_bytes"
    monkeypatch.setattr(module, lambda device: 4 * 1024 * 100)
    assert tiny_executor(num_blocks=None).num_blocks == 100
    monkeypatch.setattr(module, lambda device: 1000)
    with pytest.raises(DeviceMissing, match="1000 bytes free"):
        tiny_executor(num_blocks=None)
    monkeypatch.setattr(module, lambda device: None)
    assert tiny_executor(num_blocks=None).num_blocks == 32 * 256 // 4


def test_memory_of_a_container_is_what_is_left_of_its_limit(tmp_path: Path) -> None:
    """Control groups of version 2: the limit less what is used; unbounded, or none at all, says nothing."""
    assert devices._free_of_container(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert devices._free_of_container(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert devices._free_of_container(tmp_path) is None


def test_blocks_count_as_taken_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may use what is free less all KV blocks; a limit of one's own stands."""
    monkeypatch.setattr("engine_probe.engine.torch_executor.executor.free_bytes", lambda device: 1_000_000)
    assert tiny_executor(num_blocks=100).activation_limit_bytes == 1_000_000 - 100 * 1024
    assert tiny_executor(num_blocks=100, activation_limit_bytes=5).activation_limit_bytes == 5


def test_context_is_never_longer_than_the_models() -> None:
    """A shorter one can be asked for, a longer one has no positions."""
    assert tiny_executor(max_context=100).max_context == 100
    assert tiny_executor(max_context=1000).max_context == 256


def test_closed_executor_holds_nothing() -> None:
    """Weights and KV are given back."""
    executor = tiny_executor()
    executor.close()
    with pytest.raises(AttributeError):
        executor.num_blocks  # noqa: B018


def test_torch_attends_on_a_cpu() -> None:
    """Kernels are for CUDA; on a CPU they run only where somebody asks for them by name."""
    assert choose_attention("auto", CPU).name == "torch"
    assert choose_attention("torch", torch.device("cuda")).name == "torch"
