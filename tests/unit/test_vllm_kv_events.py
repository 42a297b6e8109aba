"""KV events: both wire forms, chain hashes, residency, restarts and gaps."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_probe.adapters.kv_events import Counts, KvEventDecoder
from engine_probe.adapters.kv_wire import STORED_FIELDS
from engine_probe.chain_hash import block_hash, chain
from engine_probe.errors import UnknownFormat

SAMPLES = Path(__file__).parents[1] / "data" / "samples" / "kv_events.synthetic.jsonl"
SALT = b"a deployment's secret"
TS = 1_790_000_000.0
AT_NS = 1_790_000_000_000_000_000
TOKENS = list(range(1000, 1016))  # 4 blocks of 4


def batch(*events: Any, ts: float = TS, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])


def stored(
    hashes: list[int | bytes], tokens: list[int], parent: int | bytes | None = None, **more: Any
) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return event | {"block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None} | more


def removed(*hashes: int | bytes, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | more


def as_array(event: dict[str, Any]) -> list[Any]:
    """The form up to vLLM 0.23: class name, then the fields in order."""
    if event["type"] == "AllBlocksCleared":
        return ["AllBlocksCleared"]
    names = STORED_FIELDS if event["type"] == "BlockStored" else ("block_hashes", "medium", "group_idx")
    last = max(names.index(name) for name in event if name in names)
    return [event["type"], *(event.get(name) for name in names[: last + 1])]


def run(*messages: bytes, salt: bytes = SALT) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Counts]:
    """Rows of `block` and `mark` after messages seq 0, 1, ..."""
    decoder = KvEventDecoder(salt)
    for seq, message in enumerate(messages):
        decoder.feed("w", seq, message, AT_NS)
    return *rows_of(decoder), decoder.counts


def rows_of(decoder: KvEventDecoder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    tables = decoder.drain()
    return tuple(tables[kind].to_pylist() if kind in tables else [] for kind in ("block", "mark"))  # type: ignore[return-value]


def test_a_run_of_blocks_is_a_row_a_block_under_our_chain_hash() -> None:
    """The hashes are those of chain_hash over the same tokens, so prompts join; the engine's own hashes are gone."""
    rows, marks, _ = run(batch(stored([11, 12, 13], TOKENS[:12])))
    hashes = chain(TOKENS[:12], 4, SALT)
    assert [row["block_hash"] for row in rows] == hashes
    assert [row["parent_hash"] for row in rows] == [None, hashes[0], hashes[1]]
    assert {(row["change"], row["tier"], row["num_tokens"], row["worker"], row["at_ns"]) for row in rows} == {
        ("stored", "device", 4, "w", AT_NS)
    }
    assert marks == []


def test_a_later_event_goes_on_from_its_parent() -> None:
    """A child's chain is that of the whole prompt, also when the parent has been evicted meanwhile."""
    rows, _, counts = run(
        batch(stored([11, 12], TOKENS[:8])),
        batch(removed(12)),
        batch(stored([13], TOKENS[8:12], parent=12)),
    )
    assert rows[-1]["block_hash"] == chain(TOKENS[:12], 4, SALT)[2]
    assert counts.unknown_parents == 0


def test_eviction_tells_how_long_the_block_was_there() -> None:
    """age_s is eviction minus storing, by the engine's clock; why and idle time are not told."""
    rows, _, counts = run(batch(stored([11], TOKENS[:4])), batch(removed(11), ts=TS + 2.5))
    evicted = rows[1]
    assert (evicted["change"], evicted["age_s"], evicted["at_ns"]) == ("evicted", 2.5, AT_NS + 2_500_000_000)
    assert evicted["block_hash"] == rows[0]["block_hash"]
    assert evicted["reason"] is evicted["idle_s"] is evicted["reuse_count"] is None
    assert (counts.stored, counts.removed) == (1, 1)


def test_both_wire_forms_give_identical_rows() -> None:
    """Arrays (to 0.23) and maps (from 0.24) say the same."""
    events = [
        stored([11, 12], TOKENS[:8], lora_name="sql", extra_keys=[["sql"], ["sql", "salt"]], group_idx=0),
        removed(12, group_idx=0),
        {"type": "AllBlocksCleared"},
    ]
    arrays = run(batch(*map(as_array, events)), batch(as_array(events[2])))
    maps = run(batch(*events), batch(events[2]))
    assert arrays == maps
    assert len(maps[0]) == 5


