"""Dynamo's decisions and requests from its real log and request trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters import dynamo_log
from engine_probe.adapters.dynamo_log import DynamoLog, trace_rows, worker_name
from engine_probe.errors import UnknownFormat
from engine_probe.readers.detect import open_source
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate

SAMPLES = Path(__file__).parents[1] / "data" / "samples" / "dynamo-1.6.1"
FAR_NS = 1 << 62


def read(name: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by kind of a sample, valid under the contract."""
    reader, rows = DynamoLog("fe"), dict[str, list[dict[str, Any]]]()
    for line in (SAMPLES / name).read_text().splitlines():
        for kind, found in reader.feed(line).items():
            rows.setdefault(kind, []).extend(found)
    for kind, found in rows.items():
        validate(kind, table_from_rows(kind, found), FAR_NS)
    return rows


def test_the_json_log_tells_every_decision_whole() -> None:
    """24 requests: the client's id, the worker, the tokens expected there and the cost, from three lines each."""
    routes = read("frontend.log.jsonl")["route"]
    assert len(routes) == len({row["request_id"] for row in routes}) == 24
    row = next(row for row in routes if row["request_id"] == "client-019")
    assert row == {
        "at_ns": 1_795_976_205_517_611_000,
        "request_id": "client-019",
        "router": "fe",
        "policy": "kv",
        "chosen": "2925391587267228647",
        "candidates": [
            {"worker": "2925391587267228647", "matched_tokens": 400, "score": 108.125, "load": None, "queue": None}
        ],
    }


def test_the_text_log_tells_the_same() -> None:
    """Colours, span fields and two request ids on a line: the first is the decision's, the client's id names it."""
    routes = read("frontend.log")["route"]
    assert len(routes) == 12
    assert {row["candidates"][0]["matched_tokens"] for row in routes} == {0, 384, 400}
    assert all(row["request_id"].startswith("client-") and row["policy"] == "kv" for row in routes)


def test_at_level_info_the_decision_is_told_without_the_overlap() -> None:
    """Only `Selected worker`: who, at which cost; what it was expected to have is unknown, not zero."""
    reader, routes = DynamoLog("fe"), []
    for line in (SAMPLES / "frontend.log.jsonl").read_text().splitlines():
        if json.loads(line)["level"] == "INFO":
            routes += reader.feed(line).get("route", [])
    assert len(routes) == 24
    assert {row["candidates"][0]["matched_tokens"] for row in routes} == {None}
    assert all(row["request_id"].startswith("client-") for row in routes)


def test_the_trace_expects_what_the_log_expected() -> None:
    """Both tell of the same requests of one run: same worker, same matched tokens."""
    by_log = {row["request_id"]: row for row in read("frontend.log.jsonl")["route"]}
    trace = read("trace.jsonl")
    ids = {row["labels"]["engine_request_id"]: row["request_id"] for row in trace["request"]}
    assert len(ids) == len(trace["route"]) == 24
    shared = [row for row in trace["route"] if row["request_id"] in by_log]
    assert len(shared) >= 8  # those with a session header carry the client's id in the trace
    for row in shared:
        told = by_log[row["request_id"]]
        assert row["chosen"] == told["chosen"]
        assert row["candidates"][0]["matched_tokens"] == told["candidates"][0]["matched_tokens"]


def test_the_routers_estimate_is_never_the_engines_cached_tokens() -> None:
    """The trace's `cached_tokens` is what the router expected: the request row does not have it."""
    rows = read("trace.jsonl")
    assert all("cached_tokens" not in row for row in rows["request"])
    row = next(row for row in rows["request"] if row["request_id"] == "client-001")
    assert (row["vantage"], row["session_id"], row["model"], row["finish_reason"]) == ("router", "s1", "tiny", "length")
    assert row["first_token_ns"] - row["arrival_ns"] == 85_266_588
    assert row["frontend_s"] == pytest.approx(0.019498286)
    assert (row["prompt_tokens"], row["output_tokens"]) == (483, 12)


def test_prefill_and_decode_on_two_workers_are_two_decisions() -> None:
    """The prefill worker is the one whose cache counts; the request row is the decode worker's."""
    event = {
        "schema": dynamo_log.TRACE_SCHEMA,
        "event_type": "request_end",
        "request": {
            "request_id": "r",
            "request_received_ms": 1_795_976_000_000,
            "cached_tokens": 32,
            "worker": {"prefill_worker_id": 7, "prefill_dp_rank": 0, "decode_worker_id": 8, "decode_dp_rank": 1},
        },
    }
    rows = trace_rows(event, "fe")
    assert [(row["chosen"], row["candidates"][0]["matched_tokens"]) for row in rows["route"]] == [
        ("7", 32),
        ("8/dp1", None),
    ]
    assert (rows["request"][0]["worker"], rows["request"][0]["labels"]["prefill_worker"]) == ("8/dp1", "7")


