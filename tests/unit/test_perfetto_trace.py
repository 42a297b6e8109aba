"""The trace for ui.perfetto.dev: each rule of the format, and each fact in its place, by hand."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector.perfetto.chrome_trace import ChromeTrace, Lanes
from collector.perfetto.export import trace_of_request, trace_of_requests
from engine_probe.errors import NotFound
from store.interface import Window
from store.open import open_store
from tests.store_rows import START_NS, batch, request

MS = 1_000_000


def at(ms: float) -> int:
    return START_NS + round(ms * MS)


def engine_request(request_id: str, arrival: float, first: float, last: float, **facts: Any) -> dict[str, Any]:
    spans = [
        {"phase": "queue", "start_ns": at(arrival), "end_ns": at(arrival + 2), "tokens": None},
        {"phase": "prefill", "start_ns": at(arrival + 2), "end_ns": at(first), "tokens": 100},
        {"phase": "decode", "start_ns": at(first), "end_ns": at(last), "tokens": 3},
    ]
    row = request(request_id, vantage="engine", worker="w0", spans=spans)
    row |= {"arrival_ns": at(arrival), "first_token_ns": at(first), "last_token_ns": at(last), "end_ns": at(last)}
    return row | {"at_ns": at(last)} | facts


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """Request a (0 to 50 ms) beside b (10 to 60 ms) on w0, routed; c on another worker at another time."""
    rows = {
        "request": [
            engine_request("a", 0, 20, 50, token_ns=[at(20), at(35), at(50)], token_counts=[1, 1, 2]),
            engine_request("b", 10, 40, 60),
            engine_request("c", 5000, 5020, 5050, worker="w1"),
            request(
                "a", vantage="client", arrival_ns=at(-1), first_token_ns=at(22), last_token_ns=at(51), end_ns=at(52)
            ),
        ],
        "step": [
            {"worker": "w0", "step": 1, "at_ns": at(20), "duration_s": 0.018, "prefill_tokens": 100, "blocks_used": 7},
            {"worker": "w0", "step": 2, "at_ns": at(35), "duration_s": 0.015, "decode_tokens": 1},
            {"worker": "w1", "step": 9, "at_ns": at(35), "duration_s": 0.015},
        ],
        "block": [
            {"worker": "w0", "at_ns": at(20), "change": "stored", "block_hash": n, "request_id": "a", "num_tokens": 16}
            for n in (1, 2, 3)
        ],
        "route": [
            {
                "request_id": "a",
                "router": "r",
                "policy": "random",
                "chosen": "w0",
                "at_ns": at(-0.5),
                "decision_s": 1e-4,
            }
        ],
        "transfer": [
            {
                "request_id": "a",
                "source_worker": "p",
                "target_worker": "w0",
                "outcome": "ok",
                "at_ns": at(20),
                "wait_s": 0.004,
                "wire_s": 0.006,
            }
        ],
        "mark": [{"at_ns": at(30), "mark": "deployed", "text": "v2"}],
    }
    with open_store(str(tmp_path / "s.duckdb")) as store:
        store.append(batch(rows))
        return json.loads(json.dumps(trace_of_request(store, "a", None)))  # what is written is what is judged


def tracks(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    """(pid, tid) -> "process / track"."""
    named = [event for event in document["traceEvents"] if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    return {
        (event["pid"], event["tid"]): f"{processes[event['pid']]} / {event['args']['name']}"
        for event in named
        if event["name"] == "thread_name"
    }


def on_tracks(document: dict[str, Any], phase: str) -> dict[str, list[tuple[Any, ...]]]:
    """Events of a letter by track, as (name, start ms after the trace's first moment[, length ms])."""
    names, found = tracks(document), defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == phase:
            length = (round(event["dur"] / 1000, 6),) if "dur" in event else ()
            found[names.get((event["pid"], event["tid"]), "")].append((event["name"], event["ts"] / 1000, *length))
    return dict(found)


def check_format(document: dict[str, Any]) -> None:
    """Every event has what its letter needs; slices of a track nest; arrows have both ends; nothing lies before 0."""
    names = tracks(document)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[str, set[int]] = {"s": set(), "f": set()}
    for event in document["traceEvents"]:
        assert event["ph"] in "MXiCsf"
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in names
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        elif event["ph"] in "sf":
            arrows[event["ph"]].add(event["id"])
    assert arrows["f"] <= arrows["s"]
    for lying in slices.values():
        open_until: list[float] = []
        for start, end in sorted(lying, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, "slices of one track cross"
            open_until.append(end)


def test_trace_keeps_the_rules_of_the_format(document: dict[str, Any]) -> None:
    """Letters, times, nesting, arrows."""
    check_format(document)
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["truncated"] == ""


def test_request_is_drawn_with_phases_tokens_and_what_shared_its_worker(document: dict[str, Any]) -> None:
    """The first moment is the client's arrival, 1 ms before the engine's."""
    drawn = on_tracks(document, "X")
    assert document["otherData"]["origin_ns"] == str(at(-1))
    assert drawn["worker w0 / requests 1"] == [
        ("a", 1.0, 50.0),
        ("queue", 1.0, 2.0),
        ("prefill", 3.0, 18.0),
        ("decode", 21.0, 30.0),
    ]
    assert drawn["worker w0 / other requests 1"][0] == ("b", 11.0, 50.0)
    assert drawn["clients' view / requests 1"] == [
        ("a", 0.0, 53.0),
        ("to first token", 0.0, 23.0),
        ("tokens", 23.0, 29.0),
        ("after the last token", 52.0, 1.0),
    ]
    assert drawn["worker w0 / steps"] == [("prefill", 3.0, 18.0), ("decode", 21.0, 15.0)]
    assert not any("w1" in track for track in drawn), "another worker's steps and requests have no part in it"
    tokens = on_tracks(document, "i")["worker w0 / requests 1"]
    assert tokens == [("token", 21.0), ("token", 36.0), ("2 tokens", 51.0)]


def test_blocks_routes_transfers_and_marks_have_tracks_of_their_own(document: dict[str, Any]) -> None:
    """Blocks that changed together are one moment with their number; an arrow leads from the decision to the request."""
    drawn, moments = on_tracks(document, "X"), on_tracks(document, "i")
    assert moments["worker w0 / blocks stored"] == [("3 blocks stored", 21.0)]
    assert drawn["routing by r / decisions 1"] == [("a to w0", 0.4, 0.1)]
    assert drawn["transfers / transfers 1"] == [("p to w0: ok", 11.0, 10.0), ("wait", 11.0, 4.0), ("wire", 15.0, 6.0)]
    assert drawn["marks / marks"] == [("deployed: v2", 31.0, 0.0)]
    assert on_tracks(document, "s")["routing by r / decisions 1"] == [("served", 0.4)]
    assert on_tracks(document, "f")["worker w0 / requests 1"] == [("served", 1.0)]
    counted = [event for event in document["traceEvents"] if event["ph"] == "C" and event["name"] == "KV blocks"]
    assert [event["args"] for event in counted] == [{"used": 7}], "what is unknown is not drawn as zero"


def test_list_is_drawn_without_requests_that_are_not_of_it(tmp_path: Path) -> None:
    """Rows of another run with the same ids stay out of it, too."""
    with open_store(str(tmp_path / "s.duckdb")) as store:
        store.append(batch({"request": [engine_request("a", 0, 20, 50), engine_request("b", 10, 40, 60)]}))
        store.append(batch({"request": [engine_request("a", 900, 920, 950, run_id="other")]}))
        drawn = on_tracks(trace_of_requests(store, ["a"], Window()), "X")
        with pytest.raises(NotFound, match="no row of request 'z' is stored in other"):
            trace_of_request(store, "z", Window(run_id="other"))
    assert [name for name, *_ in drawn["worker w0 / requests 1"]] == ["a", "queue", "prefill", "decode"]
    assert list(drawn) == ["worker w0 / requests 1"]


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 300)), max_size=60))
def test_lanes_are_as_many_as_go_on_at_once(stays: list[tuple[int, int]]) -> None:
    """Things that overlap never share a lane, and no lane more is made than the most that overlap."""
    trace = ChromeTrace()
    lanes = Lanes(trace, "p", "lane")
    for start, length in sorted(stays):
        lanes.lane(start, start + length).slice("x", start, start + length, {})
    document = trace.document({})
    check_format(document)
    at_once = [sum(start <= moment < start + max(length, 1) for start, length in stays) for moment, _ in stays]
    assert len(tracks(document)) == max(at_once, default=0)