def test_short_arrays_of_0_9_have_no_medium_and_are_on_the_device() -> None:
    """Five fields: what is absent is null, and the tier was the only one there was."""
    rows, _, _ = run(batch(["BlockStored", [11], None, TOKENS[:4], 4, None], ["BlockRemoved", [11]]))
    assert [(row["change"], row["tier"]) for row in rows] == [("stored", "device"), ("evicted", "device")]


def test_unknown_keys_extra_positions_and_unknown_events_are_ignored() -> None:
    """A newer engine does not break an older kvscope; unknown events are counted."""
    more = as_array(stored([11], TOKENS[:4], lookahead_token_ids=[[1]]))
    rows, _, counts = run(
        batch([*more, "field of the future"], stored([12], TOKENS[4:8], parent=11, future=1), {"type": "BlockMoved"})
    )
    assert [row["block_hash"] for row in rows] == chain(TOKENS[:8], 4, SALT)
    assert counts.unknown_events == 1


def test_hashes_may_be_negative_or_bytes() -> None:
    """-1, 2**64-1 and bytes ending in eight 0xff are one hash: the eviction finds the block."""
    for form in (-1, (1 << 64) - 1, b"\x01" * 24 + b"\xff" * 8):
        rows, _, counts = run(batch(stored([-1], TOKENS[:4])), batch(removed(form)))
        assert rows[1]["block_hash"] == rows[0]["block_hash"]
        assert counts.unknown_removed == 0


def test_lora_and_extra_keys_change_the_chain_in_the_documented_way() -> None:
    """The parent's bytes become BLAKE2b(parent + "extra" + msgpack(keys)); equal tokens under a LoRA never join."""
    rows, _, _ = run(batch(stored([11], TOKENS[:4], lora_name="sql")))
    seed = blake2b(bytes(8) + b"extra" + msgspec.msgpack.encode(["sql"]), digest_size=8, key=SALT).digest()
    assert rows[0]["block_hash"] == block_hash(int.from_bytes(seed, "little"), TOKENS[:4], SALT)
    assert rows[0]["block_hash"] != chain(TOKENS[:4], 4, SALT)[0]


def test_the_lora_name_counts_once_however_it_is_told() -> None:
    """Before 0.18 lora_name alone, after it also in extra_keys: the same chain."""
    old, _, _ = run(batch(stored([11], TOKENS[:4], lora_name="sql")))
    new, _, _ = run(batch(stored([11], TOKENS[:4], lora_name="sql", extra_keys=[["sql"]])))
    other, _, _ = run(batch(stored([11], TOKENS[:4], lora_id=3)))
    assert old == new
    assert other[0]["block_hash"] != old[0]["block_hash"]


def test_empty_extra_keys_change_nothing() -> None:
    """[None] and [[]] are what a plain block has."""
    for extra in (None, [None], [[]]):
        rows, _, _ = run(batch(stored([11], TOKENS[:4], extra_keys=extra)))
        assert rows[0]["block_hash"] == chain(TOKENS[:4], 4, SALT)[0]


def test_an_unknown_parent_gives_a_stable_hash_and_is_counted() -> None:
    """Joined in the middle: no chain can be known, but the block and its children are the same after a restart."""
    message = batch(stored([12], TOKENS[4:8], parent=11), stored([13], TOKENS[8:12], parent=12))
    rows, _, counts = run(message)
    again, _, _ = run(message)
    assert rows == again
    assert counts.unknown_parents == 1
    expected = [
        int.from_bytes(blake2b(b"engine" + h.to_bytes(8, "little"), digest_size=8, key=SALT).digest(), "little")
        for h in (11, 12, 13)
    ]
    assert [rows[0]["parent_hash"], rows[0]["block_hash"], rows[1]["block_hash"]] == expected
    assert rows[1]["parent_hash"] == rows[0]["block_hash"]


