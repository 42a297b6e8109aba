"""`kvscope proxy` before a real llama-server: what its rows say is what the server says in its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_probe.chain_hash import chain
from store.open import open_store
from tests.proxy_running import Proxy, running_proxy
from tests.servers import require, running_llama_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

QUESTION = "Say hello to the world, please, in five words or so, and then tell me what you would like to do."
MESSAGES = [{"role": "user", "content": QUESTION}]
USAGE = {"stream_options": {"include_usage": True}}
PLAIN = {"stream": True, "temperature": 0, "ignore_eos": True}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "cold": ("/v1/chat/completions", {"messages": MESSAGES, **PLAIN, "max_tokens": 12, **USAGE}),
    "warm": ("/v1/chat/completions", {"messages": MESSAGES, **PLAIN, "max_tokens": 12}),
    "whole": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6}),
    "text": ("/v1/completions", {"prompt": QUESTION, **PLAIN, "max_tokens": 8}),
    "native": ("/completion", {"prompt": QUESTION, **PLAIN, "n_predict": 8}),
    "message": ("/v1/messages", {"messages": MESSAGES, **PLAIN, "max_tokens": 8}),
    "response": ("/v1/responses", {"input": QUESTION, **PLAIN, "max_output_tokens": 8}),
    "bad": ("/v1/chat/completions", {"messages": QUESTION}),
}


class Story:
    """Answers by name, and the proxy's rows by request id, after it ended."""

    def __init__(self, folder: Path, url: str) -> None:
        self.answers: dict[str, bytes] = {}
        self.salt_file = folder / "salt"
        options = ("--tokenize", "--block-size", "8", "--salt-file", str(self.salt_file))
        with running_proxy(folder, [f"llama={url}"], *options) as proxy:
            self.proxy: Proxy = proxy
            for name, (path, document) in ASKED.items():
                status, headers, self.answers[name] = proxy.post(path, document, {"X-Request-Id": name})
                assert headers["x-request-id"] == name
                assert status == (400 if name == "bad" else 200), self.answers[name]
            self.tokens = json.loads(proxy.post("/tokenize", {"content": QUESTION, "add_special": True})[2])["tokens"]
        store = open_store(proxy.store, read_only=True)
        rows = store.query("SELECT * FROM request").to_pylist(maps_as_pydicts="strict")
        self.rows: dict[str, dict[str, Any]] = {row["request_id"]: row for row in rows}
        self.routes = store.query("SELECT request_id FROM route").column(0).to_pylist()
        self.checks = store.query('SELECT * FROM "check"').num_rows
        store.close()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Documents of a streamed answer, read without the proxy's readers."""
        lines = self.answers[name].decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    require("llama-server")
    with running_llama_server() as url:
        yield Story(tmp_path_factory.mktemp("proxy"), url)


def test_every_request_has_one_row_and_one_decision(story: Story) -> None:
    """Nothing is lost, doubled or taken for misplaced; the proxy ends well."""
    assert set(story.rows) == set(ASKED) == set(story.routes)
    assert story.checks == 0
    assert story.proxy.code == 0
    assert story.proxy.summary["states"] == {"failed": 1, "finished": len(ASKED) - 1}
    assert {row["engine"] for row in story.rows.values()} == {"llamacpp"}
    assert {row["worker"] for row in story.rows.values()} == {"llama"}


@pytest.mark.parametrize("name", ["cold", "warm", "text", "native"])
def test_timings_and_usage_are_the_servers_own(story: Story, name: str) -> None:
    """Prompt, cached, computed and output tokens, prefill and decode: as the last event tells them."""
    timings = story.events(name)[-1]["timings"]
    row = story.rows[name]
    assert row["cached_tokens"] == timings["cache_n"]
    assert row["computed_tokens"] == timings["prompt_n"]
    assert row["prompt_tokens"] == timings["cache_n"] + timings["prompt_n"]
    assert row["output_tokens"] == timings["predicted_n"]
    assert row["prefill_s"] == pytest.approx(timings["prompt_ms"] / 1e3)
    assert row["decode_s"] == pytest.approx(timings["predicted_ms"] / 1e3)


def test_the_second_prompt_is_served_from_the_cache(story: Story) -> None:
    """The load did what the other tests need."""
    assert story.rows["cold"]["cached_tokens"] == 0
    assert story.rows["warm"]["cached_tokens"] > 0


@pytest.mark.parametrize("name", ["text", "native", "message", "response"])
def test_instants_are_one_a_token(story: Story, name: str) -> None:
    """As many entries as tokens, each of one, in order, within the request."""
    row = story.rows[name]
    assert sum(row["token_counts"]) == row["output_tokens"] == 8
    assert row["token_ns"] == sorted(row["token_ns"])
    assert row["arrival_ns"] < row["first_token_ns"] < row["last_token_ns"] <= row["end_ns"]
    assert row["finish_reason"] in ("length", "stop")


def test_an_answer_in_one_piece_tells_no_first_token(story: Story) -> None:
    """Its usage is there all the same."""
    row = story.rows["whole"]
    assert row["first_token_ns"] is None
    assert row["output_tokens"] == json.loads(story.answers["whole"])["usage"]["completion_tokens"]


def test_a_bad_request_keeps_the_kind_of_error(story: Story) -> None:
    """400 with the server's type, without its words."""
    row = story.rows["bad"]
    assert (row["state"], row["http_status"], row["error"]) == ("failed", 400, "invalid_request_error 400")


def test_prompt_blocks_are_the_chain_of_the_servers_own_tokens(story: Story) -> None:
    """What the server tokenizes for anybody is what the row's blocks are made of; equal prompts share all of them."""
    salt = story.salt_file.read_bytes().rstrip(b"\n")
    blocks = chain(story.tokens, 8, salt)
    assert len(blocks) > 1
    assert story.rows["text"]["prompt_blocks"] == story.rows["native"]["prompt_blocks"] == blocks
    chats = [story.rows[name]["prompt_blocks"] for name in ("cold", "warm", "whole")]
    assert chats[0] == chats[1] == chats[2]
    assert len(chats[0]) == story.rows["cold"]["prompt_tokens"] // 8
    assert story.rows["message"]["prompt_blocks"] == story.rows["response"]["prompt_blocks"] == chats[0]
    assert story.proxy.summary["named_prompts"] == 7
