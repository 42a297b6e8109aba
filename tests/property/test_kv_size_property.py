"""What must hold of the size of any model and any request."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diagnosis.capacity.kv_size import fit_blocks, fit_memory, kv_size
from engine_probe.models.catalogue import MODELS
from engine_probe.models.kv_geometry import geometry


@st.composite
def _configs(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        return MODELS[draw(st.sampled_from(sorted(MODELS)))]
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    config = {
        "num_hidden_layers": draw(st.integers(1, 80)),
        "num_attention_heads": heads * draw(st.integers(1, 8)),
        "num_key_value_heads": heads,
        "head_dim": draw(st.sampled_from([64, 80, 128, 256])),
        "torch_dtype": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
    }
    if draw(st.booleans()):
        config |= {"sliding_window": draw(st.integers(1, 5000)), "sliding_window_pattern": draw(st.integers(1, 7))}
    return config


@given(_configs(), st.integers(1, 200_000), st.sampled_from([1, 16, 32, 64]))
@settings(deadline=None)
def test_blocks_hold_the_request_and_waste_is_what_is_left(
    config: dict[str, Any], tokens: int, block_size: int
) -> None:
    """Allocated bytes are exact bytes plus waste, and the waste is never negative."""
    size = kv_size(geometry(config), tokens, block_size=block_size)
    assert size.allocated_bytes == size.request_bytes + size.waste_bytes
    assert size.waste_bytes >= 0
    assert 0 <= size.waste_tokens < block_size


@given(_configs(), st.integers(1, 100_000))
@settings(deadline=None)
def test_one_more_token_costs_at_most_what_all_layers_take(config: dict[str, Any], tokens: int) -> None:
    """Growth lies between the layers that keep everything and all layers together."""
    model = geometry(config)
    growth = kv_size(model, tokens + 1).request_bytes - kv_size(model, tokens).request_bytes
    always = sum(g.num_layers * g.token_bytes for g in model.groups if g.kind == "full")
    assert always <= growth <= sum(g.num_layers * g.token_bytes for g in model.groups)


@given(_configs(), st.integers(1, 50_000), st.integers(1, 100_000))
@settings(deadline=None)
def test_requests_that_fit_really_fit(config: dict[str, Any], tokens: int, num_blocks: int) -> None:
    """That many requests need no more blocks than there are, and one more would."""
    size = kv_size(geometry(config), tokens)
    fit = fit_blocks(size, num_blocks)
    assert fit.requests * size.blocks <= num_blocks < (fit.requests + 1) * size.blocks
    memory = float(num_blocks * size.rank_block_bytes)
    assert fit_memory(size, memory).requests * size.rank_allocated_bytes <= memory


@given(_configs(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 10_000))
@settings(deadline=None)
def test_ranks_together_hold_at_least_the_whole(config: dict[str, Any], tp: int, tokens: int) -> None:
    """Tensor parallelism divides or replicates and never loses bytes: tp ranks hold the whole, or more."""
    model = geometry(config)
    heads = [group.kv_heads for group in model.groups if group.kv_heads is not None]
    assume(all(num % tp == 0 or tp % num == 0 for num in heads))
    size = kv_size(model, tokens, tp=tp)
    assert size.rank_request_bytes * tp >= size.request_bytes
    assert size.rank_request_bytes <= size.request_bytes
