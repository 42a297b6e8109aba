"""KV events as vLLM 0.24 to 0.33 writes them: msgpack maps tagged by `type`, in a batch that is an array.

Fields, their order and what is left out when it is nil are vLLM 0.33's `distributed/kv_events.py`, so that its consumers
(routers, indexers, kvscope's own reader) take them as they are. Token ids are in them, as there: who may connect may read
prompts.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

DEVICE: Final = "GPU"
"""The word of the format for the tier in which the engine computes, whatever the device is."""
FULL_ATTENTION: Final = "full_attention"


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base: a map whose `type` is the class's name."""


class BlockStored(_Event):
    """Blocks of one chain became findable. token_ids: of all of them, one after another."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(_Event):
    """Blocks were given up."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event):
    """The cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """ts: Unix s."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None
