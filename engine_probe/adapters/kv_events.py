"""KV-cache events as vLLM and SGLang publish them (msgpack over ZMQ) -> `block` rows under our own chain hash.

Both wire forms are read (positional arrays up to vLLM 0.23 and SGLang 0.5.19, tagged maps after) and give the same
rows. Token ids never leave this module: they are turned at once into the salted chain hash of `chain_hash.py`, and
the engine's hashes are kept only to recognise a block again. What the rows mean:

- `BlockStored`: one row a hash. `stored` where it became resident in the device tier, `offloaded` in any other tier.
  When an event without parent lists only blocks that are all resident, it reports reuse (vLLM's
  `kv_cache_report_mode: full`) and its rows are `hit`; a resident block inside any other event is a second physical
  copy and is `stored` again.
- `BlockRemoved`: one `evicted` row a hash, with `age_s` since it was stored in that tier. `reason` and `idle_s` are
  null: the engine tells neither. `AllBlocksCleared`: one `cleared` row, and a `cache_reset` mark.
- A LoRA name or other extra keys of a block enter its chain: the parent's 8 bytes are replaced by BLAKE2b(8 bytes,
  salt) over parent + "extra" + msgpack(keys). Without extra keys the function is exactly that of `chain_hash.py`.
- A block whose parent was never seen has no knowable chain: its hash is BLAKE2b(8 bytes, salt) over "engine" + the
  engine's hash, and so are its descendants'; they are counted. Same engine hash, same row hash, also after a restart.
- Groups other than the main one (hybrid models repeat a span once a group) say nothing about prefix reuse: counted
  only.

Invariant: a message is applied whole or refused whole (UnknownFormat). Source: reference 4.10, 5.7; vLLM 0.32
`v1/core/block_pool.py`, `distributed/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engine_probe.adapters.vllm import worker_name
from engine_probe.errors import UnknownFormat

if TYPE_CHECKING:
    import pyarrow as pa

_U64 = (1 << 64) - 1
_DAY_NS = 86_400_000_000_000
MAX_BLOCKS: Final = 1_000_000
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
_PREFIX_KINDS: Final = frozenset(("full_attention", "mla_attention", "sink_full_attention", "unknown"))
_BLOCK_COLUMNS: Final = (
    "worker",
    "at_ns",
    "change",
    "block_hash",
    "parent_hash",
    "num_tokens",
    "tier",
    "reason",
    "age_s",
    "reuse_count",
)


@dataclass(slots=True)
class Counts:
    """What a decoder has seen; nothing is left out silently."""

    messages: int = 0
    duplicates: int = 0
    restarts: int = 0
    stored: int = 0
    hits: int = 0
    removed: int = 0
    cleared: int = 0
    lost_messages: int = 0
    unknown_events: int = 0
    other_group_blocks: int = 0
    unknown_parents: int = 0
    unknown_removed: int = 0
    unaligned_blocks: int = 0
    forgotten_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Fed:
    """What one message did: block rows added, messages (first, last) missing before it, restart of the publisher."""

    num_rows: int
    gap: tuple[int, int] | None = None
    restarted: bool = False
    duplicate: bool = False


@dataclass(slots=True)
class _Block:
    """A resident block: its chain hash, and when and how often it was stored in each tier."""

    chain: int
    parent: int | None
    is_rooted: bool
    num_tokens: int
    copies: dict[str | None, list[int]] = field(default_factory=dict)  # tier -> [physical copies, stored_ns]
    reuse_count: int = 0


@dataclass(slots=True)
class _Stream:
    """One publisher: one data-parallel rank of one instance."""

    worker: str
    last_seq: int = -1
    last_ts: float = 0.0
    resident: dict[int, _Block] = field(default_factory=dict)
    gone: dict[int, tuple[int, bool]] = field(default_factory=dict)
    group_kinds: dict[int, str] = field(default_factory=dict)
    main_group: int | None = None
    reports_reuse: bool = False


class KvEventDecoder:
    """Decodes the messages of any number of publishers; rows pile up until `drain`.

    salt        the deployment's secret for the chain hash (at most 64 bytes)
    max_blocks  blocks remembered a publisher; beyond it the oldest are forgotten and counted
    """

    def __init__(self, salt: bytes, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._salt = salt
        self._max_blocks = max_blocks
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._rows: list[tuple[Any, ...]] = []  # parallel to _BLOCK_COLUMNS
        self._marks: list[dict[str, Any]] = []
        self.counts = Counts()

    def gap_before(self, worker: str, seq: int, rank: int = 0) -> tuple[int, int] | None:
        """Messages (first, last) missing before `seq`, so that they can be replayed before it is fed; None: none."""
        stream = self._streams.get((worker, rank))
        first = 0 if stream is None else stream.last_seq + 1
        return (first, seq - 1) if seq > first else None

    def feed(self, worker: str, seq: int, payload: bytes, received_ns: int) -> Fed:
        """Apply one message. Raises UnknownFormat, with nothing applied, where the payload is not a KV-event batch.

        A seq that falls, with a later batch time, is a restarted publisher; with an old batch time it is a duplicate.
        Messages still missing become a `gap` mark.
        """
        ts, rank, events = _batch(payload)
        key = (worker, rank)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(worker_name(worker, rank))
        at_ns = _instant(ts, received_ns)
        restarted = seq <= stream.last_seq
        if restarted and ts <= stream.last_ts:
            self.counts.duplicates += 1
            return Fed(0, duplicate=True)
        if restarted:
            self._restart(stream, seq, at_ns)
        gap = (stream.last_seq + 1, seq - 1) if seq > stream.last_seq + 1 else None
        if gap is not None:
            self._gap(stream, gap, at_ns)
        stream.last_seq, stream.last_ts = seq, ts
        self.counts.messages += 1
        before = len(self._rows)
        for name, event in events:
            if name == "BlockStored":
                self._stored(stream, event, at_ns)
            elif name == "BlockRemoved":
                self._removed(stream, event, at_ns)
            elif name == "AllBlocksCleared":
                self._cleared(stream, at_ns, is_first=seq == 0)
            else:
                self.counts.unknown_events += 1
        return Fed(len(self._rows) - before, gap, restarted)

    def restart(self, worker: str, rank: int, at_ns: int) -> None:
        """Somebody knows that this publisher is a new process: forget its blocks, its sequence begins at 0.

        Needed where the new process' sequence has already passed the former one's, so that it does not fall.
        """
        stream = self._streams.get((worker, rank))
        if stream is not None and stream.last_seq >= 0:
            self._restart(stream, 0, at_ns)

    def drain(self) -> dict[str, pa.Table]:
        """Rows since the last call, kind -> table of the full schema; kinds without rows are absent."""
        import pyarrow as pa

        from engine_probe.schema import arrow_schema, conform, table_from_rows

        tables = {}
        if self._rows:
            schema = arrow_schema("block")
            columns = zip(_BLOCK_COLUMNS, zip(*self._rows, strict=True), strict=True)
            arrays = [pa.array(values, schema.field(name).type) for name, values in columns]
            tables["block"] = conform("block", pa.table(arrays, names=list(_BLOCK_COLUMNS)))
            self._rows = []
        if self._marks:
            tables["mark"] = table_from_rows("mark", self._marks)
            self._marks = []
        return tables

    # --- events

    def _stored(self, stream: _Stream, event: dict[str, Any], at_ns: int) -> None:
        hashes = [_hash(value) for value in event["block_hashes"]]
        if not self._is_main(stream, event.get("group_idx"), event.get("kv_cache_spec_kind")):
            self.counts.other_group_blocks += len(hashes)
            return
        tier = _tier(event.get("medium"), event.get("locality"))
        size = event["block_size"]
        raw = _token_bytes(event["token_ids"], len(hashes), size)
        if raw is None:
            self.counts.unaligned_blocks += len(hashes)
        parent_hash = event.get("parent_block_hash")
        parent, is_rooted = self._parent(stream, parent_hash)
        resident = stream.resident
        # An event without parent that lists nothing new: nothing was stored, a prefix was found.
        is_reuse = bool(hashes) and parent_hash is None
        is_reuse = is_reuse and all(h in resident and tier in resident[h].copies for h in hashes)
        change = "hit" if is_reuse else "stored" if tier in ("device", None) else "offloaded"
        for index, engine_hash in enumerate(hashes):
            block = resident.get(engine_hash)
            if block is None:
                known = stream.gone.pop(engine_hash, None)
                if known is not None and known[1]:
                    chain, rooted = known
                elif is_rooted and raw is not None:
                    seed = self._fold(parent or 0, _extra(event, index))
                    chain, rooted = self._digest(seed, raw[index * size * 4 : (index + 1) * size * 4]), True
                else:
                    chain, rooted = self._fallback(engine_hash), False
                num_tokens = size if raw is None else min(size, len(raw) // 4 - index * size)
                block = resident[engine_hash] = _Block(chain, parent, rooted, num_tokens)
            if is_reuse:
                block.reuse_count += 1
            else:
                copies = block.copies.setdefault(tier, [0, at_ns])
                copies[0] += 1
                copies[1] = at_ns
            self._row(stream, at_ns, change, block, tier, block.reuse_count if is_reuse else None, None)
            parent, is_rooted = block.chain, block.is_rooted
        stream.reports_reuse = stream.reports_reuse or is_reuse
        if is_reuse:
            self.counts.hits += len(hashes)
        else:
            self.counts.stored += len(hashes)
        while len(resident) > self._max_blocks:
            resident.pop(next(iter(resident)))
            self.counts.forgotten_blocks += 1

    def _removed(self, stream: _Stream, event: dict[str, Any], at_ns: int) -> None:
        hashes = [_hash(value) for value in event["block_hashes"]]
        if not self._is_main(stream, event.get("group_idx"), None):
            self.counts.other_group_blocks += len(hashes)
            return
        tier = _tier(event.get("medium"), event.get("locality"))
        for engine_hash in hashes:
            block = stream.resident.get(engine_hash)
            copies = None if block is None else block.copies.get(tier)
            if block is None:
                self.counts.unknown_removed += 1
                known = stream.gone.get(engine_hash)
                chain = self._fallback(engine_hash) if known is None else known[0]
                block = _Block(chain, None, False, 0)
            reuse = block.reuse_count if stream.reports_reuse and copies is not None else None
            age_s = None if copies is None or at_ns < copies[1] else (at_ns - copies[1]) / 1e9
            self._row(stream, at_ns, "evicted", block, tier, reuse, age_s)
            if copies is not None:
                copies[0] -= 1
                if copies[0] == 0:
                    del block.copies[tier]
                if not block.copies:
                    del stream.resident[engine_hash]
                    stream.gone[engine_hash] = (block.chain, block.is_rooted)
        self.counts.removed += len(hashes)
        while len(stream.gone) > self._max_blocks:
            stream.gone.pop(next(iter(stream.gone)))

    def _cleared(self, stream: _Stream, at_ns: int, is_first: bool) -> None:
        self._row(stream, at_ns, "cleared", None, None, None, None, "reset")
        if not is_first:  # SGLang opens its stream with a clear: nothing was reset
            self._mark(
                "cache_reset", stream, at_ns, "The prefix cache was reset.", {"blocks": str(len(stream.resident))}
            )
        stream.resident.clear()
        self.counts.cleared += 1

    def _restart(self, stream: _Stream, seq: int, at_ns: int) -> None:
        self._row(stream, at_ns, "cleared", None, None, None, None, "restart")
        attrs = {"last_seq": str(stream.last_seq), "seq": str(seq), "blocks": str(len(stream.resident))}
        self._mark("worker_up", stream, at_ns, "The engine restarted: its KV events count from 0 again.", attrs)
        stream.resident.clear()
        stream.gone.clear()
        stream.group_kinds.clear()
        stream.main_group, stream.last_seq, stream.reports_reuse = None, -1, False
        self.counts.restarts += 1

    def _gap(self, stream: _Stream, gap: tuple[int, int], at_ns: int) -> None:
        first, last = gap
        attrs = {
            "source": "kv_events",
            "first_seq": str(first),
            "last_seq": str(last),
            "messages": str(last - first + 1),
        }
        text = f"KV events {first} to {last} were not seen."
        self._mark("gap", stream, at_ns, text, attrs)
        self.counts.lost_messages += last - first + 1

    # --- helpers

    def _row(
        self,
        stream: _Stream,
        at_ns: int,
        change: str,
        block: _Block | None,
        tier: str | None,
        reuse_count: int | None,
        age_s: float | None,
        reason: str | None = None,
    ) -> None:
        told = (None, None, None) if block is None else (block.chain, block.parent, block.num_tokens or None)
        self._rows.append((stream.worker, at_ns, change, *told, tier, reason, age_s, reuse_count))

    def _mark(self, mark: str, stream: _Stream, at_ns: int, text: str, attrs: dict[str, str]) -> None:
        row = {
            "worker": stream.worker,
            "at_ns": at_ns,
            "mark": mark,
            "subject": stream.worker,
            "text": text,
            "attrs": attrs,
        }
        self._marks.append(row)

    def _is_main(self, stream: _Stream, group: int | None, kind: str | None) -> bool:
        """Main group = the first one seen whose kind caches whole prefixes; without kinds it is group 0."""
        if group is None:
            return kind is None or kind in _PREFIX_KINDS
        if kind is not None:
            stream.group_kinds[group] = kind
        kind = stream.group_kinds.get(group)
        if kind is None:
            return group == (stream.main_group or 0)
        if stream.main_group is None and kind in _PREFIX_KINDS:
            stream.main_group = group
        return group == stream.main_group

    def _parent(self, stream: _Stream, parent_hash: int | bytes | None) -> tuple[int | None, bool]:
        if parent_hash is None:
            return None, True
        engine_hash = _hash(parent_hash)
        block = stream.resident.get(engine_hash)
        if block is not None:
            return block.chain, block.is_rooted
        known = stream.gone.get(engine_hash)
        if known is not None:
            return known
        self.counts.unknown_parents += 1
        return self._fallback(engine_hash), False

    def _digest(self, parent: int, tokens: bytes) -> int:
        digest = blake2b(parent.to_bytes(8, "little"), digest_size=8, key=self._salt)
        digest.update(tokens)
        return int.from_bytes(digest.digest(), "little")

    def _fold(self, parent: int, keys: list[Any]) -> int:
        return self._digest(parent, b"extra" + msgspec.msgpack.encode(keys)) if keys else parent

    def _fallback(self, engine_hash: int) -> int:
        digest = blake2b(b"engine" + engine_hash.to_bytes(8, "little"), digest_size=8, key=self._salt)
        return int.from_bytes(digest.digest(), "little")


def _batch(payload: bytes) -> tuple[float, int, list[tuple[str, dict[str, Any]]]]:
    """(engine time in s, data-parallel rank, events as (type, fields)) of one message."""
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


def _event(event: Any) -> tuple[str, dict[str, Any]]:
    """One event of either wire form as (type, fields); extra positions and unknown keys are left to be ignored."""
    if isinstance(event, list) and event and isinstance(event[0], str):
        name = event[0]
        fields = dict(zip(_FIELDS.get(name, ()), event[1:], strict=False))
    elif isinstance(event, dict) and isinstance(event.get("type"), str):
        name, fields = event["type"], event
    else:
        raise UnknownFormat("A KV event is neither an array that begins with its type nor a map with the key 'type'.")
    if name in ("BlockStored", "BlockRemoved"):
        _check(name, fields)
    return name, fields


def _check(name: str, fields: dict[str, Any]) -> None:
    hashes = fields.get("block_hashes")
    is_sound = isinstance(hashes, list) and all(_is_hash(value) for value in hashes)
    for key in ("medium", "locality", "kv_cache_spec_kind", "lora_name"):
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


def _hash(value: int | bytes) -> int:
    """Engine hash as u64: integers by two's complement, bytes by their last 8, big-endian (vLLM's own integer form)."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & _U64


