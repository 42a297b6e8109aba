"""KV-cache events of vLLM and SGLang (msgpack, `kv_wire`) and of TensorRT-LLM -> `block` rows under our own chain hash.

Token ids never leave this module: they are turned at once into the salted chain hash of `chain_hash.py`, and the
engine's hashes are kept only to recognise a block again. What the rows mean:

- `BlockStored`: one row a hash. `stored` where it became resident in the device tier, `offloaded` in any other tier.
  When an event without parent lists only blocks that are all resident, it reports reuse (vLLM's
  `kv_cache_report_mode: full`) and its rows are `hit`; a resident block inside any other event is a second physical
  copy and is `stored` again.
- `BlockRemoved`: one `evicted` row a hash (and a tier, with `any_tier`), with `age_s` since it was stored there. `reason` and `idle_s` are
  null: the engine tells neither. `AllBlocksCleared`: one `cleared` row, and a `cache_reset` mark.
- `BlockMoved` (TensorRT-LLM): the block changes its tier. It is `evicted` from the device and `offloaded` to the other
  tier, or `loaded` onto the device.
- A LoRA name or other extra keys of a block enter its chain: the parent's 8 bytes are replaced by BLAKE2b(8 bytes,
  salt) over parent + "extra" + msgpack(keys). Without extra keys the function is exactly that of `chain_hash.py`.
- A block whose parent was never seen has no knowable chain: its hash is BLAKE2b(8 bytes, salt) over "engine" + the
  engine's hash, and so are its descendants'; they are counted. Same engine hash, same row hash, also after a restart.
- Groups other than the main one (hybrid models repeat a span once a group) say nothing about prefix reuse: counted
  only.

With page size 1 (SGLang) each token is a block: `sampling` keeps a share of the blocks, each for its whole life, and
the rate stands in the rows. Marks and `cleared` rows are always kept.

Invariant: a message is applied whole or refused whole (UnknownFormat). Source: reference 4.10, 5.7, 7; vLLM 0.32
`v1/core/block_pool.py`; SGLang 0.5.23 `mem_cache/events.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engine_probe.adapters.kv_wire import Event, engine_hash, extra_keys, instant, read_batch, tier_of, token_bytes
from engine_probe.adapters.vllm import worker_name
from engine_probe.sampling import Sampling

if TYPE_CHECKING:
    import pyarrow as pa

MAX_BLOCKS: Final = 1_000_000
PREFIX_KINDS: Final = frozenset(("full_attention", "mla_attention", "sink_full_attention", "unknown"))
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
    moved: int = 0
    sampled_out: int = 0


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
    sampling    which blocks' rows are kept
    """

    def __init__(self, salt: bytes, *, max_blocks: int = MAX_BLOCKS, sampling: Sampling | None = None) -> None:
        self._salt = salt
        self._max_blocks = max_blocks
        self._sampling = sampling or Sampling()
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
        ts, rank, events = read_batch(payload)
        return self.apply(worker, rank, seq, events, instant(ts, received_ns), ts=ts)

    def apply(
        self, worker: str, rank: int, seq: int, events: Sequence[Event], at_ns: int, *, ts: float | None = None
    ) -> Fed:
        """Apply the events of message `seq`, checked as `kv_wire` checks them.

        ts   the engine's time (s), by which a duplicate is told from a restart; None: a seq that falls is a restart
        """
        key = (worker, rank)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(worker_name(worker, rank))
        restarted = seq <= stream.last_seq
        if restarted and ts is not None and ts <= stream.last_ts:
            self.counts.duplicates += 1
            return Fed(0, duplicate=True)
        if restarted:
            self._restart(stream, seq, at_ns)
        gap = (stream.last_seq + 1, seq - 1) if seq > stream.last_seq + 1 else None
        if gap is not None:
            self._gap(stream, gap, at_ns)
        stream.last_seq, stream.last_ts = seq, ts or 0.0
        self.counts.messages += 1
        before = len(self._rows)
        for name, event in events:
            if name == "BlockStored":
                self._stored(stream, event, at_ns)
            elif name == "BlockRemoved":
                self._removed(stream, event, at_ns)
            elif name == "BlockMoved":
                self._moved(stream, event, at_ns)
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
            table = self._sampled(pa.table(arrays, names=list(_BLOCK_COLUMNS)))
            if table.num_rows:
                tables["block"] = conform("block", table)
            self._rows = []
        if self._marks:
            tables["mark"] = table_from_rows("mark", self._marks)
            self._marks = []
        return tables

    def _sampled(self, table: pa.Table) -> pa.Table:
        """The rows of the blocks that are kept, with the rate."""
        import numpy as np
        import pyarrow as pa

        rate = self._sampling.sample_rate
        if rate is None:
            return table
        hashes = table.column("block_hash").combine_chunks()
        kept = self._sampling.keeps_blocks(np.asarray(hashes.fill_null(0)).astype(np.uint64))
        is_whole = np.asarray(hashes.is_null())
        rates = pa.array(np.full(table.num_rows, rate), mask=is_whole)
        self.counts.sampled_out += int((~(kept | is_whole)).sum())
        return table.append_column("sample_rate", rates).filter(pa.array(kept | is_whole))

    # --- events

    def _stored(self, stream: _Stream, event: dict[str, Any], at_ns: int) -> None:
        hashes = [engine_hash(value) for value in event["block_hashes"]]
        if not self._is_main(stream, event.get("group_idx"), event.get("kv_cache_spec_kind")):
            self.counts.other_group_blocks += len(hashes)
            return
        tier = tier_of(event.get("medium"), event.get("locality"))
        size = event["block_size"]
        raw = token_bytes(event["token_ids"], len(hashes), size)
        if raw is None:
            self.counts.unaligned_blocks += len(hashes)
        parent_hash = event.get("parent_block_hash")
        parent, is_rooted = self._parent(stream, parent_hash)
        resident = stream.resident
        # An event without parent that lists nothing new: nothing was stored, a prefix was found.
        is_reuse = bool(hashes) and parent_hash is None
        is_reuse = is_reuse and all(h in resident and tier in resident[h].copies for h in hashes)
        change = "hit" if is_reuse else "stored" if tier in ("device", None) else "offloaded"
        for index, own in enumerate(hashes):
            block = resident.get(own)
            if block is None:
                known = stream.gone.pop(own, None)
                if known is not None and known[1]:
                    chain, rooted = known
                elif is_rooted and raw is not None:
                    seed = self._fold(parent or 0, extra_keys(event, index))
                    chain, rooted = self._digest(seed, raw[index * size * 4 : (index + 1) * size * 4]), True
                else:
                    chain, rooted = self._fallback(own), False
                num_tokens = size if raw is None else min(size, len(raw) // 4 - index * size)
                block = resident[own] = _Block(chain, parent, rooted, num_tokens)
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
        hashes = [engine_hash(value) for value in event["block_hashes"]]
        if not self._is_main(stream, event.get("group_idx"), None):
            self.counts.other_group_blocks += len(hashes)
            return
        tier = tier_of(event.get("medium"), event.get("locality"))
        for own in hashes:
            block = stream.resident.get(own)
            if block is None:
                self.counts.unknown_removed += 1
                known = stream.gone.get(own)
                chain = self._fallback(own) if known is None else known[0]
                block = _Block(chain, None, False, 0)
            for place in tuple(block.copies) or (tier,) if event.get("any_tier") else (tier,):
                self._copy_gone(stream, own, block, place, at_ns)
        self.counts.removed += len(hashes)
        while len(stream.gone) > self._max_blocks:
            stream.gone.pop(next(iter(stream.gone)))

    def _copy_gone(self, stream: _Stream, own: int, block: _Block, tier: str | None, at_ns: int) -> None:
        copies = block.copies.get(tier)
        reuse = block.reuse_count if stream.reports_reuse and copies is not None else None
        age_s = None if copies is None or at_ns < copies[1] else (at_ns - copies[1]) / 1e9
        self._row(stream, at_ns, "evicted", block, tier, reuse, age_s)
        if copies is not None:
            copies[0] -= 1
            if copies[0] == 0:
                del block.copies[tier]
            if not block.copies:
                stream.resident.pop(own, None)
                stream.gone[own] = (block.chain, block.is_rooted)

    def _moved(self, stream: _Stream, event: dict[str, Any], at_ns: int) -> None:
        """Blocks change their tier: `tiers` (old, new) of the contract."""
        hashes = [engine_hash(value) for value in event["block_hashes"]]
        if not self._is_main(stream, event.get("group_idx"), None):
            self.counts.other_group_blocks += len(hashes)
            return
        old, new = event["tiers"]
        for own in hashes:
            block = stream.resident.get(own)
            if block is None:  # stored before kvscope came
                block = stream.resident[own] = _Block(self._fallback(own), None, False, 0)
            copies = block.copies.pop(old, None)
            age_s = None if copies is None or at_ns < copies[1] else (at_ns - copies[1]) / 1e9
            if old == "device":
                self._row(stream, at_ns, "evicted", block, old, None, age_s, "offloaded")
            self._row(stream, at_ns, "loaded" if new == "device" else "offloaded", block, new, None, None)
            block.copies[new] = [1, at_ns]
        self.counts.moved += len(hashes)

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
            return kind is None or kind in PREFIX_KINDS
        if kind is not None:
            stream.group_kinds[group] = kind
        kind = stream.group_kinds.get(group)
        if kind is None:
            return group == (stream.main_group or 0)
        if stream.main_group is None and kind in PREFIX_KINDS:
            stream.main_group = group
        return group == stream.main_group

    def _parent(self, stream: _Stream, parent_hash: int | bytes | None) -> tuple[int | None, bool]:
        if parent_hash is None:
            return None, True
        own = engine_hash(parent_hash)
        block = stream.resident.get(own)
        if block is not None:
            return block.chain, block.is_rooted
        known = stream.gone.get(own)
        if known is not None:
            return known
        self.counts.unknown_parents += 1
        return self._fallback(own), False

    def _digest(self, parent: int, tokens: bytes) -> int:
        digest = blake2b(parent.to_bytes(8, "little"), digest_size=8, key=self._salt)
        digest.update(tokens)
        return int.from_bytes(digest.digest(), "little")

    def _fold(self, parent: int, keys: list[Any]) -> int:
        return self._digest(parent, b"extra" + msgspec.msgpack.encode(keys)) if keys else parent

    def _fallback(self, own: int) -> int:
        digest = blake2b(b"engine" + own.to_bytes(8, "little"), digest_size=8, key=self._salt)
        return int.from_bytes(digest.digest(), "little")
