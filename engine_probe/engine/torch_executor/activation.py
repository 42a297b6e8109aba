"""Memory that a step needs beside weights and KV: predicted from shapes before it runs, measured while it runs.

The prediction walks the decoder in the order in which it computes and takes the largest sum of tensors alive at once: what
torch holds, not what a library's workspace holds. A test asks that no measured peak is above it, nor below a
quarter of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_probe.engine.torch_executor.attention import QUERY_RUN
from engine_probe.engine.torch_executor.model_config import ModelConfig

_SMALL_CHANGE = 16 * 1024
"""Block tables, row numbers, scalars."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a step decides its memory.

    num_tokens       computed, of all sequences
    longest_chunk    longest context of a prefill chunk, the chunk included; 0: none
    decode_contexts  tokens of all decodes' contexts together
    num_emitting, num_drawing   rows whose next token is chosen; of those, by chance
    """

    num_tokens: int
    longest_chunk: int = 0
    decode_contexts: int = 0
    num_emitting: int = 1
    num_drawing: int = 0


def predict_activation_bytes(
    config: ModelConfig, dtype: torch.dtype, shape: StepShape, attention: str = "torch"
) -> int:
    """Peak bytes of a step. attention: torch (gathers the context of a sequence) or triton (reads it in place)."""
    size = dtype.itemsize
    hidden = shape.num_tokens * config.hidden_size * size
    queries = shape.num_tokens * config.query_size * size
    turned = shape.num_tokens * (config.query_size + config.kv_size)
    qkv = shape.num_tokens * (config.query_size + 2 * config.kv_size) * size
    inner = shape.num_tokens * config.intermediate_size * size
    # Through all layers: the residual, cos and sin in float32, the integers of the batch.
    held = hidden + shape.num_tokens * (config.head_dim * 8 + 6 * 8)
    norms = 3 * turned * size if config.qk_norm else 0
    turning = hidden + qkv + norms + turned * (4 * 4 + size)
    gathered = masks = 0
    if attention == "torch":
        # Decodes are padded to at most twice their contexts; masks of booleans are turned into numbers.
        gathered = 2 * config.kv_size * size * max(shape.longest_chunk, 2 * shape.decode_contexts)
        # One causal mask of a run of queries is there throughout; what a layer uses of it becomes numbers.
        columns = shape.longest_chunk + QUERY_RUN if shape.longest_chunk else 0
        held += min(shape.num_tokens, QUERY_RUN) * columns
        masks = min(shape.num_tokens, QUERY_RUN) * shape.longest_chunk * size + 8 * columns
        masks += shape.decode_contexts * 2 * (1 + size)
    attending = qkv + turned * size + 3 * queries + gathered + masks + hidden
    feeding = 2 * hidden + 4 * inner
    logits = config.vocab_size * (shape.num_emitting * (4 if size == 4 else size + 4) + shape.num_drawing * 6 * 8)
    choosing = logits + 3 * shape.num_emitting * config.hidden_size * size
    return held + max(turning, attending, feeding, choosing) + _SMALL_CHANGE


def measure_activation_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Run `work` and return the most bytes of tensors that it held at once beyond those that were there before.

    On CUDA the allocator's own count. On a CPU, where torch keeps none, every tensor that an operator makes is followed
    until it is freed; what operators hold inside themselves (a library's workspace) is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before: int = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak - before
    live = _LiveTensors()
    with live:
        work()
    return live.peak_bytes


class _LiveTensors(TorchDispatchMode):
    """Follows the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, int] = {}
        self._total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and saying so spares the seconds of importing the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and (key := _storage_key(leaf)) and key not in given:
                self._follow(key, leaf)
        return made

    def _follow(self, key: int, tensor: torch.Tensor) -> None:
        if key in self._live:
            return
        storage = tensor.untyped_storage()
        self._live[key] = storage.nbytes()
        self._total += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._total)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self._total -= self._live.pop(key)


def _storage_key(tensor: torch.Tensor) -> int:
    """Which storage it is; 0 for layouts that have none (a weight laid out for oneDNN)."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0