def _tier(medium: str | None, locality: str | None) -> str | None:
    if locality == "REMOTE":
        return "remote"
    return "device" if medium is None else _TIERS.get(medium.upper())


def _token_bytes(token_ids: Sequence[Any], num_blocks: int, size: int) -> bytes | None:
    """Token ids as little-endian int32, or None where they cannot be cut into the event's blocks.

    The last block may be partial. SGLang's EAGLE form (pairs) and absent token ids have no chain of ours.
    """
    import numpy as np

    if not (num_blocks - 1) * size < len(token_ids) <= num_blocks * size:
        return None
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError):
        return None
    if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < -(1 << 31) or ids.max() >= 1 << 31:
        return None
    return ids.astype("<i4").tobytes()


def _extra(event: dict[str, Any], index: int) -> list[Any]:
    """What beside tokens makes the block's identity: LoRA name first, then multimodal ids, cache salt, embeddings."""
    per_block = event.get("extra_keys")
    own = per_block[index] if per_block is not None and index < len(per_block) else None
    keys = list(own) if isinstance(own, list) else [] if own is None else [own]
    lora_name, lora_id = event.get("lora_name"), event.get("lora_id")
    if lora_name is not None and lora_name not in keys:
        keys.insert(0, lora_name)
    elif lora_name is None and lora_id is not None:
        keys.insert(0, f"lora_id:{lora_id}")
    return keys


def _instant(ts: float, received_ns: int) -> int:
    """The engine's own time where it is within a day of ours (it is the event's), else when we received it."""
    if abs(ts) < 9e9:
        seconds = int(ts)
        at_ns = seconds * 1_000_000_000 + round((ts - seconds) * 1e9)
        if abs(at_ns - received_ns) <= _DAY_NS:
            return at_ns
    return received_ns
