"""Bytes of KV cache that requests take: exact, rounded up to blocks, and how many of them fit.

Source of the formulas: `models.kv_geometry` for the layers; vLLM 0.33 (`v1/core/kv_cache_utils.py`) for blocks. A block holds
`block_size` tokens of one *group* of layers. A model whose layers are all alike is one group, so a request takes
ceil(tokens / block_size) blocks. Where kinds are mixed, groups are made of equally many layers, all draw from one pool,
and a request takes the sum over the groups; a window layer takes one block more than its window fills, since a window
rarely begins at a block's edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine_probe.errors import UsageError
from engine_probe.models.kv_geometry import FULL, LINEAR, KvGeometry, LayerGroup

GIB = 1 << 30
"""Bytes."""


@dataclass(frozen=True, slots=True)
class KvSize:
    """KV cache of `requests` requests of `tokens` tokens each, over the whole model, and on one tensor-parallel rank.

    bytes_per_token         of the layers that keep every token; where none does, of the window layers while they grow
    window_bytes_per_token  of the window and chunk layers, for each token up to their window
    constant_bytes          of one request: window layers once their window is full, and recurrent states
    request_bytes           exact bytes of one request; total_bytes of all requests
    blocks                  of one request on the engine's own pool, every group counted
    allocated_bytes         of one request: blocks * block_bytes; waste_bytes is what rounding and padding add to it
    block_bytes             of one block over the layers of a group
    rank_*                  the same on one rank (heads divided by tp, at least one a rank; MLA is held by each rank)
    """

    tokens: int
    requests: int
    block_size: int
    tp: int
    bytes_per_token: int
    window_bytes_per_token: int
    constant_bytes: int
    request_bytes: int
    total_bytes: int
    blocks: int
    block_bytes: int
    allocated_bytes: int
    waste_bytes: int
    waste_tokens: int
    rank_bytes_per_token: int
    rank_request_bytes: int
    rank_block_bytes: int
    rank_allocated_bytes: int
    attention_scores_bytes: int | None


@dataclass(frozen=True, slots=True)
class Fit:
    """How many such requests fit: `requests` whole ones; `concurrency` is the same as a fraction (vLLM logs that)."""

    num_blocks: int
    requests: int
    concurrency: float


def kv_size(model: KvGeometry, tokens: int, *, requests: int = 1, block_size: int = 16, tp: int = 1) -> KvSize:
    """Size of `requests` requests of `tokens` tokens. Raises UsageError on numbers below 1 or undividable heads."""
    for name, value in (("--tokens", tokens), ("--requests", requests), ("--block-size", block_size), ("--tp", tp)):
        if value < 1:
            raise UsageError(f"{name} is {value}; expected a whole number above 0")
    full = sum(g.num_layers * g.token_bytes for g in model.groups if g.kind == FULL)
    windows = [g for g in model.groups if g.window is not None]
    growing_window = sum(g.num_layers * g.token_bytes for g in windows)
    states = sum(g.num_layers * g.state_bytes for g in model.groups)
    ranked = [_on_rank(g, tp) for g in model.groups]
    blocks, layers_of_block = _blocks(model.groups, tokens, block_size)
    block_bytes = layers_of_block * max(g.token_bytes for g in model.groups) * block_size
    rank_block_bytes = layers_of_block * max(g.token_bytes for g in ranked) * block_size
    request_bytes = _request_bytes(model.groups, tokens)
    waste_tokens = -tokens % block_size
    return KvSize(
        tokens=tokens,
        requests=requests,
        block_size=block_size,
        tp=tp,
        bytes_per_token=full or growing_window,
        window_bytes_per_token=growing_window,
        constant_bytes=sum(g.num_layers * g.token_bytes * (g.window or 0) for g in windows) + states,
        request_bytes=request_bytes,
        total_bytes=request_bytes * requests,
        blocks=blocks,
        block_bytes=block_bytes,
        allocated_bytes=blocks * block_bytes + states,
        waste_bytes=blocks * block_bytes + states - request_bytes,
        waste_tokens=waste_tokens,
        rank_bytes_per_token=sum(g.num_layers * g.token_bytes for g in ranked if (g.kind == FULL) == bool(full)),
        rank_request_bytes=_request_bytes(ranked, tokens),
        rank_block_bytes=rank_block_bytes,
        rank_allocated_bytes=blocks * rank_block_bytes + sum(g.num_layers * g.state_bytes for g in ranked),
        attention_scores_bytes=None if model.num_heads is None else requests * model.num_heads * tokens * tokens * 2,
    )


def fit_blocks(size: KvSize, num_blocks: int) -> Fit:
    """Requests of this size in a pool of `num_blocks` usable blocks."""
    if num_blocks < 1:
        raise UsageError(f"--num-blocks is {num_blocks}; expected a whole number above 0")
    return Fit(num_blocks, num_blocks // size.blocks, num_blocks / size.blocks)


def fit_memory(size: KvSize, memory_bytes: float) -> Fit:
    """Requests of this size in `memory_bytes` of one rank: what is left for KV after weights and activations."""
    if not 0 < memory_bytes < float("inf"):
        raise UsageError(f"--memory-gib is {memory_bytes / GIB:g}; expected a number above 0")
    num_blocks = int(memory_bytes // size.rank_block_bytes) if size.rank_block_bytes else 0
    has_states = size.rank_allocated_bytes != size.blocks * size.rank_block_bytes
    if has_states or not num_blocks:
        # Recurrent states share the memory with the blocks, so the whole of a request is what divides it.
        concurrency = memory_bytes / size.rank_allocated_bytes
        return Fit(num_blocks, int(concurrency), concurrency)
    return fit_blocks(size, num_blocks)


def _request_bytes(groups: Sequence[LayerGroup], tokens: int) -> int:
    total = 0
    for group in groups:
        kept = tokens if group.window is None else min(tokens, group.window)
        total += group.num_layers * (group.token_bytes * kept + group.state_bytes)
    return total


def _on_rank(group: LayerGroup, tp: int) -> LayerGroup:
    if group.kv_heads is None or tp == 1:
        return group
    if group.kv_heads % tp and tp % group.kv_heads:
        raise UsageError(f"--tp {tp} and {group.kv_heads} KV heads do not divide one another; engines refuse that")
    share = max(group.kv_heads // tp, 1)
    return replace(
        group,
        token_bytes=group.token_bytes // group.kv_heads * share,
        state_bytes=group.state_bytes // group.kv_heads * share,
        kv_heads=share,
    )


def _blocks(groups: tuple[LayerGroup, ...], tokens: int, block_size: int) -> tuple[int, int]:
    """Blocks of one request, and the number of layers whose tokens one block holds."""
    attending = [g for g in groups if g.kind != LINEAR]
    if not attending:
        return 0, 0
    fewest, most = min(g.num_layers for g in attending), max(g.num_layers for g in attending)
    # vLLM: groups as small as the rarest kind, unless the kinds are about equally many; the last group is padded.
    layers = most if most < 1.25 * fewest else fewest
    return sum(-(-g.num_layers // layers) * _layer_blocks(g, tokens, block_size) for g in attending), layers


def _layer_blocks(group: LayerGroup, tokens: int, block_size: int) -> int:
    whole = -(-tokens // block_size)
    return whole if group.window is None else min(whole, -(-group.window // block_size) + 1)
