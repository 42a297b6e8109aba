"""Triton: one new token a sequence attends to its paged context.

A program takes one sequence, one KV head and one part of the context; the query heads that share the KV head are the rows
of its products, so each key is read once for all of them. Parts are joined afterwards by their maxima and sums (Dao et al.
2023, flash decoding), because few long sequences would leave most of a GPU idle. Oracle: `reference.paged_attention_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_probe.engine.torch_executor.kernels.chunked_prefill import tile_options

_PART = 512
"""Tokens of context a program reads at most; one part where there are enough sequences to fill a GPU."""


def paged_decode(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """queries [S, num_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim]; tables [S, max_blocks].

    longest: largest of context_lens [S]. Returns [S, num_heads, head_dim] in the type of `queries`.
    """
    num_seqs, num_heads, head_dim = queries.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride(3) == queries.stride(2) == 1
    group = num_heads // num_kv_heads
    num_parts = triton.cdiv(longest, _PART)
    partial = torch.empty(num_seqs, num_heads, num_parts, head_dim, dtype=torch.float32, device=queries.device)
    sums = torch.empty(num_seqs, num_heads, num_parts, dtype=torch.float32, device=queries.device)
    maxima = torch.empty_like(sums)
    _paged_decode[(num_seqs, num_kv_heads, num_parts)](
        queries,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        partial,
        sums,
        maxima,
        head_dim**-0.5,
        queries.stride(0),
        queries.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        num_heads,
        num_parts,
        BLOCK_SIZE=block_size,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        PART=_PART,
        # The interpreter multiplies the bits of bfloat16, not its values; on a GPU the type stays.
        WIDEN=queries.device.type == "cpu",
        **tile_options(queries.dtype),
    )
    if num_parts == 1:
        return (partial / sums.unsqueeze(-1)).squeeze(2).to(queries.dtype)
    # A part past the end of its context has the maximum -inf and weighs nothing.
    weights = torch.exp2(maxima - maxima.amax(dim=2, keepdim=True))
    joined = (partial * weights.unsqueeze(-1)).sum(dim=2) / (sums * weights).sum(dim=2).unsqueeze(-1)
    return joined.to(queries.dtype)


@triton.jit
def _paged_decode(
    queries,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    partial,
    sums,
    maxima,
    scale,
    query_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    num_heads,
    num_parts,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    context = tl.load(context_lens + sequence)

    member = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    head = kv_head * GROUP + member
    is_query = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(
        queries + sequence * query_stride + head[:, None] * query_head_stride + dim[None, :], mask=is_query, other=0.0
    )
    if WIDEN:
        query = query.to(tl.float32)

    best = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    found = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
    first = part * PART
    last = tl.minimum(first + PART, context)
    for begin in range(first, last, TILE):
        at = begin + tl.arange(0, TILE)
        is_there = at < last
        block = tl.load(block_tables + sequence * table_stride + at // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        slot = block * block_stride + (at % BLOCK_SIZE) * slot_stride + kv_head * head_stride
        is_read = is_there[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(key_cache + slot[:, None] + dim[None, :], mask=is_read, other=0.0)
        if WIDEN:
            key = key.to(tl.float32)
        # [GROUP_PADDED, TILE], in powers of two: 1.4427 is 1 / ln 2.
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * 1.4426950408889634)
        score = tl.where(is_there[None, :], score, float("-inf"))
        better = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp2(score - better[:, None])
        kept = tl.exp2(best - better)
        value = tl.load(value_cache + slot[:, None] + dim[None, :], mask=is_read, other=0.0)
        if WIDEN:
            value = value.to(tl.float32)
        found = found * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        total = total * kept + tl.sum(weight, axis=1)
        best = better

    place = (sequence * num_heads + head) * num_parts + part
    tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], found, mask=is_query)
    tl.store(sums + place, total, mask=member < GROUP)
    tl.store(maxima + place, best, mask=member < GROUP)