@pytest.mark.parametrize(
    ("line", "matched"),
    [
        (
            "2026-08-20T04:00:30.5Z INFO selector: Selected worker: worker_type=prefill, worker_id=42 dp_rank=0, "
            "logit: 17.375, cached blocks: 17, tree size: 90, total blocks: 300 request_id=r-1",
            None,
        ),
        (
            "2026-08-20T04:00:30.5Z INFO selector: Selected pinned worker: worker_type=decode, worker_id=42 "
            "dp_rank=Some(0), logit: 3.500, effective cached blocks: 2.00 request_id=r-1",
            None,
        ),
    ],
)
def test_sentences_of_other_releases_are_read(line: str, matched: int | None) -> None:
    """Everything in the message, the rank as Rust prints an option; without the block size tokens stay unknown."""
    reader = DynamoLog("fe")
    assert reader.feed(line) == {}
    (row,) = reader.feed("2026-08-20T04:00:31Z INFO http: request completed request_id=r-1")["route"]
    assert (row["chosen"], row["request_id"], row["candidates"][0]["matched_tokens"]) == ("42", "r-1", matched)
    reader.feed("2026-08-20T04:00:31Z DEBUG x: [ROUTING_INPUT] request local hashes block_size=16 request_id=r-2")
    reader.feed(line.replace("r-1", "r-2"))
    (row,) = reader.feed("2026-08-20T04:00:32Z INFO http: request completed request_id=r-2")["route"]
    assert row["candidates"][0]["matched_tokens"] in (17 * 16, 2 * 16)


def test_a_decision_without_a_request_is_counted() -> None:
    """Releases before 1.4 name none: it can be joined to nothing."""
    reader = DynamoLog("fe")
    reader.feed("2026-08-20T04:00:30Z INFO s: Selected worker: worker_type=decode, worker_id=42 dp_rank=0, logit: 1.0")
    assert reader.unnamed == 1


def test_decisions_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the oldest is written as far as it is known."""
    monkeypatch.setattr(dynamo_log, "MAX_OPEN", 3)
    reader, routes = DynamoLog("fe"), []
    for number in range(5):
        line = f"2026-08-20T04:00:30Z INFO s: Selected worker request_id=r{number} worker_id=42 dp_rank=0 logit=1"
        routes += reader.feed(line).get("route", [])
    assert [row["request_id"] for row in routes] == ["r0", "r1"]


def test_names_of_workers() -> None:
    """Rank 0 has the plain id; what is no id has no name."""
    assert worker_name(7) == worker_name("7", None) == worker_name(7, "Some(0)") == "7"
    assert worker_name(7, 2) == worker_name("7", "Some(2)") == "7/dp2"
    assert worker_name(None) is worker_name("worker-a") is None


@given(st.one_of(st.text(max_size=300), st.binary(max_size=300).map(lambda b: b.decode("latin-1"))))
def test_strange_lines_tell_nothing(text: str) -> None:
    """No line makes the reader fail."""
    assert DynamoLog("fe").feed(text) == {}


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
        max_leaves=12,
    ),
    st.sampled_from(
        ["request", "worker", "replay", "request_received_ms", "cached_tokens", "ttft_ms", "agent_context"]
    ),
)
def test_a_trace_with_wrong_values_gives_valid_rows_or_none(value: Any, where: str) -> None:
    """Any JSON in any place: rows that the contract takes, or no rows."""
    request: dict[str, Any] = {"request_id": "r", "request_received_ms": 1_795_976_000_000, "ttft_ms": 5.0}
    event: dict[str, Any] = {"schema": dynamo_log.TRACE_SCHEMA, "event_type": "request_end", "request": request}
    (event if where in ("request", "agent_context") else request)[where] = value
    for kind, rows in trace_rows(event, "fe").items():
        validate(kind, table_from_rows(kind, rows), FAR_NS)


def test_import_knows_the_trace_by_its_content_and_the_log_by_its_format(tmp_path: Path) -> None:
    """A trace needs no option; a log is JSON lines as others write them too, so --format says whose it is."""
    counts: dict[str, int] = {}
    for tables in open_source(SAMPLES / "trace.jsonl").chunks(ReadOptions(), Notes()):
        counts |= {kind: table.num_rows for kind, table in tables.items()}
    assert counts == {"request": 24, "route": 24}
    with pytest.raises(UnknownFormat):
        open_source(SAMPLES / "frontend.log.jsonl")
    (tables,) = open_source(SAMPLES / "frontend.log.jsonl", "dynamo-log").chunks(ReadOptions(worker="fe"), Notes())
    assert tables["route"].num_rows == 24
    quiet = tmp_path / "quiet.log"
    quiet.write_text("2026-08-20T04:00:30Z INFO nothing to see\n")
    with pytest.raises(UnknownFormat, match=r"none of 1 lines .*docs/engines/dynamo.md"):
        list(open_source(quiet, "dynamo-log").chunks(ReadOptions(), Notes()))
