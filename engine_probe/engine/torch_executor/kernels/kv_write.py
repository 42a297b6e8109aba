"""Triton: put the keys and values of a step's tokens into their slots of the paged cache.

Oracle: `reference.write_kv_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Put keys and values [N, num_kv_heads, head_dim] into slots [N] of caches [num_blocks, block_size, heads, head_dim].

    Rows may be strided; a slot of a cache is contiguous.
    """
    num_tokens, num_heads, head_dim = keys.shape
    assert key_cache.stride(3) == 1
    assert key_cache.stride(2) == head_dim
    assert key_cache.stride() == value_cache.stride()
    assert keys.stride(2) == values.stride(2) == 1
    assert keys.stride(1) == values.stride(1) == head_dim
    width = num_heads * head_dim
    _write_kv[(num_tokens,)](
        keys,
        values,
        key_cache,
        value_cache,
        slots,
        keys.stride(0),
        values.stride(0),
        key_cache.stride(1),
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
    )


@triton.jit
def _write_kv(
    keys,
    values,
    key_cache,
    value_cache,
    slots,
    key_stride,
    value_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    at = tl.arange(0, WIDTH_PADDED)
    inside = at < WIDTH
    key = tl.load(keys + row * key_stride + at, mask=inside)
    tl.store(key_cache + slot * slot_stride + at, key, mask=inside)
    value = tl.load(values + row * value_stride + at, mask=inside)
    tl.store(value_cache + slot * slot_stride + at, value, mask=inside)
