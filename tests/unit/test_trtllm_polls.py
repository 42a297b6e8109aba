"""TensorRT-LLM's draining endpoints: iterations, finished requests, KV events; what another reader took is a gap."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters.adapter import Discovery
from engine_probe.adapters.registry import adapter
from engine_probe.adapters.trtllm import steady_offset
from engine_probe.adapters.trtllm_polls import EventPoll, IterationPoll, RequestPoll, step_instants
from engine_probe.chain_hash import block_hash
from engine_probe.errors import UnknownFormat
from engine_probe.sampling import Sampling
from engine_probe.wire.validate import validate

NOW_NS = 1_795_956_271_000_000_000
MS = 1_000_000
SALT = b"salt"


def iteration(number: int, **changes: Any) -> dict[str, Any]:
    """One record as documented."""
    record: dict[str, Any] = {
        "iter": number,
        "iterLatencyMS": 20.0,
        "numActiveRequests": 4,
        "numQueuedRequests": 2,
        "numCompletedRequests": 1,
        "gpuMemUsage": 1024,
        "kvCacheStats": {
            "maxNumBlocks": 100,
            "freeNumBlocks": 75,
            "usedNumBlocks": 25,
            "tokensPerBlock": 32,
            "reusedBlocks": 7,
            "missedBlocks": 3,
            "allocTotalBlocks": 50,
        },
        "inflightBatchingStats": {
            "numScheduledRequests": 3,
            "numContextRequests": 1,
            "numGenRequests": 2,
            "numPausedRequests": 1,
            "numCtxTokens": 512,
            "avgNumDecodedTokensPerIter": 1.0,
        },
    }
    return record | changes


def rows(poll: Any, told: Any, at_ns: int = NOW_NS) -> dict[str, list[dict[str, Any]]]:
    """Rows of one answer, all of them valid."""
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    tables = poll.tables(body, at_ns)
    for kind, table in tables.items():
        validate(kind, table, at_ns)
    return {kind: table.to_pylist(maps_as_pydicts="strict") for kind, table in tables.items()}


def test_an_iteration_is_a_step() -> None:
    """Numbers under the contract's names; one paused request waits to go on; what is not told is null."""
    found = rows(IterationPoll("w"), [iteration(7)])
    (step,) = found["step"]
    assert (step["step"], step["duration_s"], step["at_ns"]) == (7, 0.02, NOW_NS)
    assert (step["num_running"], step["num_waiting_prefill"], step["num_waiting_decode"]) == (3, 2, 1)
    assert (step["prefill_tokens"], step["decode_tokens"]) == (512, 2)
    assert (step["blocks_total"], step["blocks_used"]) == (100, 25)
    assert step["num_preempted"] is None
    samples = {row["name"]: row["value"] for row in found["sample"]}
    assert (samples["requests_running"], samples["requests_waiting"], samples["kv_usage_ratio"]) == (4.0, 2.0, 0.25)
    assert samples["trtllm_kv_cache_reused_blocks_total"] == 7.0
    assert "mark" not in found


def test_tokens_of_a_speculating_step_are_unknown() -> None:
    """A request may have got several."""
    (step,) = rows(IterationPoll("w"), [iteration(1, specDecodingStats={"numDraftTokens": 5})])["step"]
    assert step["decode_tokens"] is None


def test_drafts_are_counted_from_the_attach_on() -> None:
    """Two iterations that speculate: 5 + 3 drafted, 4 + 1 accepted; one that tells nothing of it has no such sample."""
    poll = IterationPoll("w")
    told = [{"numDraftTokens": 5, "numAcceptedTokens": 4}, {"numDraftTokens": 3, "numAcceptedTokens": 1}]
    found = rows(poll, [iteration(number, specDecodingStats=stats) for number, stats in enumerate(told)])
    samples = {row["name"]: row["value"] for row in found["sample"]}
    assert (samples["draft_tokens_total"], samples["accepted_tokens_total"]) == (8.0, 5.0)
    plain = rows(IterationPoll("w"), [iteration(1)])["sample"]
    assert "draft_tokens_total" not in {row["name"] for row in plain}


