"""One message of KV-cache events as vLLM and SGLang publish them (msgpack over ZMQ), read and checked; nothing is kept.

Both wire forms give the same fields: positional arrays up to vLLM 0.23 and SGLang 0.5.19, tagged maps after. Extra
positions and unknown keys are ignored. Invariant: a message is read whole or refused whole (UnknownFormat). Source:
reference 4.10, 5.7; vLLM 0.32 `distributed/kv_events.py`; SGLang 0.5.18 to 0.5.23 `disaggregation/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from engine_probe.errors import UnknownFormat

Event = tuple[str, dict[str, Any]]
"""(type, fields) of one event"""

_U64 = (1 << 64) - 1
_DAY_NS = 86_400_000_000_000
MAX_RANKS: Final = 65_536

STORED_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
)
REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_FIELDS: Final = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS, "AllBlocksCleared": ()}

_TIERS: Final = {
    "GPU": "device",
    "CPU": "host",
    "CPU_PINNED": "host",
    "CPU_TIER1": "host",
    "FS": "disk",
    "DISK": "disk",
    "STORAGE": "disk",
    "OBJ": "remote",
    "EXTERNAL": "remote",
    "REMOTE": "remote",
}


def read_batch(payload: bytes) -> tuple[float, int, list[Event]]:
    """(engine time in s, data-parallel rank, events as (type, fields)) of one message. Raises UnknownFormat."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise UnknownFormat(f"The KV-event message ({len(payload)} bytes) is not msgpack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise UnknownFormat("The KV-event message is not a batch [time, events, data_parallel_rank].")
    ts = batch[0]
    rank = batch[2] if len(batch) > 2 else None
    if (
        not isinstance(ts, int | float)
        or isinstance(ts, bool)
        or not (rank is None or (_is_count(rank) and rank < MAX_RANKS))
    ):
        raise UnknownFormat("The KV-event batch has a time or a data_parallel_rank that is no number.")
    return float(ts), rank or 0, [_event(event) for event in batch[1]]


def _event(event: Any) -> Event:
    """One event of either wire form as (type, fields); extra positions and unknown keys are left to be ignored.

    A type that is not known here comes as "unknown", without fields.
    """
    if isinstance(event, list) and event and isinstance(event[0], str):
        name = event[0]
        fields = dict(zip(_FIELDS.get(name, ()), event[1:], strict=False))
        if isinstance(salted := fields.get("lora_name"), dict):  # SGLang 0.5.18 and 0.5.19 append {cache_salt} there
            fields = {**fields, "lora_name": None, "cache_salt": salted.get("cache_salt")}
    elif isinstance(event, dict) and isinstance(event.get("type"), str):
        name, fields = event["type"], event
    else:
        raise UnknownFormat("A KV event is neither an array that begins with its type nor a map with the key 'type'.")
    if name in ("BlockStored", "BlockRemoved"):
        _check(name, fields)
    return (name, fields) if name in _FIELDS else ("unknown", {})


def _check(name: str, fields: dict[str, Any]) -> None:
    hashes = fields.get("block_hashes")
    is_sound = isinstance(hashes, list) and all(_is_hash(value) for value in hashes)
    for key in ("medium", "locality", "kv_cache_spec_kind", "lora_name", "cache_salt"):
        is_sound = is_sound and isinstance(fields.get(key), str | None)
    group = fields.get("group_idx")
    is_sound = is_sound and (group is None or _is_count(group))
    if name == "BlockStored":
        parent, size = fields.get("parent_block_hash"), fields.get("block_size")
        is_sound = is_sound and (parent is None or _is_hash(parent)) and isinstance(fields.get("token_ids"), list)
        is_sound = (
            is_sound and type(size) is int and 0 < size < 1 << 31 and isinstance(fields.get("extra_keys"), list | None)
        )
    if not is_sound:
        raise UnknownFormat(
            f"A {name} event lacks a field or has one of another type; is this a KV-event stream?", event=name
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _U64


def _is_hash(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, bytes) and len(value) > 0)


def engine_hash(value: int | bytes) -> int:
    """Engine hash as u64: integers by two's complement, bytes by their last 8, big-endian (vLLM's own integer form)."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & _U64


def tier_of(medium: str | None, locality: str | None) -> str | None:
    """Tier of the contract; no medium told is the device, an unknown one is unknown."""
    if locality == "REMOTE":
        return "remote"
    return "device" if medium is None else _TIERS.get(medium.upper())


def token_bytes(token_ids: Sequence[Any], num_blocks: int, size: int) -> bytes | None:
    """Token ids as little-endian int32, or None where they cannot be cut into the event's blocks.

    The last block may be partial. SGLang with EAGLE tells each token with the one after it: the first of a pair is the
    block's own. Absent token ids have no chain of ours.
    """
    import numpy as np

    if not (num_blocks - 1) * size < len(token_ids) <= num_blocks * size:
        return None
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError):
        return None
    if ids.ndim == 2 and ids.shape[1] == 2:
        ids = ids[:, 0]
    if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < -(1 << 31) or ids.max() >= 1 << 31:
        return None
    return ids.astype("<i4").tobytes()


def extra_keys(event: dict[str, Any], index: int) -> list[Any]:
    """What beside tokens makes the block's identity: LoRA name first, then multimodal ids, cache salt, embeddings.

    A cache salt enters a chain at its first block, as vLLM does it; SGLang tells it with every event.
    """
    per_block = event.get("extra_keys")
    own = per_block[index] if per_block is not None and index < len(per_block) else None
    keys = list(own) if isinstance(own, list) else [] if own is None else [own]
    lora_name, lora_id = event.get("lora_name"), event.get("lora_id")
    if lora_name is not None and lora_name not in keys:
        keys.insert(0, lora_name)
    elif lora_name is None and lora_id is not None:
        keys.insert(0, f"lora_id:{lora_id}")
    salt = event.get("cache_salt")
    if salt is not None and index == 0 and event.get("parent_block_hash") is None and salt not in keys:
        keys.append(salt)
    return keys


def instant(ts: float, received_ns: int) -> int:
    """The engine's own time where it is within a day of ours (it is the event's), else when we received it."""
    if abs(ts) < 9e9:
        seconds = int(ts)
        at_ns = seconds * 1_000_000_000 + round((ts - seconds) * 1e9)
        if abs(at_ns - received_ns) <= _DAY_NS:
            return at_ns
    return received_ns
