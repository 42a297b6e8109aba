"""Computes steps with real tensors: the embedded engine's executor on a CPU or a GPU.

A step is: move blocks (swap out, swap in, copy on write), pack every decode and chunk into one batch, run the decoder over
it, choose tokens for the rows that emit. Times are measured, memory is measured; see `engine_probe.engine.executor`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine_probe.engine.executor import Chunk, StepPlan, StepResult
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.torch_executor.activation import StepShape, measure_activation_bytes, predict_activation_bytes
from engine_probe.engine.torch_executor.attention import Attention, TorchAttention
from engine_probe.engine.torch_executor.batch import PackedBatch, pack
from engine_probe.engine.torch_executor.checkpoint import SafetensorsFolder, read_folder_config
from engine_probe.engine.torch_executor.checks import check_batch
from engine_probe.engine.torch_executor.decoder import Decoder
from engine_probe.engine.torch_executor.device import choose_device, choose_dtype, free_bytes
from engine_probe.engine.torch_executor.kv_cache import KvCache, bytes_per_block
from engine_probe.engine.torch_executor.model_config import ModelConfig
from engine_probe.engine.torch_executor.sampling import choose
from engine_probe.engine.torch_executor.weights import SeededTensors, TensorSource, build_weights
from engine_probe.errors import DeviceMissing, EngineError, UsageError

log = logging.getLogger(__name__)

_SHARE_OF_FREE = {"cuda": 0.85, "cpu": 0.25}
_MOST_CONTEXTS = 32
_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How a model is run.

    device, dtype     auto | cpu | cuda | cuda:N; auto | float32 | bfloat16 | float16 (auto: as published;
                      float16 becomes float32 on a CPU)
    num_blocks        None: from the memory that is free (a quarter of it on a CPU), at most 32 longest contexts
    num_host_blocks   blocks of host memory for swapping
    max_context       tokens; None: the model's own
    attention         auto (triton on cuda) | torch | triton
    seed              of the streams of requests that bring none
    check_every       every how many steps the packed batch is checked (`checks.py`); 0: never
    activation_limit_bytes   memory for a step; None: what is free once weights and KV are there
    warm_up_tokens    a made-up step of so many tokens at the start: kernels are compiled, its memory is measured
    """

    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    num_host_blocks: int = 0
    max_context: int | None = None
    attention: str = "auto"
    seed: int = 0
    check_every: int = 0
    activation_limit_bytes: int | None = None
    warm_up_tokens: int = 0