def test_removing_a_block_never_seen_is_an_eviction_of_unknown_age() -> None:
    """The count of evictions is the engine's, whatever we missed."""
    rows, _, counts = run(batch(removed(99)))
    assert (rows[0]["change"], rows[0]["age_s"], counts.unknown_removed) == ("evicted", None, 1)


def test_a_report_of_reuse_is_a_hit() -> None:
    """kv_cache_report_mode full: an event without parent that lists only resident blocks stores nothing."""
    first = stored([11, 12], TOKENS[:8])
    rows, _, counts = run(batch(first), batch(first, ts=TS + 1), batch(removed(11), ts=TS + 3))
    assert [row["change"] for row in rows] == ["stored", "stored", "hit", "hit", "evicted"]
    assert [row["reuse_count"] for row in rows] == [None, None, 1, 1, 1]
    assert rows[4]["age_s"] == 3.0
    assert (counts.stored, counts.hits) == (2, 2)


def test_a_second_copy_is_stored_again_and_needs_two_evictions() -> None:
    """Two prompts computed at once: the shared block exists twice, and one eviction leaves it resident."""
    rows, _, counts = run(
        batch(stored([11, 12], TOKENS[:8])),
        batch(stored([11, 13], TOKENS[:4] + TOKENS[8:12]), ts=TS + 1),
        batch(removed(11), ts=TS + 2),
        batch(removed(11), ts=TS + 4),
    )
    assert [row["change"] for row in rows] == ["stored"] * 4 + ["evicted"] * 2
    assert [row["age_s"] for row in rows[4:]] == [1.0, 3.0]
    assert counts.unknown_removed == 0


def test_tiers_are_told_apart() -> None:
    """A copy on the host is `offloaded`, outlives the eviction from the device, and is evicted for itself."""
    rows, _, _ = run(
        batch(stored([11], TOKENS[:4])),
        batch(stored([11], TOKENS[:4], medium="CPU")),
        batch(removed(11), ts=TS + 1),
        batch(removed(11, medium="cpu"), ts=TS + 2),
    )
    assert [(row["change"], row["tier"], row["age_s"]) for row in rows] == [
        ("stored", "device", None),
        ("offloaded", "host", None),
        ("evicted", "device", 1.0),
        ("evicted", "host", 2.0),
    ]
    assert len({row["block_hash"] for row in rows}) == 1


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [("FS", None, "disk"), ("STORAGE", "LOCAL", "disk"), ("OBJ", None, "remote"), ("CPU", "REMOTE", "remote")],
)
def test_media_of_every_release_have_a_tier(medium: str, locality: str | None, tier: str) -> None:
    """FS and OBJ (0.26), STORAGE (0.27), REMOTE locality (0.26)."""
    rows, _, _ = run(batch(stored([11], TOKENS[:4], medium=medium, locality=locality)))
    assert (rows[0]["change"], rows[0]["tier"]) == ("offloaded", tier)


def test_an_unknown_medium_has_no_tier() -> None:
    """Unknown is null, never a guess."""
    rows, _, _ = run(batch(stored([11], TOKENS[:4], medium="HOLOGRAM")))
    assert rows[0]["tier"] is None


def test_other_groups_say_nothing_of_prefix_reuse() -> None:
    """A hybrid model tells each span once a group: only the full-attention group's blocks are rows."""
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    rows, _, counts = run(
        batch(stored([11], TOKENS[:4], **window), stored([11], TOKENS[:4], **full)),
        batch(removed(11, group_idx=0), removed(11, group_idx=1)),
    )
    assert [row["change"] for row in rows] == ["stored", "evicted"]
    assert counts.other_group_blocks == 2


def test_a_partial_last_block_says_how_many_tokens_it_has() -> None:
    """6 tokens in blocks of 4: the second has 2."""
    rows, _, _ = run(batch(stored([11, 12], TOKENS[:6])))
    assert [row["num_tokens"] for row in rows] == [4, 2]
    assert rows[0]["block_hash"] == chain(TOKENS[:4], 4, SALT)[0]