def test_requests_that_end_in_another_order_than_they_came_keep_apart(tmp_path: Path) -> None:
    """The first to come is the last to end: two lanes, although rows are stored by their ends."""
    rows = [engine_request("long", 0, 20, 500), engine_request("short", 10, 40, 60), engine_request("next", 70, 80, 90)]
    with open_store(str(tmp_path / "s.duckdb")) as store:
        store.append(batch({"request": rows}))
        document = trace_of_requests(store, ["long", "short", "next"], Window())
    check_format(document)
    drawn = on_tracks(document, "X")
    assert [drawn[f"worker w0 / requests {lane}"][0][0] for lane in (1, 2)] == ["long", "short"]
    assert drawn["worker w0 / requests 2"][4][0] == "next"


def drawn_of(rows: dict[str, list[dict[str, Any]]], name: str, tmp_path: Path) -> dict[str, Any]:
    """The trace of one request of these rows, checked."""
    with open_store(str(tmp_path / "s.duckdb")) as store:
        store.append(batch(rows))
        document: dict[str, Any] = json.loads(json.dumps(trace_of_request(store, name, None)))
    check_format(document)
    return document


def test_overlapping_attempts_each_have_a_lane_and_the_arrow_of_their_decision(tmp_path: Path) -> None:
    """A hedged request: sent twice to one worker while the first attempt still runs."""
    attempts = [engine_request("a", 0, 20, 500, attempt=0), engine_request("a", 100, 120, 300, attempt=1)]
    decisions = [{"request_id": "a", "router": "r", "chosen": "w0", "at_ns": at(ms)} for ms in (-1, 99)]
    document = drawn_of({"request": attempts, "route": decisions}, "a", tmp_path)
    drawn, ends = on_tracks(document, "X"), on_tracks(document, "f")
    assert [drawn[f"worker w0 / requests {lane}"][0][1:] for lane in (1, 2)] == [(1.0, 500.0), (101.0, 200.0)]
    assert [ends[f"worker w0 / requests {lane}"] for lane in (1, 2)] == [[("served", 1.0)], [("served", 101.0)]]


