"""How many KV blocks a model leaves room for: all of the memory it may use, less weights, activations and the runtime.

Source: vLLM's start-up profile does the same by measuring; this predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_probe.engine.roofline.hardware import Hardware
from engine_probe.engine.roofline.model_shape import ModelShape
from engine_probe.engine.roofline.step_time import ACTIVATION_BYTES, kv_heads_on_rank
from engine_probe.errors import DeviceMissing, UsageError

GIB = 1 << 30
RUNTIME_BYTES = GIB
"""Driver context, communication buffers, captured graphs. An assumption: engines report 0.5 to 2 GiB."""
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one rank, and the blocks that the rest is worth."""

    memory_bytes: int
    usable_bytes: int
    weights_bytes: int
    activation_bytes: int
    runtime_bytes: int
    kv_bytes: int
    block_bytes: int
    num_blocks: int


def plan_memory(
    shape: ModelShape,
    hardware: Hardware,
    *,
    tp: int = 1,
    block_size: int = 16,
    gpu_memory_utilization: float = 0.9,
    max_batch_tokens: int = 8192,
    max_seqs: int = 256,
) -> MemoryPlan:
    """Share out one rank's memory. Raises DeviceMissing, with the figures, where not one block is left."""
    if not 0.0 < gpu_memory_utilization <= 1.0:
        raise UsageError(f"gpu_memory_utilization is {gpu_memory_utilization}; expected above 0, at most 1")
    if block_size < 1:
        raise UsageError(f"block size is {block_size}; expected 1 or more")
    usable = int(hardware.memory_bytes * gpu_memory_utilization)
    weights = -(-shape.weights_bytes // tp)
    activations = activation_bytes(shape, max_batch_tokens, max_seqs, tp=tp)
    left = usable - weights - activations - RUNTIME_BYTES
    block_bytes = block_bytes_on_rank(shape, block_size, tp)
    if left < block_bytes:
        raise DeviceMissing(
            f"{shape.name} does not fit on {tp} x {hardware.name}: {weights / GIB:.1f} GiB of weights, {activations / GIB:.1f} of "
            f"activations and {RUNTIME_BYTES / GIB:.1f} of runtime leave no KV block in {usable / GIB:.1f} GiB. More of them "
            "(tensor parallelism), a larger one, or smaller weights would do",
            usable_bytes=usable,
            weights_bytes=weights,
        )
    return MemoryPlan(
        hardware.memory_bytes, usable, weights, activations, RUNTIME_BYTES, left, block_bytes, left // block_bytes
    )


def activation_bytes(shape: ModelShape, max_batch_tokens: int, max_seqs: int, *, tp: int = 1) -> int:
    """Most that activations take at once on one rank.

    In a feed-forward layer: the residual and its norm [tokens, hidden], gate, up and product [tokens, intermediate / tp]; and
    the logits [max_seqs, vocab] in float32.
    """
    wide = 3 * shape.intermediate * shape.active_experts // tp
    return max_batch_tokens * (2 * shape.hidden + wide) * ACTIVATION_BYTES + max_seqs * shape.vocab * LOGIT_BYTES


def block_bytes_on_rank(shape: ModelShape, block_size: int, tp: int = 1) -> int:
    """Keys and values of `block_size` tokens over all layers, on one rank."""
    return 2 * shape.layers * kv_heads_on_rank(shape, tp) * shape.head_dim * shape.kv_element_bytes * block_size
