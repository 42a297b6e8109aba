"""What `gpu_check` measures, part by part; each is a generator of table rows that may be stopped between two of them.

Every part takes a `Bench`, which says where it runs and how large: on a GPU in earnest, on a CPU as a rehearsal in which
the figures mean nothing.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.probe import NullSink
from engine_probe.clock import Clock
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.executor import Chunk, StepPlan
from engine_probe.engine.roofline.executor import RooflineExecutor
from engine_probe.engine.roofline.hardware import Hardware
from engine_probe.engine.roofline.model_shape import model_shape
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.torch_executor.activation import StepShape
from engine_probe.engine.torch_executor.attention import TorchAttention
from engine_probe.engine.torch_executor.batch import PackedBatch, pack
from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions
from engine_probe.engine.torch_executor.kernels.reference import write_kv_reference
from engine_probe.engine.torch_executor.kernels.triton_attention import TritonAttention
from engine_probe.engine.torch_executor.model_config import read_config
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.recording.recorder import Recorder

Row = tuple[str, ...]
HEADS = ((16, 4), (8, 8), (8, 1))
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
TINY = LLAMA_8B | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True)
class Bench:
    """device; hardware: what the roofline assumes of it, None where it is not in its table; fields: the model's config."""

    device: torch.device
    hardware: Hardware | None
    fields: dict[str, Any]
    is_rehearsal: bool

    def sizes(self, real: list[int], rehearsed: list[int]) -> list[int]:
        return rehearsed if self.is_rehearsal else real

    def seconds(self, work: Callable[[], object], repeats: int = 20) -> float:
        """Median time of `work`, once it is warm."""
        repeats = 2 if self.is_rehearsal else repeats
        found = []
        for at in range(repeats + 2):
            self.wait()
            begin = time.perf_counter()
            work()
            self.wait()
            if at >= 2:
                found.append(time.perf_counter() - begin)
        return statistics.median(found)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class DeviceTensors:
    """Random weights made on the device itself: an 8B model in seconds."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.randn(shape, dtype=self._dtype, device=self._device) * shape[-1] ** -0.5


def make_batch(bench: Bench, decodes: list[int], chunks: list[tuple[int, int]], size: int) -> tuple[PackedBatch, int]:
    """Decodes of these contexts and chunks (queries, context) over scattered blocks; the number of blocks."""
    contexts = [*decodes, *(context for _, context in chunks)]
    widths = [-(-context // size) for context in contexts]
    blocks = list(range(sum(widths)))
    random.Random(0).shuffle(blocks)
    plan = StepPlan()
    for at, (context, width) in enumerate(zip(contexts, widths, strict=True)):
        own, blocks = blocks[:width], blocks[width:]
        made = Sequence(f"r{at}", context, SamplingParams(), 0, token_ids=[0] * context, blocks=own)
        if at < len(decodes):
            made.num_computed = context - 1
            plan.decodes.append(made)
        else:
            count = chunks[at - len(decodes)][0]
            plan.prefills.append(Chunk(made, context - count, count, emits=True))
    return pack(plan, size, bench.device), sum(widths)


def random_kv(bench: Bench, batch: PackedBatch, num_blocks: int, heads: tuple[int, int], dtype: torch.dtype) -> Any:
    """Queries [N, num_heads, head_dim], key cache, value cache."""
    torch.manual_seed(0)
    width = 16 if bench.is_rehearsal else 128
    queries = torch.randn(batch.num_tokens, heads[0], width, device=bench.device).to(dtype)
    caches = torch.randn(2, num_blocks, batch.block_size, heads[1], width, device=bench.device).to(dtype)
    return queries, caches[0], caches[1]


def kernels_against_oracles(bench: Bench) -> Iterator[Row]:
    """heads, block size, type | largest error of decode and prefill | KV write | agrees"""
    long = 40 if bench.is_rehearsal else 3000
    work = ([1, 17, long], [(5, 5), (3, 40), (long // 2, long), (1, 9)])
    kinds = [(size, torch.bfloat16) for size in (16, 32, 5)] + [(16, torch.float32)]
    layouts = ((4, 2),) if bench.is_rehearsal else HEADS
    for heads, (size, dtype) in itertools.product(layouts, kinds):
        batch, num_blocks = make_batch(bench, *work, size)
        queries, keys, values = random_kv(bench, batch, num_blocks, heads, dtype)
        found = TritonAttention().prepare(batch)(queries, keys, values).float()
        # The oracle of the oracle is `kernels/reference.py`, held on a CPU by the unit tests.
        right = TorchAttention().prepare(batch)(queries.float(), keys.float(), values.float())
        error = float(((found - right).abs() / (1 + right.abs())).max())
        new = torch.randn(batch.num_tokens, 2, heads[1], keys.shape[-1], device=bench.device).to(dtype)
        written, expected = torch.stack([keys, values]), torch.stack([keys, values])
        TritonAttention().write(new[:, 0], new[:, 1], (written[0], written[1]), batch.slots)
        write_kv_reference(new[:, 0], new[:, 1], expected[0], expected[1], batch.slots)
        is_written = torch.equal(written, expected)
        agrees = error <= TOLERANCE[dtype] and is_written
        name = f"{heads[0]}/{heads[1]}, {size}, {str(dtype).removeprefix('torch.')}"
        yield name, f"{error:.1e}", "exact" if is_written else "WRONG", "yes" if agrees else "NO"


def kernel_speed(bench: Bench) -> Iterator[Row]:
    """work | time | reached | share of the datasheet | plain torch takes"""
    heads, dtype, size = (4, 2) if bench.is_rehearsal else (32, 8), torch.bfloat16, 16
    peaks = bench.hardware
    for num_seqs, context in zip(bench.sizes([1, 16, 128], [2]), bench.sizes([16384, 4096, 2048], [60]), strict=True):
        batch, num_blocks = make_batch(bench, [context] * num_seqs, [], size)
        tensors = random_kv(bench, batch, num_blocks, heads, dtype)
        ours, torchs = both(bench, batch, tensors)
        rate = 2 * num_seqs * context * tensors[1].shape[2] * tensors[1].shape[3] * dtype.itemsize / ours
        share = "unknown" if peaks is None else f"{rate / peaks.memory_bandwidth:.0%}"
        yield (
            f"decode {num_seqs} x {context}",
            f"{ours * 1e6:.0f} us",
            f"{rate / 1e9:.0f} GB/s",
            share,
            f"{torchs / ours:.1f} x",
        )
    for count, context in zip(bench.sizes([512, 4096, 512], [8]), bench.sizes([512, 4096, 8192], [20]), strict=True):
        batch, num_blocks = make_batch(bench, [], [(count, context)], size)
        tensors = random_kv(bench, batch, num_blocks, heads, dtype)
        ours, torchs = both(bench, batch, tensors)
        pairs = count * (2 * context - count + 1) / 2
        rate = 4 * pairs * heads[0] * tensors[0].shape[-1] / ours
        share = "unknown" if peaks is None else f"{rate / peaks.peak_flops:.0%}"
        name = f"prefill {count} of {context}"
        yield name, f"{ours * 1e6:.0f} us", f"{rate / 1e12:.1f} TFLOP/s", share, f"{torchs / ours:.1f} x"


def both(bench: Bench, batch: PackedBatch, tensors: Any) -> tuple[float, float]:
    """Seconds of the Triton kernels and of plain torch."""
    kernels, plain = TritonAttention().prepare(batch), TorchAttention().prepare(batch)
    return bench.seconds(lambda: kernels(*tensors)), bench.seconds(lambda: plain(*tensors))


def same_tokens(bench: Bench) -> Iterator[Row]:
    """way to attend | same greedy tokens in float32"""
    num_tokens = 3 if bench.is_rehearsal else 24
    config = replace(read_config(TINY), num_layers=4)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 6
    answers = []
    for attention, device in (("torch", "cpu"), ("triton", str(bench.device))):
        options = TorchOptions(device=device, dtype="float32", num_blocks=64, attention=attention)
        engine = make_engine(TorchExecutor.seeded(config, 0, options), NullSink())
        sequence = submit(engine, prompt, num_tokens, ignore_eos=True)
        while engine.has_work:
            engine.step()
        answers.append(sequence.token_ids[len(prompt) :])
        engine.close()
    yield f"triton here, torch on the CPU, {num_tokens} tokens", "yes" if answers[0] == answers[1] else "NO"


def make_engine(executor: TorchExecutor, sink: Any, recorder: Any = None) -> Engine:
    """An engine on `executor`; recorder: None for a real one that writes to `sink`."""
    return Engine(EngineConfig(), executor, recorder or Recorder(sink, worker="w0", clock=Clock(), flush_s=0.5))


def submit(engine: Engine, prompt: list[int], max_tokens: int, **params: Any) -> Sequence:
    """A request under way."""
    number = engine.num_running + engine.num_waiting
    wanted = SamplingParams(max_tokens=max_tokens, **params)
    made = Sequence(f"r{number}", len(prompt), wanted, engine.clock.monotonic_ns(), token_ids=list(prompt))
    engine.submit(made)
    return made


class Silent:
    """A recorder that does nothing: the engine without its probe."""

    worker = "w0"

    def __init__(self) -> None:
        self.clock = Clock()
        self.constants: dict[str, dict[str, Any]] = {"step": {}}

    def __getattr__(self, verb: str) -> Callable[..., int]:
        return _nothing


def _nothing(*_: Any, **__: Any) -> int:
    return 0


def probe_overhead(bench: Bench, executor: TorchExecutor) -> Iterator[Row]:
    """engine | decode step, median | throughput"""
    num_seqs, num_tokens, rounds = (4, 6, 2) if bench.is_rehearsal else (64, 64, 4)
    steps: dict[str, list[float]] = {"recorder on": [], "recorder off": []}
    for _, name in itertools.product(range(rounds), steps):
        engine = make_engine(executor, NullSink(), None if name == "recorder on" else Silent())
        for at in range(num_seqs):
            submit(engine, [at % 250] * 64, num_tokens, ignore_eos=True)
        while engine.has_work:
            begin = time.perf_counter()
            outputs = engine.step() or []
            if len(outputs) == num_seqs and all(output.sequence.num_output > 1 for output in outputs):
                steps[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(found) for name, found in steps.items()}
    for name, median in medians.items():
        yield name, f"{median * 1e3:.3f} ms", f"{num_seqs / median:.0f} tokens/s"
    share = medians["recorder on"] / medians["recorder off"] - 1
    yield "on over off", f"{share:+.2%}", f"{rounds} rounds of each, taking turns"


def roofline_against_measured(bench: Bench, executor: TorchExecutor) -> Iterator[Row]:
    """step | measured | roofline | measured / roofline"""
    virtual = None
    if bench.hardware is not None:
        shape = model_shape(bench.fields, name="bench")
        virtual = RooflineExecutor(shape, bench.hardware, VirtualClock(), num_blocks=executor.num_blocks)
    size = executor.block_size
    for num_seqs, context in itertools.product(bench.sizes([1, 8, 32, 128], [3]), bench.sizes([1024, 4096], [40])):
        width = -(-context // size)
        if num_seqs * width > executor.num_blocks:
            continue
        plan = StepPlan()
        for at in range(num_seqs):
            blocks = list(range(at * width, at * width + width))
            made = Sequence(f"r{at}", context, SamplingParams(), 0, token_ids=[0] * context, blocks=blocks)
            made.num_computed = context - 1
            plan.decodes.append(made)
        yield compare(bench, f"decode {num_seqs} x {context}", plan, executor, virtual)
    for count in bench.sizes([512, 2048, 8192], [64]):
        blocks = list(range(-(-count // size)))
        made = Sequence("r0", count, SamplingParams(), 0, token_ids=[0] * count, blocks=blocks)
        plan = StepPlan(prefills=[Chunk(made, 0, count, emits=True)])
        yield compare(bench, f"prefill {count}", plan, executor, virtual)


def compare(bench: Bench, name: str, plan: StepPlan, executor: TorchExecutor, virtual: RooflineExecutor | None) -> Row:
    """One step on the device (as the executor itself times it: forward and sampling) and in virtual time."""
    found = [executor.execute(plan) for _ in range(3 if bench.is_rehearsal else 9)]
    measured = statistics.median(result.forward_s + result.sample_s for result in found[2:])
    if virtual is None:
        return name, f"{measured * 1e3:.2f} ms", "hardware not in the table", "unknown"
    said = virtual.execute(plan).forward_s
    return name, f"{measured * 1e3:.2f} ms", f"{said * 1e3:.2f} ms", f"{measured / said:.2f}"


def activations(bench: Bench, executor: TorchExecutor) -> Iterator[Row]:
    """step | measured | predicted | measured / predicted"""
    for count in bench.sizes([512, 2048, 8192], [64]):
        blocks = list(range(-(-count // executor.block_size)))
        made = Sequence("r0", count, SamplingParams(), 0, token_ids=[0] * count, blocks=blocks)
        measured = executor.measure(StepPlan(prefills=[Chunk(made, 0, count, emits=True)]))
        said = executor.predict_activation_bytes(StepShape(count, count))
        yield f"prefill {count}", f"{measured / 1e6:.1f} MB", f"{said / 1e6:.1f} MB", f"{measured / said:.2f}"