def test_aborted_request_lasts_until_it_was_told(tmp_path: Path) -> None:
    """No token, no end: the instant of its row is the last that is known, and what its worker did until then is drawn."""
    row = request("a", vantage="engine", worker="w0", state="aborted", arrival_ns=at(0), at_ns=at(40))
    step = {"worker": "w0", "step": 1, "at_ns": at(30), "duration_s": 0.01}
    drawn = on_tracks(drawn_of({"request": [row], "step": [step]}, "a", tmp_path), "X")
    assert drawn["worker w0 / requests 1"] == [("a", 0.0, 40.0), ("to first token", 0.0, 40.0)]
    assert drawn["worker w0 / steps"] == [("step", 20.0, 10.0)]


@pytest.mark.parametrize("tokens", [1, 8000])
def test_one_token_and_8000_tokens_are_drawn_whole(tokens: int, tmp_path: Path) -> None:
    """A mark a token; one token has no stretch of tokens behind it."""
    instants = [at(20 + n) for n in range(tokens)]
    row = engine_request("a", 0, 20, 19 + tokens, token_ns=instants, spans=[], output_tokens=tokens)
    document = drawn_of({"request": [row]}, "a", tmp_path)
    assert len(on_tracks(document, "i")["worker w0 / requests 1"]) == tokens
    names = [name for name, *_ in on_tracks(document, "X")["worker w0 / requests 1"]]
    assert names == ["a", "to first token", *(["tokens"] if tokens > 1 else [])]
