"""SGLang's KV events: both wire forms, signed hashes, salts, pairs, tiers, and blocks of one token thinned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters.kv_events import Counts, KvEventDecoder
from engine_probe.attach.kv_link import endpoints_from_sources, read_message
from engine_probe.chain_hash import block_hash, chain
from engine_probe.errors import UsageError
from engine_probe.sampling import Sampling
from engine_probe.wire.validate import validate

SAMPLES = Path(__file__).parents[1] / "data" / "samples" / "kv_events.synthetic.jsonl"
SALT = b"salt"
TS = 1_790_000_000.0
AT_NS = 1_790_000_000_000_000_000


def batch(*events: Any, ts: float = TS) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), 0])


def stored(
    hashes: list[int], tokens: list[Any], *, parent: int | None = None, size: int = 1, **more: Any
) -> dict[str, Any]:
    told = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return told | {"block_size": size, "lora_id": None, "medium": "GPU"} | more


def as_array(event: dict[str, Any], *more: Any) -> list[Any]:
    """The form up to 0.5.19."""
    keys = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    return [event["type"], *(event[key] for key in keys if key in event), *more]


def run(*payloads: bytes, sampling: Sampling | None = None) -> tuple[list[dict[str, Any]], Counts]:
    decoder = KvEventDecoder(SALT, sampling=sampling)
    for seq, payload in enumerate(payloads):
        decoder.feed("w", seq, payload, AT_NS)
    table = decoder.drain().get("block")
    if table is None:
        return [], decoder.counts
    validate("block", table, AT_NS)
    return table.to_pylist(), decoder.counts


def sglang_samples() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in SAMPLES.read_text().splitlines()[1:]]
    return [row for row in rows if row.get("engine") == "sglang" and "frames_hex" in row]


@pytest.mark.parametrize("row", sglang_samples(), ids=lambda row: row["note"])
def test_every_form_of_the_samples_is_read(row: dict[str, Any]) -> None:
    """Frames as they came; signed and unsigned hashes, pairs, tiers."""
    message = read_message([bytes.fromhex(frame) for frame in row["frames_hex"]])
    assert message is not None
    decoder = KvEventDecoder(SALT)
    decoder.feed("w", message[0], message[1], AT_NS)
    assert decoder.counts.unknown_events == decoder.counts.unaligned_blocks == 0
    assert decoder.drain()["block"].num_rows > 0


def test_both_forms_give_the_same_rows() -> None:
    """Arrays up to 0.5.19, maps from 0.5.20."""
    first, second = stored([-5, 7], [1, 2]), stored([9], [3], parent=7)
    gone = {"type": "BlockRemoved", "block_hashes": [-5], "medium": "GPU"}
    maps = run(batch(first, second), batch(gone, ts=TS + 2))
    arrays = run(batch(as_array(first), as_array(second)), batch(["BlockRemoved", [-5], "GPU"], ts=TS + 2))
    assert maps[0] == arrays[0]
    assert [row["block_hash"] for row in maps[0][:3]] == chain([1, 2, 3], 1, SALT)
    assert maps[0][3]["age_s"] == 2.0


def test_a_negative_hash_is_the_same_block_as_its_unsigned_form() -> None:
    """-1 and 2^64 - 1: the removal finds the block."""
    rows, counts = run(batch(stored([-1], [1])), batch({"type": "BlockRemoved", "block_hashes": [(1 << 64) - 1]}))
    assert counts.unknown_removed == 0
    assert rows[0]["block_hash"] == rows[1]["block_hash"]


def test_a_salt_separates_equal_prompts_in_either_form() -> None:
    """0.5.18 and 0.5.19 append a map to the array, 0.5.20 has a field; it enters a chain at its first block only."""
    plain, _ = run(batch(stored([1, 2], [5, 6])))
    by_field, _ = run(batch(stored([1, 2], [5, 6], cache_salt="s")))
    by_map, _ = run(batch(as_array(stored([1, 2], [5, 6]), {"cache_salt": "s"})))
    assert [row["block_hash"] for row in by_field] == [row["block_hash"] for row in by_map]
    assert not {row["block_hash"] for row in by_field} & {row["block_hash"] for row in plain}
    root = by_field[0]["block_hash"]
    assert by_field[1]["block_hash"] == block_hash(root, [6], SALT)
    later, _ = run(batch(stored([1], [5], cache_salt="s"), stored([2], [6], parent=1, cache_salt="s")))
    assert [row["block_hash"] for row in later] == [row["block_hash"] for row in by_field]


def test_an_adapter_separates_equal_prompts() -> None:
    """lora_name since 0.5.22; two adapters and none are three chains."""
    chains = {run(batch(stored([1], [5], lora_name=name)))[0][0]["block_hash"] for name in (None, "a", "b")}
    assert len(chains) == 3


def test_a_pair_of_tokens_counts_as_its_first() -> None:
    """With EAGLE each token comes with the one after it: the chain is that of the prompt's own tokens."""
    rows, counts = run(batch(stored([1], [[5, 6], [6, 7], [7, 8], [8, 9]], size=4)))
    assert rows[0]["block_hash"] == chain([5, 6, 7, 8], 4, SALT)[0]
    assert counts.unaligned_blocks == 0


