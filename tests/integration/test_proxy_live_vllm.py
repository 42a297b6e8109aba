"""`kvscope proxy` before a real vLLM with the plugin inside: both write to one collector, and their rows are one request.

The engine gives every request an id made from the X-Request-Id that the proxy passed or made; the plugin's row and the
proxy's row must meet under it, and agree on every number that both of them know.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_probe.chain_hash import chain
from store.open import open_store
from tests import live_vllm
from tests.live_vllm import BLOCK_SIZE, MODEL_NAME, VllmServer
from tests.proxy_running import ROOT, Proxy, running_proxy
from tests.servers import require

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

PREFIX = [3 + i % 200 for i in range(96)]
TEXT = "the same words again and again, " * 5
COMMON = {"model": MODEL_NAME, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: dict[str, dict[str, Any]] = {
    "tokens": {**COMMON, **STREAM, "prompt": [*PREFIX, *range(210, 250)]},
    "again": {**COMMON, **STREAM, "prompt": [*PREFIX, *range(250, 300)]},
    "text": {**COMMON, **STREAM, "prompt": TEXT},
    "ids": {**COMMON, **STREAM, "prompt": TEXT, "return_token_ids": True},
    "two": {**COMMON, **STREAM, "prompt": TEXT, "n": 2, "temperature": 1.0},
    "whole": {**COMMON, "prompt": TEXT},
    "bad": {**COMMON, "prompt": TEXT, "max_tokens": -1},
}
STREAMED = ("tokens", "again", "text", "ids")


class Story:
    """All that happened; the store is read once everything has ended."""

    def __init__(self, folder: Path) -> None:
        live_vllm.refresh_probe()
        self.salt_file = folder / "salt"
        self.ids: dict[str, str] = {}
        self.answers: dict[str, bytes] = {}
        store = str(folder / "collected.duckdb")
        collector = _Collector(folder, store)
        server = VllmServer(
            folder / "engine.log",
            num_blocks=200,
            env={
                "KVSCOPE_URL": collector.url,
                "KVSCOPE_WORKER": "engine-0",
                "KVSCOPE_SPOOL_DIR": str(folder / "spool"),
            },
        )
        options = ("--tokenize", "--salt-file", str(self.salt_file), "--engine", "vllm")
        try:
            server.start()
            with running_proxy(folder, [f"engine-0={server.url}"], *options, to=collector.url) as proxy:
                self.proxy: Proxy = proxy
                for name, document in ASKED.items():
                    own = {"X-Request-Id": f"my-{name}"} if name in ("again", "ids") else {}
                    status, headers, self.answers[name] = proxy.post("/v1/completions", document, own)
                    assert status == (400 if name == "bad" else 200), self.answers[name]
                    self.ids[name] = headers["x-request-id"]
                self.tokens = json.loads(proxy.post("/tokenize", {"model": MODEL_NAME, "prompt": TEXT})[2])["tokens"]
                self.ids["cancelled"] = _cancel(proxy)
                _until(lambda: server.counter("vllm:num_requests_running") == 0)
                self.aborted = server.counter("vllm:request_success_total")
                time.sleep(1.5)
        finally:
            server.stop()
            server.kill()
            collector.stop()
        opened = open_store(store, read_only=True)
        rows = opened.query("SELECT * FROM request").to_pylist(maps_as_pydicts="strict")
        self.checks = opened.query('SELECT * FROM "check"').num_rows
        opened.close()
        self.clients = {row["request_id"]: row for row in rows if row["vantage"] == "client"}
        self.engines: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["vantage"] == "engine":
                self.engines.setdefault(row["request_id"], []).append(row)

    def client(self, name: str) -> dict[str, Any]:
        row: dict[str, Any] = self.clients[self.ids[name]]
        return row

    def engine(self, name: str) -> dict[str, Any]:
        (row,) = self.engines[self.ids[name]]
        return row

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.answers[name].decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class _Collector:
    def __init__(self, folder: Path, store: str) -> None:
        out = folder / "collector.out"
        command = [sys.executable, "-m", "collector.cli", "serve", "--port", "0", "--store", store, "--json"]
        with out.open("wb") as stdout, (folder / "collector.err").open("wb") as stderr:
            self._process = subprocess.Popen(command, stdout=stdout, stderr=stderr, cwd=ROOT)
        _until(lambda: out.read_text().rstrip().endswith("}"))
        self.url = json.loads(out.read_text())["url"]

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _cancel(proxy: Proxy) -> str:
    """A long request whose client goes away after its first tokens; its id."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    document = {**COMMON, **STREAM, "prompt": PREFIX, "max_tokens": 800}
    connection.request("POST", "/v1/completions", json.dumps(document), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.read(1024).count(b"data: ") > 1
    connection.close()
    answer.close()
    return str(answer.headers["X-Request-Id"])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    require("vllm")
    return Story(tmp_path_factory.mktemp("proxy"))


@pytest.mark.parametrize("name", [*STREAMED, "whole"])
def test_both_records_of_a_request_meet_and_agree(story: Story, name: str) -> None:
    """One row of the proxy and one of the plugin under the same id, with the same tokens, reason and worker."""
    client, engine = story.client(name), story.engine(name)
    for column in ("worker", "prompt_tokens", "output_tokens", "finish_reason", "model", "state", "engine"):
        assert client[column] == engine[column], column
    assert client["request_id"] == (f"my-{name}" if name in ("again", "ids") else story.ids[name])
    assert "engine_request_id" not in client["labels"]


@pytest.mark.parametrize("name", STREAMED)
def test_the_proxy_saw_the_first_token_no_sooner_than_the_engine_made_it(story: Story, name: str) -> None:
    """Durations compare across vantages: what the client waited is the engine's part and the way there and back."""
    client, engine = story.client(name), story.engine(name)
    waited = client["first_token_ns"] - client["arrival_ns"]
    assert waited >= engine["first_token_ns"] - engine["arrival_ns"]
    # The tiny model's tokens are bytes: half a rune has no text, and only ids tell that it came.
    assert name != "ids" or sum(client["token_counts"]) == 16
    assert client["token_counts"] is None or sum(client["token_counts"]) == client["output_tokens"] == 16
    assert client["arrival_ns"] < client["first_token_ns"] <= client["last_token_ns"] <= client["end_ns"]


def test_cached_tokens_are_the_engines(story: Story) -> None:
    """The second prompt shares three full blocks with the first: usage says so where it is not zero, the plugin always."""
    assert story.engine("tokens")["cached_tokens"] == 0
    assert story.client("again")["cached_tokens"] == story.engine("again")["cached_tokens"] == 3 * BLOCK_SIZE


def test_prompt_blocks_are_the_chain_of_the_engines_own_tokens(story: Story) -> None:
    """Block size from the engine's metrics, tokens from the request or from /tokenize, our own salted hash."""
    salt = story.salt_file.read_bytes().rstrip(b"\n")
    for name in ("tokens", "again"):
        assert story.client(name)["prompt_blocks"] == chain(ASKED[name]["prompt"], BLOCK_SIZE, salt)
    assert len(story.tokens) >= 2 * BLOCK_SIZE
    for name in ("text", "ids", "two", "whole"):
        assert story.client(name)["prompt_blocks"] == chain(story.tokens, BLOCK_SIZE, salt)
    shared = [a == b for a, b in zip(*(story.client(n)["prompt_blocks"] for n in ("tokens", "again")), strict=False)]
    assert shared[:3] == [True] * 3
    assert not any(shared[3:])


def test_two_choices_are_one_row_that_follows_one_of_them(story: Story) -> None:
    """n = 2: output tokens are of both, instants of one."""
    row = story.client("two")
    assert (row["labels"]["choices"], row["output_tokens"], row["state"]) == ("2", 32, "finished")
    chunks = [choice["index"] for event in story.events("two") for choice in event["choices"] if choice["text"]]
    assert len(row["token_ns"]) <= max(chunks.count(0), chunks.count(1))


def test_a_client_that_went_away_is_aborted_in_the_engine_too(story: Story) -> None:
    """The engine stopped long before its 800 tokens: it saw the cancel through the proxy."""
    row = story.client("cancelled")
    assert (row["state"], row["error"]) == ("aborted", "the client closed")
    assert 0 < len(row["token_ns"]) < 700
    for engine in story.engines.get(story.ids["cancelled"], []):
        assert engine["state"] == "aborted"
        assert engine["output_tokens"] < 800


def test_a_refused_request_keeps_the_kind_of_error(story: Story) -> None:
    """vLLM answered 400; what it said of the parameters is not kept."""
    row = story.client("bad")
    assert (row["state"], row["http_status"]) == ("failed", 400)
    assert "max_tokens" not in row["error"]


def test_a_real_stream_is_never_taken_for_misplaced(story: Story) -> None:
    """Also with two choices, and with ids of the client's own."""
    assert story.checks == 0
    assert story.proxy.summary["misplaced"] == 0
    assert story.proxy.code == 0