@pytest.mark.parametrize("tokens", [[], TOKENS[:4], TOKENS, [[5, 6, 7]] * 5, [[5, 6]] * 9, [1 << 40] * 8, ["a"] * 8])
def test_tokens_that_do_not_fit_the_blocks_give_the_fallback(tokens: list[Any]) -> None:
    """Absent, too few, too many, triples, too many pairs, out of range, text: counted, still a row a block."""
    rows, _, counts = run(batch(stored([11, 12], tokens)))
    assert len(rows) == 2
    assert counts.unaligned_blocks == 2
    assert rows[0]["block_hash"] not in chain(TOKENS, 4, SALT)


def test_a_reset_clears_and_is_marked() -> None:
    """AllBlocksCleared: one row without a block, a mark; what was there is not evicted later by accident."""
    rows, marks, counts = run(batch(stored([11], TOKENS[:4])), batch({"type": "AllBlocksCleared"}), batch(removed(11)))
    assert (rows[1]["change"], rows[1]["block_hash"], rows[1]["reason"]) == ("cleared", None, "reset")
    assert [(mark["mark"], mark["subject"], mark["attrs"]) for mark in marks] == [
        ("cache_reset", "w", [("blocks", "1")])
    ]
    assert (rows[2]["age_s"], counts.unknown_removed) == (None, 1)


def test_a_stream_that_opens_with_a_clear_is_no_reset() -> None:
    """SGLang begins so: nothing had been stored."""
    rows, marks, _ = run(batch({"type": "AllBlocksCleared"}))
    assert [row["change"] for row in rows] == ["cleared"]
    assert marks == []


def test_missing_messages_are_a_gap() -> None:
    """Between 0 and 4: 1 to 3 are missing; who can replay is told before feeding."""
    decoder = KvEventDecoder(SALT)
    decoder.feed("w", 0, batch(), AT_NS)
    assert decoder.gap_before("w", 4) == (1, 3)
    assert decoder.gap_before("w", 1) is None
    fed = decoder.feed("w", 4, batch(ts=TS + 1), AT_NS)
    _, marks = rows_of(decoder)
    assert fed.gap == (1, 3)
    assert decoder.counts.lost_messages == 3
    assert [(mark["mark"], dict(mark["attrs"])) for mark in marks] == [
        ("gap", {"source": "kv_events", "first_seq": "1", "last_seq": "3", "messages": "3"})
    ]


def test_a_gap_that_was_replayed_leaves_no_mark() -> None:
    """Fed in order, the replayed messages close the gap."""
    decoder = KvEventDecoder(SALT)
    for seq in (0, 1, 2, 3):
        decoder.feed("w", seq, batch(ts=TS + seq), AT_NS)
    assert rows_of(decoder) == ([], [])


def test_joining_late_is_a_gap_from_the_first_message() -> None:
    """Blocks stored before we came are unknown: that is said."""
    decoder = KvEventDecoder(SALT)
    assert decoder.gap_before("w", 7) == (0, 6)
    assert decoder.feed("w", 7, batch(), AT_NS).gap == (0, 6)


def test_a_falling_seq_is_a_restart() -> None:
    """A new process counts from 0: cleared, marked, and its blocks are not confused with the old ones."""
    decoder = KvEventDecoder(SALT)
    for seq in range(3):
        decoder.feed("w", seq, batch(stored([11 + seq], TOKENS[:4]), ts=TS + seq), AT_NS)
    rows_of(decoder)
    fed = decoder.feed("w", 0, batch(stored([11], TOKENS[:4]), ts=TS + 60), AT_NS)
    rows, marks = rows_of(decoder)
    assert fed.restarted
    assert fed.gap is None
    assert [(row["change"], row["reason"]) for row in rows] == [("cleared", "restart"), ("stored", None)]
    assert [mark["mark"] for mark in marks] == ["worker_up"]
    assert decoder.gap_before("w", 1) is None