def test_iterations_are_placed_by_their_own_time_in_any_zone() -> None:
    """The time stamp has no zone: India (UTC+5:30), New York (UTC-5), UTC give the same instants."""
    end = datetime.fromtimestamp(NOW_NS / 1e9, UTC) - timedelta(seconds=1.5)
    for hours in (0.0, 5.5, -5.0):
        local = end.astimezone(timezone(timedelta(hours=hours)))
        stamps = [local - timedelta(milliseconds=20), local]
        records = [{"timestamp": stamp.strftime("%m-%d-%Y %H:%M:%S.%f")} for stamp in stamps]
        assert step_instants(records, NOW_NS) == [NOW_NS - 1520 * MS, NOW_NS - 1500 * MS]


def test_without_time_stamps_iterations_end_one_after_another() -> None:
    """The last when it came, the one before it 20 ms earlier."""
    assert step_instants([iteration(1), iteration(2)], NOW_NS) == [NOW_NS - 20 * MS, NOW_NS]


def test_iterations_that_somebody_else_took_are_a_gap() -> None:
    """Two readers split the records: numbers jump. A number that falls is a restart."""
    poll = IterationPoll("w")
    rows(poll, [iteration(1), iteration(2)])
    (gap,) = rows(poll, [iteration(5)])["mark"]
    assert (gap["mark"], gap["attrs"]["first_seq"], gap["attrs"]["last_seq"]) == ("gap", "3", "4")
    (up,) = rows(poll, [iteration(0)])["mark"]
    assert up["mark"] == "worker_up"


def test_finished_requests_are_counted_over_answers() -> None:
    """One an iteration: three after three iterations."""
    poll = IterationPoll("w")
    rows(poll, [iteration(1), iteration(2)])
    samples = {row["name"]: row["value"] for row in rows(poll, [iteration(3)])["sample"]}
    assert samples["requests_finished_total"] == 3.0


def perf(**timing: Any) -> dict[str, Any]:
    """One finished request: server arrival at 100 s of the steady clock."""
    told = {
        "server_arrival_time": 100.0,
        "arrival_time": 100.25,
        "first_scheduled_time": 100.75,
        "first_token_time": 101.25,
        "server_first_token_time": 101.5,
        "last_token_time": 103.25,
    }
    cache = {
        "num_total_allocated_blocks": 5,
        "num_new_allocated_blocks": 3,
        "num_reused_blocks": 2,
        "num_missed_blocks": 3,
    }
    metrics = {"first_iter": 1, "last_iter": 9, "timing_metrics": told | timing, "kv_cache_metrics": cache}
    return {"request_id": 17, "perf_metrics": metrics}


OFFSET_S = NOW_NS / 1e9 - 104.0  # the last token was 0.75 s before it was fetched


def test_a_finished_request_is_a_row() -> None:
    """0.25 s in the front end, 0.5 s queued, 0.5 s prefill: they sum to the 1.25 s from arrival to first token."""
    (row,) = rows(RequestPoll("w", OFFSET_S), [perf()])["request"]
    assert [row[name] for name in ("frontend_s", "queue_s", "prefill_s", "decode_s")] == pytest.approx(
        [0.25, 0.5, 0.5, 2.0], abs=1e-6
    )
    assert row["end_ns"] == pytest.approx(NOW_NS - 750 * MS, abs=1000)
    assert row["first_token_ns"] - row["arrival_ns"] == pytest.approx(1250 * MS, abs=1000)
    assert (row["request_id"], row["labels"]["engine_request_id"], row["labels"]["num_reused_blocks"]) == (
        "w:17",
        "17",
        "2",
    )
    assert (row["prompt_tokens"], row["cached_tokens"], row["num_preemptions"]) == (None, None, None)


def test_a_transfer_of_kv_is_a_row_too() -> None:
    """Disaggregated serving: 4 MiB in 20 ms."""
    item = perf(kv_cache_size=4 << 20, kv_cache_transfer_start=100.5, kv_cache_transfer_end=100.52)
    (row,) = rows(RequestPoll("w", OFFSET_S), [item])["transfer"]
    assert (row["num_bytes"], row["outcome"], row["request_id"]) == (4 << 20, "ok", "w:17")
    assert row["wire_s"] == pytest.approx(0.02, abs=1e-6)


def test_without_the_executors_arrival_nothing_is_made_up() -> None:
    """Null where an instant is missing."""
    (row,) = rows(RequestPoll("w", OFFSET_S), [perf(server_arrival_time=None, first_scheduled_time=0.0)])["request"]
    assert (row["frontend_s"], row["queue_s"], row["prefill_s"]) == (None, None, None)
    assert row["first_scheduled_ns"] is None


