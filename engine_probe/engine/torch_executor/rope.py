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
    """cos and sin of each position, [num_positions, 2, head_dim / 2] float32."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies(rope, head_dim))
    return torch.stack([angles.cos(), angles.sin()], dim=1).to(device)


def rotate(heads: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Turn heads [num_tokens, num_heads, head_dim] by turn [num_tokens, 2, head_dim / 2], in the type of `heads`."""
    cos, sin = turn[:, 0].unsqueeze(1), turn[:, 1].unsqueeze(1)
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
