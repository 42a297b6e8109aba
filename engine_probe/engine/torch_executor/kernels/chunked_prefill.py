"""Triton: the chunks of several prompts attend to their paged contexts, each row up to its own position.

A program takes up to `_ROWS` consecutive queries of one chunk and one head. Which chunk a program belongs to is listed
beforehand, so chunks of any lengths are one launch. Oracle: `reference.paged_attention_reference`. Source of the running
softmax: Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_ROWS = 64


def tile_options(dtype: torch.dtype) -> dict[str, object]:
    """Slots a loop turn reads, and how it multiplies. float32 in three passes of tf32 needs more shared memory a slot."""
    if dtype == torch.float32:
        return {"TILE": 32, "PRECISION": "tf32x3", "num_stages": 1}
    return {"TILE": 64, "PRECISION": "tf32", "num_stages": 3}


def tiles(query_lens: Sequence[int], first_sequence: int, device: torch.device) -> torch.Tensor:
    """The programs of one launch: [num_tiles, 2] int32 of (sequence, first query of it).

    query_lens: of the sequences from `first_sequence` on.
    """
    listed = [(first_sequence + index, at) for index, count in enumerate(query_lens) for at in range(0, count, _ROWS)]
    return torch.tensor(listed, dtype=torch.int32).to(device)


def chunked_prefill(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    listed: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Fill the rows of `out` [N, num_heads, head_dim] that belong to the sequences in `listed` (see `tiles`).

    queries [N, num_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim]; block_tables [S, max_blocks];
    query_starts [S + 1]; context_lens [S], the chunk included.
    """
    _, num_heads, head_dim = queries.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride(3) == queries.stride(2) == out.stride(2) == 1
    _chunked_prefill[(listed.shape[0], num_heads)](
        queries,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lens,
        listed,
        out,
        head_dim**-0.5,
        queries.stride(0),
        queries.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        BLOCK_SIZE=block_size,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        ROWS=_ROWS,
        # The interpreter multiplies the bits of bfloat16, not its values; on a GPU the type stays.
        WIDEN=queries.device.type == "cpu",
        **tile_options(queries.dtype),
    )


@triton.jit
def _chunked_prefill(
    queries,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    context_lens,
    listed,
    out,
    scale,
    query_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    out_stride,
    out_head_stride,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(listed + tile * 2).to(tl.int64)
    begins = tl.load(listed + tile * 2 + 1)
    first_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_row
    context = tl.load(context_lens + sequence)

    query_at = begins + tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    is_query = (query_at < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    row = (first_row + query_at).to(tl.int64)
    query = tl.load(
        queries + row[:, None] * query_stride + head * query_head_stride + dim[None, :], mask=is_query, other=0.0
    )
    if WIDEN:
        query = query.to(tl.float32)
    position = context - num_queries + query_at  # of each query in its sequence

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    # Nothing after the last query's position is seen by any row of this tile.
    last = tl.minimum(context, context - num_queries + begins + ROWS)
    for begin in range(0, last, TILE):
        at = begin + tl.arange(0, TILE)
        is_there = at < last
        block = tl.load(block_tables + sequence * table_stride + at // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        slot = block * block_stride + (at % BLOCK_SIZE) * slot_stride + (head // GROUP) * head_stride
        is_read = is_there[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(key_cache + slot[:, None] + dim[None, :], mask=is_read, other=0.0)
        if WIDEN:
            key = key.to(tl.float32)
        # [ROWS, TILE], in powers of two: 1.4427 is 1 / ln 2.
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * 1.4426950408889634)
        score = tl.where(is_there[None, :] & (at[None, :] <= position[:, None]), score, float("-inf"))
        better = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp2(score - better[:, None])
        kept = tl.exp2(best - better)
        value = tl.load(value_cache + slot[:, None] + dim[None, :], mask=is_read, other=0.0)
        if WIDEN:
            value = value.to(tl.float32)
        found = found * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        total = total * kept + tl.sum(weight, axis=1)
        best = better

    answer = found / total[:, None]
    tl.store(
        out + row[:, None] * out_stride + head * out_head_stride + dim[None, :],
        answer.to(out.dtype.element_ty),
        mask=is_query,
    )
