"""`kvscope diagnose` on rows of the proxy alone: it judges what a client felt, and names nothing that it cannot see.

The instants are those of a simulated engine; the rows are made by the proxy's own reading half, which is given the chunks of
each answer at these instants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from collector.terminal.sinks import StoreSink
from diagnosis.observability import judgeable
from engine_probe.adapters.provides import visible
from engine_probe.clock import Clock
from engine_probe.proxy.heads import parse_request, parse_response
from engine_probe.proxy.recording import Recording
from engine_probe.proxy.upstreams import Choice, parse_upstream
from engine_probe.recording.recorder import Recorder
from store.open import open_store
from tests.conftest import Ended
from tests.diagnosed import runs, shifted
from tests.proxy_answers import chat, usage, wire
from tests.simulate import Rows, Setup

SETUP = Setup(num_requests=400)
FAULTS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "quiet": {"seed": 2},
    "slow": {"slow": 1.8},
    "load": {"rate": 14.0},
}
HOUR_S = 3600.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
UPSTREAM = parse_upstream("w0=http://127.0.0.1:1")


def record(rows: Rows, recording: Recording, *, tells_cache: bool) -> None:
    """Pass each request of the simulation by the proxy's eyes."""
    answer = parse_response(HEAD)
    for row in rows["request"]:
        request = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: {row['request_id']}\r\n\r\n"
        arrival = row["arrival_ns"]
        watch = recording.observe(parse_request(request.encode()), row["request_id"], arrival)
        assert watch is not None
        watch.routed(Choice(UPSTREAM, []), arrival, arrival)
        watch.request_pieces([b'{"model": "m", "stream": true}'])
        watch.answered(answer, arrival + 1)
        for at in row["token_ns"]:
            watch.payload(wire([chat("x")]), at)
        counts = {"prompt_tokens": row["prompt_tokens"], "completion_tokens": row["output_tokens"]}
        if tells_cache:
            counts["prompt_tokens_details"] = {"cached_tokens": row["cached_tokens"]}
        watch.payload(wire([chat(finish="length"), usage(**counts), "[DONE]"]), row["end_ns"])
        watch.ended("complete", None, None, row["end_ns"])


@pytest.fixture(scope="module", params=[False, True], ids=["proxy", "proxy+answers"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bool, dict[str, str]]:
    """Store with each run an hour after the one before, live rows of the proxy alone; the windows by name."""
    path = str(tmp_path_factory.mktemp("proxied") / "s.duckdb")
    clock = Clock(lambda: 1_781_000_000 * 10**9, lambda: 1_781_000_000 * 10**9)
    recorder = Recorder(
        StoreSink(open_store(path), "proxy"),
        flush_s=0,
        clock=clock,
        constants={"request": {"vantage": "client"}},
    )
    recording = Recording(recorder, router="p", policy="round_robin")
    windows = {}
    for number, (name, rows) in enumerate(runs(FAULTS, SETUP).items()):
        moved = shifted(rows, number * HOUR_S)
        record(moved, recording, tells_cache=request.param)
        begin = min(row["arrival_ns"] for row in moved["request"])
        end = max(row["arrival_ns"] for row in moved["request"]) + 1
        windows[name] = f"{begin}/{end}"
        recorder.flush()
    recorder.close()
    assert recorder.lost == {}
    return path, request.param, windows


@pytest.fixture
def verdict(seen: tuple[str, bool, dict[str, str]], kvscope: Callable[..., Ended]) -> Callable[..., dict[str, Any]]:
    def ask(suspect: str, *options: str) -> dict[str, Any]:
        path, _, windows = seen
        asked = ("--baseline", windows["base"], "--suspect", windows[suspect], "--store", path, "--json", *options)
        ended = kvscope("diagnose", *asked)
        assert ended.code in (0, 1), ended.err
        document: dict[str, Any] = json.loads(ended.out)
        return document

    return ask


def names(seen: tuple[str, bool, dict[str, str]]) -> frozenset[str]:
    return visible("any", ["proxy", "answers"] if seen[1] else ["proxy"])


@pytest.mark.parametrize(("fault", "metric"), [("slow", "ttft"), ("slow", "tpot"), ("load", "ttft")])
def test_a_change_is_judged_at_the_clients_vantage_and_no_further(
    seen: tuple[str, bool, dict[str, str]], verdict: Callable[..., dict[str, Any]], fault: str, metric: str
) -> None:
    """The change has its size, its rows sum to it, and no cause is named that these rows cannot show."""
    found = verdict(fault, "--metric", metric)
    assert found["vantage"] == "client"
    change = found["delta"]["mean_s"]["value"]
    assert change > 0
    assert sum(row["mean_s"] for row in found["attribution"]) == pytest.approx(change, abs=1e-6)
    can = judgeable(names(seen))
    assert metric in can.metrics
    assert {cause["cause"] for cause in found["causes"]} <= set(can.causes)
    blind = {one["cause"] for one in found["excluded"] if "not observable here" in one["because"]}
    blind |= {one["cause"] for one in found.get("not_observable", [])}
    assert {"admission_blocked_on_blocks", "preemption_recompute", "premature_eviction"} <= blind
    assert all(check["status"] != "contradiction" for check in found["quality"])


def test_a_quiet_pair_names_nothing(verdict: Callable[..., dict[str, Any]]) -> None:
    """Another seed of the same load."""
    found = verdict("quiet")
    assert (found["status"], found["causes"]) == ("no_change", [])


def test_the_rows_are_as_the_simulation_was(seen: tuple[str, bool, dict[str, str]]) -> None:
    """TTFT, tokens and counts that diagnosis reads are those that were passed by."""
    path, tells_cache, windows = seen
    store = open_store(path, read_only=True)
    begin, end = map(int, windows["base"].split("/"))
    rows = store.query(
        "SELECT * FROM request WHERE arrival_ns >= ? AND arrival_ns < ? ORDER BY arrival_ns, request_id", [begin, end]
    ).to_pylist()
    store.close()
    truth = sorted(runs({"base": {}}, SETUP)["base"]["request"], key=lambda row: (row["arrival_ns"], row["request_id"]))
    assert len(rows) == len(truth)
    for ours, theirs in zip(rows, truth, strict=True):
        for column in ("request_id", "arrival_ns", "first_token_ns", "last_token_ns", "prompt_tokens", "output_tokens"):
            assert ours[column] == theirs[column], column
        assert sum(ours["token_counts"]) == theirs["output_tokens"]
        assert ours["cached_tokens"] == (theirs["cached_tokens"] if tells_cache else None)