def test_tiers_of_the_hierarchical_cache() -> None:
    """Written through to the host, evicted from the device, gone from the host; external memory is remote."""
    rows, _ = run(
        batch(stored([1], [5]), stored([1], [5], medium="CPU_PINNED")),
        batch({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}, ts=TS + 1),
        batch(stored([1], [5], medium="EXTERNAL"), ts=TS + 2),
    )
    assert [(row["change"], row["tier"]) for row in rows] == [
        ("stored", "device"),
        ("offloaded", "host"),
        ("evicted", "device"),
        ("offloaded", "remote"),
    ]


def test_the_first_clear_of_a_stream_resets_nothing() -> None:
    """SGLang opens its stream with AllBlocksCleared: no cache_reset mark."""
    decoder = KvEventDecoder(SALT)
    decoder.feed("w", 0, batch({"type": "AllBlocksCleared"}), AT_NS)
    assert "mark" not in decoder.drain()


def life(sampling: Sampling | None, prompts: int = 40, length: int = 50) -> tuple[list[dict[str, Any]], Counts]:
    """Prompts of 50 blocks of one token, stored and then removed."""
    payloads = []
    for prompt in range(prompts):
        hashes = [prompt * 1000 + k for k in range(length)]
        payloads.append(batch(stored(hashes, [prompt] * length), ts=TS + prompt))
    payloads += [
        batch(
            {"type": "BlockRemoved", "block_hashes": [prompt * 1000 + k for k in range(length)]}, ts=TS + 100 + prompt
        )
        for prompt in range(prompts)
    ]
    return run(*payloads, sampling=sampling)


def test_a_share_of_the_blocks_is_kept_for_their_whole_lives() -> None:
    """Kept blocks are those that Sampling keeps, each with all its rows, at the rate told in them."""
    everything, _ = life(None)
    kept, counts = life(Sampling(0.2))
    assert {row["sample_rate"] for row in everything} == {None}
    assert {row["sample_rate"] for row in kept} == {0.2}
    hashes = np.array([row["block_hash"] for row in everything], dtype=np.uint64)
    expected = [row for row, keep in zip(everything, Sampling(0.2).keeps_blocks(hashes), strict=True) if keep]
    assert [(row["block_hash"], row["change"]) for row in kept] == [
        (row["block_hash"], row["change"]) for row in expected
    ]
    lives: dict[int, list[str]] = {}
    for row in kept:
        lives.setdefault(row["block_hash"], []).append(row["change"])
    assert set(map(tuple, lives.values())) == {("stored", "evicted")}
    assert counts.sampled_out == len(everything) - len(kept)
    # 2,000 distinct blocks at 20 %: 400 expected, standard deviation 17.9
    assert abs(len(lives) - 400) < 5 * 17.9
    assert counts.stored == 2000


def test_a_higher_rate_keeps_what_a_lower_one_keeps() -> None:
    """So that two processes with different rates agree on the blocks that both keep."""
    few, _ = life(Sampling(0.05))
    many, _ = life(Sampling(0.3))
    assert {row["block_hash"] for row in few} <= {row["block_hash"] for row in many}


def test_a_clear_is_kept_whatever_the_rate() -> None:
    """It speaks of all blocks, and has no rate."""
    rows, _ = run(batch(stored([1], [5])), batch({"type": "AllBlocksCleared"}), sampling=Sampling(1e-9))
    assert [(row["change"], row["sample_rate"]) for row in rows] == [("cleared", None)]


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    """Above 0, at most 1."""
    with pytest.raises(UsageError):
        Sampling(rate)


def test_an_endpoint_that_says_who_binds_is_believed() -> None:
    """`bind` goes before vLLM's rule: SGLang binds 0.0.0.0, and a concrete address where told so."""
    told = {
        "0": {"endpoint": "tcp://0.0.0.0:5557", "bind": True, "topic": "t"},
        "1": {"endpoint": "tcp://10.0.0.9:5558", "bind": False},
        "2": {"endpoint": "tcp://10.0.0.9:5559", "bind": True},
    }
    found = endpoints_from_sources(told, "engine")
    assert [(one.address, one.bind) for one in found] == [
        ("tcp://engine:5557", False),
        ("tcp://10.0.0.9:5558", True),
        ("tcp://10.0.0.9:5559", False),
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["BlockStored", "BlockRemoved", "BlockMoved", "unknown", "AllBlocksCleared"]),
            st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4),
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.sampled_from([None, "GPU", "CPU_PINNED", "EXTERNAL", "new"]),
            st.integers(1, 3),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_any_order_of_events_gives_rows_of_the_contract(events: list[Any], arrays: bool) -> None:
    """Removals of the unknown, parents never seen, media of the future: nothing raises, and the two forms agree."""
    maps = []
    for kind, hashes, parent, medium, size in events:
        event: dict[str, Any] = {"type": kind, "block_hashes": hashes, "medium": medium}
        if kind == "BlockStored":
            event = stored(hashes, list(range(len(hashes) * size)), parent=parent, size=size, medium=medium)
        maps.append(event)
    rows, _ = run(batch(*maps))
    as_arrays = [
        as_array(event) if event["type"] == "BlockStored" else [event["type"], event["block_hashes"], event["medium"]]
        for event in maps
    ]
    if arrays:
        assert run(batch(*as_arrays))[0] == rows
