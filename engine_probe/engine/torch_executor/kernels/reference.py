"""What attention over paged KV is, written as its definition says: slow, in float32 or wider, one row at a time.

The oracle of `attention.py` and of every Triton kernel; never run by the engine.
"""

from __future__ import annotations

import torch


def paged_attention_reference(
    queries: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
) -> torch.Tensor:
    """Each row attends to the positions up to its own of its own sequence.

    queries                  [N, num_heads, head_dim]
    key_cache, value_cache   [num_blocks, block_size, num_kv_heads, head_dim]
    block_tables             [S, max_blocks]; query_starts [S + 1]; context_lens [S]
    Returns [N, num_heads, head_dim] in the type of `queries`. Head h reads KV head h // (num_heads / num_kv_heads).
    """
    out = torch.empty_like(queries)
    num_heads, head_dim = queries.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    for index in range(block_tables.shape[0]):
        first, last = int(query_starts[index]), int(query_starts[index + 1])
        context = int(context_lens[index])
        places = [(int(block_tables[index, at // block_size]), at % block_size) for at in range(context)]
        keys = torch.stack([key_cache[block, offset] for block, offset in places]).float()
        values = torch.stack([value_cache[block, offset] for block, offset in places]).float()
        for row in range(first, last):
            seen = context - (last - first) + (row - first) + 1
            for head in range(num_heads):
                shared = head * num_kv_heads // num_heads
                scores = keys[:seen, shared] @ queries[row, head].float() * head_dim**-0.5
                out[row, head] = (torch.softmax(scores, dim=0) @ values[:seen, shared]).to(out.dtype)
    return out


def write_kv_reference(
    keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Put keys and values [N, num_kv_heads, head_dim] into slot = block * block_size + offset, one by one."""
    block_size = key_cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        key_cache[slot // block_size, slot % block_size] = keys[row]
        value_cache[slot // block_size, slot % block_size] = values[row]