def test_a_clock_that_was_set_anew_is_said_and_no_row_is_misplaced() -> None:
    """Another machine's steady clock: instants of days ago."""
    poll = RequestPoll("w", OFFSET_S - 200_000)
    with pytest.raises(UnknownFormat, match="Attach again"):
        rows(poll, [perf()])
    with pytest.raises(UnknownFormat, match="cannot be placed"):
        rows(RequestPoll("w", None), [perf()])
    assert rows(RequestPoll("w", None), []) == {}


def test_the_steady_clock_is_placed_by_asking() -> None:
    """Asked at 1000.0, answered at 1000.4; the server stamps 50.1 and 50.3: the middle of both ways, 950.0."""
    times = iter((1000.0, 1000.4))

    class Client:
        url = ""

        def metrics(self, path: str = "/metrics", *, hint: str = "") -> tuple[bytes, str | None]:
            raise AssertionError

        def json(self, path: str) -> Any:
            return {"receive_ts": 50.1, "transmit_ts": 50.3}

    assert steady_offset(Client(), lambda: next(times)) == pytest.approx(950.0)


def tokens(ids: list[int]) -> list[dict[str, Any]]:
    return [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in ids]


def event(number: int, data: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"event_id": number, "window_size": 4096, "data": data} | more


def stored(
    number: int, hashes: list[int], ids: list[list[int]], parent: int | None = None, **more: Any
) -> dict[str, Any]:
    blocks = [
        {"type": "stored_block", "block_hash": own, "tokens": tokens(block), "cache_level": 0, "priority": 35}
        for own, block in zip(hashes, ids, strict=True)
    ]
    return event(number, {"type": "stored", "parent_hash": parent, "blocks": blocks}, **more)


def chain(*blocks: list[int]) -> list[int]:
    found, parent = [], 0
    for block in blocks:
        parent = block_hash(parent, block, SALT)
        found.append(parent)
    return found


BIG = 17_447_545_436_383_617_540  # unsigned: above 2^63


def test_stored_blocks_are_chained_under_our_own_hash() -> None:
    """Two blocks in one event, a third under the second; the last one is not full."""
    poll = EventPoll("w", SALT, Sampling())
    told = [stored(0, [BIG, 12], [[1, 2], [3, 4]]), stored(1, [13], [[5]], parent=12)]
    found = rows(poll, told)["block"]
    assert [row["block_hash"] for row in found] == chain([1, 2], [3, 4], [5])
    assert [row["parent_hash"] for row in found] == [None, *chain([1, 2], [3, 4])]
    assert [(row["change"], row["tier"], row["num_tokens"]) for row in found] == [
        ("stored", "device", 2),
        ("stored", "device", 2),
        ("stored", "device", 1),
    ]


