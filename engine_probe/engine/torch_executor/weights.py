"""The weights of a decoder, by the names under which Hugging Face checkpoints keep them.

Invariant: every tensor that the config asks for is there with its shape, and no tensor is there that it does not ask
for (an unasked bias or norm would mean another model). Where they come from is a `TensorSource`: a folder of safetensors
(`checkpoint.py`) or a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch

from engine_probe.engine.torch_executor.linear import Linear
from engine_probe.engine.torch_executor.model_config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TensorSource(Protocol):
    """Gives tensors by name."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, of a floating type, on the CPU. Raises ModelUnreadable where it is absent or of another shape."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. qkv: query, key and value rows one after another; gate_up: gate rows, then up rows."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """embedding [vocab_size, hidden_size]; head: the same numbers where the model ties them. num_bytes: held in memory."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear
    num_bytes: int


class SeededTensors:
    """Random weights that depend on the seed and the tensor's name alone, scaled so that activations stay near 1."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        digest = blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * noise
        if name.endswith(".bias"):
            return 0.1 * noise
        is_embedding = name == "model.embed_tokens.weight"
        return noise if is_embedding else noise * shape[-1] ** -0.5


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        for name, size in (("q", config.query_size), ("k", config.kv_size), ("v", config.kv_size)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, config.query_size)
        if config.output_bias:
            shapes[f"{layer}self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[f"{layer}self_attn.q_norm.weight"] = shapes[f"{layer}self_attn.k_norm.weight"] = (config.head_dim,)
        for name, out_size, in_size in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            shapes[f"{layer}mlp.{name}_proj.weight"] = (out_size, in_size)
            if config.mlp_bias:
                shapes[f"{layer}mlp.{name}_proj.bias"] = (out_size,)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def build_weights(
    config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: torch.device, *, packed: bool | None = None
) -> Weights:
    """Take every tensor from `source`, in `dtype` on `device`. packed: see `Linear`."""
    shapes = expected_shapes(config)
    num_bytes = 0

    def tensor(name: str) -> torch.Tensor:
        nonlocal num_bytes
        found = source.get(name, shapes[name]).to(device=device, dtype=dtype)
        num_bytes += found.nbytes
        return found

    def linear(*names: str) -> Linear:
        weights = [tensor(f"{name}.weight") for name in names]
        biases = [tensor(f"{name}.bias") for name in names if f"{name}.bias" in shapes]
        # Freed one by one as they are joined: a large layer is not held twice for longer than a moment.
        weight = weights.pop() if len(weights) == 1 else torch.cat(weights)
        weights.clear()
        return Linear(weight, torch.cat(biases) if biases else None, packed=packed)

    def layer(index: int) -> LayerWeights:
        at = f"model.layers.{index}."
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        return LayerWeights(
            input_norm=tensor(f"{at}input_layernorm.weight"),
            qkv=linear(*(f"{attention}{name}_proj" for name in "qkv")),
            query_norm=tensor(f"{attention}q_norm.weight") if config.qk_norm else None,
            key_norm=tensor(f"{attention}k_norm.weight") if config.qk_norm else None,
            output=linear(f"{attention}o_proj"),
            mlp_norm=tensor(f"{at}post_attention_layernorm.weight"),
            gate_up=linear(f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=linear(f"{mlp}down_proj"),
        )

    embedding = tensor("model.embed_tokens.weight")
    layers = tuple(layer(index) for index in range(config.num_layers))
    norm = tensor("model.norm.weight")
    if config.tied:
        head = Linear(embedding, packed=packed)
        # Laid out anew for the product, a tied head is a second copy; the look-up keeps the first.
        num_bytes += embedding.nbytes if head.is_packed else 0
    else:
        head = linear("lm_head")
    return Weights(embedding, layers, norm, head, num_bytes)