def test_a_repeated_message_changes_nothing() -> None:
    """A replay that overlaps brings old batches again: they are duplicates, not restarts."""
    decoder = KvEventDecoder(SALT)
    message = batch(stored([11], TOKENS[:4]))
    decoder.feed("w", 0, message, AT_NS)
    decoder.feed("w", 1, batch(ts=TS + 1), AT_NS)
    before = rows_of(decoder)
    assert decoder.feed("w", 0, message, AT_NS).duplicate
    assert decoder.feed("w", 1, batch(ts=TS + 1), AT_NS).duplicate
    assert rows_of(decoder) == ([], [])
    assert len(before[0]) == 1
    assert decoder.counts.duplicates == 2


def test_ranks_are_publishers_of_their_own() -> None:
    """Each data-parallel rank counts its own messages and has its own cache."""
    decoder = KvEventDecoder(SALT)
    decoder.feed("w", 0, batch(stored([11], TOKENS[:4]), rank=0), AT_NS)
    decoder.feed("w", 0, batch(stored([11], TOKENS[:4]), rank=1), AT_NS)
    rows, marks = rows_of(decoder)
    assert [(row["worker"], row["change"]) for row in rows] == [("w", "stored"), ("w/dp1", "stored")]
    assert marks == []
    assert decoder.gap_before("w", 1, rank=1) is None


def test_an_engine_clock_that_is_far_off_is_not_believed() -> None:
    """A batch time more than a day from ours: the row has the instant at which it was received."""
    rows, _, _ = run(batch(stored([11], TOKENS[:4]), ts=5.0))
    assert rows[0]["at_ns"] == AT_NS


def test_memory_is_bounded() -> None:
    """Beyond max_blocks the oldest are forgotten, and that is counted."""
    decoder = KvEventDecoder(SALT, max_blocks=2)
    decoder.feed("w", 0, batch(stored([11, 12, 13], TOKENS[:12])), AT_NS)
    decoder.feed("w", 1, batch(removed(11), ts=TS + 1), AT_NS)
    rows, _ = rows_of(decoder)
    assert decoder.counts.forgotten_blocks == 1
    assert rows[-1]["age_s"] is None


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([TS]),
        msgspec.msgpack.encode(["now", [], 0]),
        msgspec.msgpack.encode([TS, [], -1]),
        msgspec.msgpack.encode([TS, [], 1 << 60]),
        msgspec.msgpack.encode([TS, [[]], 0]),
        msgspec.msgpack.encode([TS, [{"block_hashes": []}], 0]),
        batch(["BlockStored", [11], None]),
        batch(stored([11], TOKENS[:4], block_size=0)),
        batch(stored([11], TOKENS[:4], block_size="4")),
        batch(stored(["x"], TOKENS[:4])),  # type: ignore[list-item]
        batch(stored([b""], TOKENS[:4])),
        batch(stored([11], TOKENS[:4], medium=7)),
        batch(stored([11], TOKENS[:4], extra_keys=3)),
        batch(removed(11, group_idx="a")),
    ],
)
def test_what_is_no_event_batch_is_refused_whole(payload: bytes) -> None:
    """One error for any bytes, and nothing of the message has been applied."""
    decoder = KvEventDecoder(SALT)
    with pytest.raises(UnknownFormat):
        decoder.feed("w", 0, payload, AT_NS)
    assert decoder.drain() == {}
    assert decoder.gap_before("w", 0) is None


def test_every_published_form_of_the_reference_decodes() -> None:
    """The synthetic frames of vLLM 0.9 to 0.33 and SGLang: rows as the decoded twin beside each says."""
    seen = 0
    for line in SAMPLES.read_text().splitlines()[1:]:
        sample = json.loads(line)
        if "frames_hex" not in sample:
            continue
        _, seq, payload = (bytes.fromhex(frame) for frame in sample["frames_hex"])
        decoder = KvEventDecoder(SALT)
        decoder.feed("pod", int.from_bytes(seq, "big"), payload, AT_NS)
        blocks = 0
        for event in sample["decoded"]["batch"][1]:
            fields = event[1:] if isinstance(event, list) else [event.get("block_hashes", [None])]
            blocks += len(fields[0]) if fields else 1
        # The second group of a hybrid model repeats the first one's span: not a row.
        expected = 0 if "second KV-cache group" in sample["note"] else blocks
        rows, _ = rows_of(decoder)
        assert len(rows) == expected, sample["note"]
        seen += 1
    assert seen == 15