class TorchExecutor:
    """One model on one device. Not thread-safe.

    weights_bytes, kv_bytes_per_block   held in memory
    activation_peak_bytes               measured over the steps so far; None before the first
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        source: TensorSource,
        options: TorchOptions | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Load `source`. Raises ModelUnreadable, DeviceMissing, UsageError."""
        options = options or TorchOptions()
        if options.block_size < 1:
            raise UsageError(f"block_size is {options.block_size}; expected 1 or more")
        self.name = name
        self.config = config
        self.block_size = options.block_size
        self.device = choose_device(options.device)
        self.dtype = choose_dtype(options.dtype, config.dtype, self.device)
        self._max_context = min(options.max_context or config.max_context, config.max_context)
        self._options = options
        self._clock = clock
        self.attention = choose_attention(options.attention, self.device)
        try:
            weights = build_weights(config, source, self.dtype, self.device)
        except torch.OutOfMemoryError as error:
            size = config.num_parameters * self.dtype.itemsize
            raise DeviceMissing(f"{self.device} has no room for {size} bytes of weights", size_bytes=size) from error
        self.weights_bytes = weights.num_bytes
        self.kv_bytes_per_block = bytes_per_block(config, self.block_size, self.dtype)
        self.activation_peak_bytes: int | None = None
        self._decoder = Decoder(config, weights, self.attention, self._max_context)
        num_blocks = options.num_blocks or self._blocks_that_fit()
        self._cache = KvCache(config, num_blocks, self.block_size, self.dtype, self.device, options.num_host_blocks)
        limit = options.activation_limit_bytes
        self.activation_limit_bytes = self._free_for_steps() if limit is None else limit
        self._num_steps = 0
        self._measured_from = 0
        if options.warm_up_tokens > 0:
            self._warm_up(options.warm_up_tokens)

    @classmethod
    def from_folder(cls, folder: Path, options: TorchOptions | None = None) -> TorchExecutor:
        """The model of a folder with config.json and safetensors."""
        config = read_folder_config(folder)
        return cls(folder.name, config, SafetensorsFolder(folder, config), options)

    @classmethod
    def seeded(cls, config: ModelConfig, seed: int = 0, options: TorchOptions | None = None) -> TorchExecutor:
        """Random weights from `seed`: a model that says nothing, and says it reproducibly."""
        return cls(f"seeded-{config.model_type}-{seed}", config, SeededTensors(seed), options)

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._cache.num_host_blocks

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.config.eos_token_ids

    @property
    def worker_facts(self) -> Mapping[str, object]:
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "model": self.name,
            "dtype": dtype,
            "kv_dtype": dtype,
            "kv_bytes_per_block": self.kv_bytes_per_block,
            "weights_bytes": self.weights_bytes,
            "activation_peak_bytes": self.activation_peak_bytes,
            "gpu_id": str(self.device) if self.device.type == "cuda" else None,
            "tp": 1,
            "pp": 1,
            "dp": 1,
        }

    def predict_activation_bytes(self, shape: StepShape) -> int:
        """Peak bytes that a step needs beside weights and KV."""
        return predict_activation_bytes(self.config, self.dtype, shape, self.attention.name)

    def refusal(self, num_tokens: int, context: int) -> str | None:
        """With both numbers, where the step's activations would not fit into memory."""
        needed = self.predict_activation_bytes(StepShape(num_tokens, context, num_drawing=1))
        limit = self.activation_limit_bytes
        if limit is None or needed <= limit:
            return None
        return (
            f"computing {num_tokens} tokens of a prompt in one step needs {needed} bytes of activations, {limit} are "
            "there; send a shorter prompt, or let the engine prefill in (smaller) chunks"
        )

    def foresee(self, decodes: Items[Sequence], most: int) -> None:
        """Real tokens decide what comes next."""

    def execute(self, plan: StepPlan) -> StepResult:
        """One step."""
        with torch.inference_mode():
            load_s = self._move_blocks(plan)
            if not (plan.decodes or plan.prefills):
                return StepResult((), 0.0, 0.0, load_s)
            batch = pack(plan, self.block_size, self.device)
            checks = self._checks(batch, plan)
            try:
                return replace(self._compute(batch, plan, load_s), checks=checks)
            except torch.OutOfMemoryError as error:
                needed = self._predicted(batch, plan)
                raise EngineError(
                    f"a step of {batch.num_tokens} tokens ran out of memory on {self.device}; it was predicted to need "
                    f"{needed} bytes of activations; lower the token budget or the number of KV blocks",
                    needed_bytes=needed,
                ) from error

    def measure(self, plan: StepPlan) -> int:
        """Peak bytes that this step really held beside weights and KV; it is executed."""
        return measure_activation_bytes(lambda: self.execute(plan), self.device)

    def close(self) -> None:
        """Drop weights and KV; nothing can be executed afterwards."""
        del self._decoder, self._cache
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _checks(self, batch: PackedBatch, plan: StepPlan) -> list[Mapping[str, Any]]:
        """Columns of this step's `check` rows, where its turn has come."""
        self._num_steps += 1
        every = self._options.check_every
        if not every or self._num_steps % every:
            return []
        found = check_batch(batch, plan, self.attention, self.config)
        for check in found:
            if not check.passed:
                log.error("packed batch failed a check", extra={"check": check.columns["check"], "why": check.why})
        return [check.columns for check in found]

    def _compute(self, batch: PackedBatch, plan: StepPlan, load_s: float) -> StepResult:
        """The step; its memory is measured where it is well above every step before."""
        predicted = self._predicted(batch, plan)
        if predicted < _GROWTH * self._measured_from:
            return self._timed(batch, plan, load_s)
        found: list[StepResult] = []
        measured = measure_activation_bytes(lambda: found.append(self._timed(batch, plan, load_s)), self.device)
        self._measured_from = predicted
        self.activation_peak_bytes = max(self.activation_peak_bytes or 0, measured)
        return found[0]

    def _timed(self, batch: PackedBatch, plan: StepPlan, load_s: float) -> StepResult:
        began = self._now()
        hidden = self._decoder.hidden_states(batch, self._cache)
        forwarded = self._now()
        emitting = plan.emitting
        tokens = choose(self._decoder.logits(hidden), emitting, self._options.seed) if emitting else []
        return StepResult(
            tokens,
            forwarded - began,
            self._now() - forwarded,
            load_s,
            max_seq_len=max(batch.contexts),
            wasted_slots=sum([-context % self.block_size for context in batch.contexts]),
        )

    def _warm_up(self, num_tokens: int) -> None:
        """A step of that many made-up tokens, before any request is there: what it writes into the blocks is never read."""
        longest = min(self._max_context, self._cache.num_blocks * self.block_size)
        plan = StepPlan()
        blocks = list(range(self._cache.num_blocks))
        while num_tokens > 0:
            count = min(num_tokens, longest)
            made_up = Sequence("warm-up", count, SamplingParams(), 0, token_ids=[0] * count, blocks=blocks)
            plan.prefills.append(Chunk(made_up, 0, count, emits=True))
            num_tokens -= count
        self.execute(plan)
        self._num_steps = 0

    def _predicted(self, batch: PackedBatch, plan: StepPlan) -> int:
        contexts = batch.contexts
        shape = StepShape(
            num_tokens=batch.num_tokens,
            longest_chunk=max(contexts[batch.num_decodes :], default=0),
            decode_contexts=sum(contexts[: batch.num_decodes]),
            num_emitting=len(plan.emitting),
            num_drawing=sum(sequence.params.temperature > 0 for sequence in plan.emitting),
        )
        return self.predict_activation_bytes(shape)

    def _move_blocks(self, plan: StepPlan) -> float:
        if not (plan.swap_out or plan.swap_in or plan.copies):
            return 0.0
        began = self._now()
        self._cache.swap_out(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        self._cache.copy(plan.copies)
        return self._now() - began

    def _now(self) -> float:
        """s, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock()

    def _free_for_steps(self) -> int | None:
        """What is free once every KV block is in use."""
        free = free_bytes(self.device)
        if free is None or self.device.type == "cuda":
            return free
        # On a CPU a block takes its memory when it is first written: it counts as taken.
        return max(0, free - self._cache.num_blocks * self.kv_bytes_per_block)

    def _blocks_that_fit(self) -> int:
        free = free_bytes(self.device)
        most = _MOST_CONTEXTS * math.ceil(self._max_context / self.block_size)
        if free is None:
            return most
        fitting = int(free * _SHARE_OF_FREE[self.device.type]) // self.kv_bytes_per_block
        if fitting < 1:
            raise DeviceMissing(
                f"{self.device} has {free} bytes free, too few for one KV block of {self.kv_bytes_per_block}",
                free_bytes=free,
            )
        return min(fitting, most)


def choose_attention(name: str, device: torch.device) -> Attention:
    """auto: Triton kernels on cuda, plain torch elsewhere. Raises UsageError, DeviceMissing."""
    if name not in ("auto", "torch", "triton"):
        raise UsageError(f"no attention '{name}' here; known: auto, torch, triton", attention=name)
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return TorchAttention()
    try:
        from engine_probe.engine.torch_executor.kernels.triton_attention import TritonAttention
    except ImportError as error:
        raise DeviceMissing(
            "the kernels need the package triton, which is not installed; use attention torch"
        ) from error
    return TritonAttention()