def test_a_block_moves_to_the_host_and_back_and_is_removed() -> None:
    """evicted from the device and offloaded; loaded; evicted for good, with the age of its last copy."""
    poll = EventPoll("w", SALT, Sampling())
    move = {"type": "updated", "block_hash": 11, "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1}}
    back = {"type": "updated", "block_hash": 11, "cache_level": {"type": "event_diff", "old_value": 1, "new_value": 0}}
    ranked = {"type": "updated", "block_hash": 11, "priority": {"type": "event_diff", "old_value": 3, "new_value": 9}}
    rows(poll, [stored(0, [11], [[1, 2]])], NOW_NS)
    moved = rows(poll, [event(1, move), event(2, ranked)], NOW_NS + 1_000 * MS)["block"]
    assert [(row["change"], row["tier"], row["age_s"], row["reason"]) for row in moved] == [
        ("evicted", "device", 1.0, "offloaded"),
        ("offloaded", "host", None, None),
    ]
    loaded = rows(poll, [event(3, back)], NOW_NS + 2_000 * MS)["block"]
    assert [(row["change"], row["tier"]) for row in loaded] == [("loaded", "device")]
    gone = rows(poll, [event(4, {"type": "removed", "block_hashes": [11]})], NOW_NS + 5_000 * MS)["block"]
    assert [(row["change"], row["tier"], row["age_s"]) for row in gone] == [("evicted", "device", 3.0)]
    assert {row["block_hash"] for row in [*moved, *loaded, *gone]} == set(chain([1, 2]))


def test_only_the_largest_window_is_read() -> None:
    """Sliding windows repeat a span; the created events tell the windows before anything is stored."""
    poll = EventPoll("w", SALT, Sampling())
    told = [
        event(0, {"type": "created", "num_blocks_per_cache_level": [100, 0]}, window_size=128),
        event(1, {"type": "created", "num_blocks_per_cache_level": [100, 0]}, window_size=4096),
        stored(2, [11], [[1, 2]], window_size=128),
        stored(3, [12], [[1, 2]], window_size=4096),
    ]
    found = rows(poll, told)
    assert len(found["block"]) == 1
    assert "mark" not in found


def test_missing_events_are_a_gap_and_a_number_that_falls_is_a_restart() -> None:
    """Each rank counts for itself."""
    poll = EventPoll("w", SALT, Sampling())
    rows(poll, [stored(0, [11], [[1]]), stored(0, [11], [[1]], attention_dp_rank=1)])
    found = rows(poll, [stored(3, [12], [[2]])])
    (gap,) = found["mark"]
    assert (gap["attrs"]["first_seq"], gap["attrs"]["last_seq"], gap["worker"]) == ("1", "2", "w")
    again = rows(poll, [stored(0, [11], [[1]], attention_dp_rank=1)])
    assert again["mark"][0]["mark"] == "worker_up"
    assert {row["worker"] for row in again["block"]} == {"w/dp1"}


def test_another_rank_is_another_worker() -> None:
    """Rank 0 keeps the name."""
    found = rows(EventPoll("w", SALT, Sampling()), [stored(0, [11], [[1]], attention_dp_rank=2)])
    assert found["block"][0]["worker"] == "w/dp2"


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"<html>",
        b"{}",
        b"[1]",
        b'[{"event_id": 0}]',
        b'[{"event_id": -1, "data": {}}]',
        b'[{"event_id": 0, "data": {"type": "stored"}}]',
        b'[{"event_id": 0, "data": {"type": "stored", "blocks": [{}]}}]',
        b'[{"event_id": 0, "data": {"type": "removed", "block_hashes": ["x"]}}]',
        b'[{"event_id": 0, "attention_dp_rank": "x", "data": {}}]',
        b'["half',
    ],
)
def test_what_is_no_list_of_events_is_refused(told: bytes) -> None:
    """With the endpoint's name."""
    with pytest.raises(UnknownFormat, match="/kv_cache_events"):
        EventPoll("w", SALT, Sampling()).tables(told, NOW_NS)


def test_items_may_be_json_text() -> None:
    """Some releases hand out strings."""
    (step,) = rows(IterationPoll("w"), [json.dumps(iteration(3))])["step"]
    assert step["step"] == 3


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "iter": _JSON,
                "iterLatencyMS": _JSON,
                "timestamp": _JSON,
                "kvCacheStats": _JSON,
                "event_id": _JSON,
                "data": st.fixed_dictionaries(
                    {"type": st.sampled_from(["stored", "removed", "updated", "created"])},
                    optional={"blocks": _JSON, "block_hashes": _JSON, "cache_level": _JSON, "block_hash": _JSON},
                ),
                "perf_metrics": _JSON,
                "request_id": _JSON,
            },
        ),
        max_size=3,
    )
)
def test_strange_items_are_refused_or_read_as_unknown(told: list[Any]) -> None:
    """Never anything but UnknownFormat, and never a row that breaks the contract."""
    for poll in (IterationPoll("w"), RequestPoll("w", 0.0), EventPoll("w", SALT, Sampling())):
        try:
            rows(poll, told)
        except UnknownFormat:
            continue


def test_one_reader_for_the_iterations() -> None:
    """With its Prometheus page the server reads them itself; kvscope then asks for requests instead."""
    one = adapter("trtllm")
    with_page = one.polls(Discovery(details={"has_page": True, "steady_offset": 0.0}), "w", SALT, Sampling())
    without = one.polls(Discovery(details={"has_page": False}), "w", SALT, Sampling())
    assert {poll.path for poll in with_page} == {"/perf_metrics", "/kv_cache_events"}
    assert {poll.path for poll in without} == {"/metrics", "/kv_cache_events"}
    assert {poll.path: poll.method for poll in without}["/kv_cache_events"] == "POST"
