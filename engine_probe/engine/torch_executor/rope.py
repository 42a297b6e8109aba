"""Rotary position embedding: each pair (i, i + head_dim/2) of a head is turned by position * frequency_i.

Source: Su et al. 2021; pairing and the llama3 stretching as in Hugging Face `modeling_rope_utils.py` (transformers 4.57).
"""

from __future__ import annotations

import math

import torch

from engine_probe.engine.torch_executor.model_config import Rope


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians a position, [head_dim / 2] float32."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind != "llama3":
        return plain
    # Waves shorter than original/high stay, longer than original/low are stretched whole, between them blended.
    turns = rope.original_context * plain / (2 * math.pi)
    keep = ((turns - rope.low_factor) / (rope.high_factor - rope.low_factor)).clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep)


def rotation_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """cos and sin of each position and element, [num_positions, 2, head_dim] float32.

    The first half of the sines is negative: a pair (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)], dim=1).to(device)


def rotate(heads: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Turn heads [num_tokens, num_heads, head_dim] by turn [num_tokens, 2, head_dim], in the type of `heads`."""
    cos, sin = turn[:, :1], turn[:, 1:]
    wide = heads.float()
    return torch.addcmul(wide * cos, wide.roll(heads.shape[-1] // 2, dims=-1), sin).to(heads.dtype)
