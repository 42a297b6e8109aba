"""Naming prompts' blocks: what each engine is asked, what is refused, and that nothing waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from engine_probe.chain_hash import chain
from engine_probe.proxy.heads import RequestHead, parse_request
from engine_probe.proxy.tokenizer import NoTokens, Tokenizer
from engine_probe.proxy.tokenizing import MAX_BODY_BYTES, Job, Tokenizing
from engine_probe.proxy.upstreams import Upstream, parse_upstream
from engine_probe.recording.request_rows import RequestRow

SALT = b"salt"
PAGE = '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="4",engine="0"} 1.0\n'
Answers = Callable[[str, Any, dict[str, str]], Any]


def head(path: str = "/v1/chat/completions", *headers: str) -> RequestHead:
    return parse_request("\r\n".join([f"POST {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode())


@pytest.fixture
def engine() -> Iterator[Callable[[Answers], Upstream]]:
    """Start an engine whose answers a function of (path, JSON or None, headers) gives; None is a 404."""
    servers = []

    def start(answers: Answers) -> Upstream:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                length = int(self.headers.get("content-length", 0))
                asked = json.loads(self.rfile.read(length)) if length else None
                found = answers(self.path, asked, {k.lower(): v for k, v in self.headers.items()})
                body = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return parse_upstream(f"w0=http://127.0.0.1:{server.server_address[1]}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def vllm(path: str, asked: Any, headers: dict[str, str]) -> Any:
    """vLLM: a token for each letter, 99 before a chat, 1 before a text where special tokens are wanted."""
    if path == "/version":
        return {"version": "0.33.0"}
    if path == "/metrics":
        return PAGE
    if path == "/tokenize" and "messages" in asked:
        text = "".join(message["content"] for message in asked["messages"])
        return {"count": 0, "max_model_len": 99, "tokens": [99, *map(ord, text)]}
    if path == "/tokenize":
        return {"tokens": [*([1] if asked["add_special_tokens"] else []), *map(ord, asked["prompt"])]}
    return None


def llama(path: str, asked: Any, headers: dict[str, str]) -> Any:
    if path == "/props":
        return {"default_generation_settings": {}, "total_slots": 1}
    if path == "/apply-template":
        return {"prompt": "<" + "".join(message["content"] for message in asked["messages"]) + ">"}
    if path == "/tokenize":
        assert asked["add_special"] is asked["parse_special"] is True
        return {"tokens": [7, *map(ord, asked["content"])]}
    return None


def sglang(path: str, asked: Any, headers: dict[str, str]) -> Any:
    if path == "/model_info":
        return {"model_path": "m"}
    if path == "/server_info":
        return {"page_size": 64}
    if path == "/tokenize":
        return {"tokens": [*map(ord, asked["prompt"])], "count": 1}
    return None


CHAT = {"model": "m", "messages": [{"role": "user", "content": "ab"}]}


@pytest.mark.parametrize(
    ("answers", "asked", "tokens", "block_size"),
    [
        (vllm, CHAT, [99, 97, 98], 4),
        (vllm, {"model": "m", "prompt": "ab"}, [1, 97, 98], 4),
        (vllm, {"model": "m", "prompt": ["ab"], "add_special_tokens": False}, [97, 98], 4),
        (vllm, {"prompt": [5, 6, 7]}, [5, 6, 7], 4),
        (vllm, {"prompt": [[5, 6]]}, [5, 6], 4),
        (vllm, {"messages": [{"role": "user", "content": "a"}], "tools": None}, [99, 97], 4),
        (llama, CHAT, [7, 60, 97, 98, 62], 16),
        (llama, {"prompt": "ab"}, [7, 97, 98], 16),
        (sglang, {"text": "ab"}, [97, 98], 64),
        (sglang, {"input_ids": [5, 6]}, [5, 6], 64),
    ],
)
def test_each_engine_is_asked_in_its_own_words(
    engine: Callable[[Answers], Upstream], answers: Answers, asked: Any, tokens: list[int], block_size: int
) -> None:
    """Which one it is, and the size of its blocks, is found out once; ids that came as ids are not asked for."""
    paths: list[str] = []

    def noting(path: str, body: Any, headers: dict[str, str]) -> Any:
        paths.append(path)
        return answers(path, body, headers)

    tokenizer = Tokenizer(engine(noting))
    for _ in range(2):
        assert tokenizer.tokens(head(), json.dumps(asked).encode()) == tokens
    assert tokenizer.block_size == block_size
    assert paths.count("/version") == 1
    tokenizer.close()


@pytest.mark.parametrize(
    ("path", "asked", "tokens"),
    [
        ("/v1/messages", {"system": "s", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 1}, b"sab"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}], "tools": []},
            b"ab",
        ),
        ("/v1/responses", {"instructions": "s", "input": "ab"}, b"sab"),
        ("/v1/responses/", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "ab"}]}]}, b"ab"),
    ],
)
def test_messages_and_responses_are_asked_for_as_the_chat_they_become(
    engine: Callable[[Answers], Upstream], path: str, asked: Any, tokens: bytes
) -> None:
    """Instructions first, then the messages; the engine's template is applied by the engine."""
    tokenizer = Tokenizer(engine(vllm))
    assert tokenizer.tokens(head(path), json.dumps({"model": "m", **asked}).encode()) == [99, *tokens]
    tokenizer.close()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": "secret"}]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "secret"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]}),
        ("/v1/messages", {"messages": [{"role": "tool", "content": "a"}]}),
        ("/v1/messages", {"messages": []}),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": "a"}]}),
        ("/v1/responses", {"input": [3]}),
        ("/v1/responses", {}),
    ],
)
def test_what_each_engine_turns_differently_is_refused(
    engine: Callable[[Answers], Upstream], path: str, asked: Any
) -> None:
    """Tools, images, several parts, earlier answers: no guess."""
    tokenizer = Tokenizer(engine(vllm))
    with pytest.raises(NoTokens, match="not text alone"):
        tokenizer.tokens(head(path), json.dumps(asked).encode())
    tokenizer.close()


def test_the_block_size_that_was_given_wins(engine: Callable[[Answers], Upstream]) -> None:
    """--block-size is for engines that do not tell theirs, and for comparing across engines."""
    tokenizer = Tokenizer(engine(vllm), 32)
    tokenizer.tokens(head(), json.dumps(CHAT).encode())
    assert tokenizer.block_size == 32
    tokenizer.close()


def test_the_requests_own_key_is_used(engine: Callable[[Answers], Upstream]) -> None:
    """The proxy has no keys of its own."""
    keys: set[tuple[str | None, str | None]] = set()

    def keyed(path: str, asked: Any, headers: dict[str, str]) -> Any:
        keys.add((headers.get("authorization"), headers.get("x-api-key")))
        return vllm(path, asked, headers)

    tokenizer = Tokenizer(engine(keyed))
    request = head("/v1/chat/completions", "Authorization: Bearer k", "X-Api-Key: j", "Cookie: c")
    tokenizer.tokens(request, json.dumps(CHAT).encode())
    assert keys == {("Bearer k", "j")}
    tokenizer.close()


@pytest.mark.parametrize(
    ("answers", "asked", "words"),
    [
        (vllm, b"{", "not JSON"),
        (vllm, b"[]", "not an object"),
        (vllm, b"{}", "not one text"),
        (vllm, b'{"prompt": ["secret", "secret"]}', "not one text"),
        (vllm, b'{"messages": [{"content": [{"type": "image_url", "image_url": "secret"}]}]}', "not text alone"),
        (lambda path, asked, headers: None, b'{"prompt": "secret"}', "none that is known"),
        (lambda path, asked, headers: {"version": "1"}, b'{"prompt": "secret"}', "holds no tokens"),
        (
            lambda path, asked, headers: {"version": "1", "tokens": ["secret"]},
            b'{"prompt": "secret"}',
            "holds no tokens",
        ),
        (lambda p, a, h: {"version": "1"} if p == "/version" else None, b'{"prompt": "secret"}', "answers 404"),
        (lambda path, asked, headers: "<html>secret", b'{"prompt": "secret"}', "none that is known"),
    ],
)
def test_what_cannot_be_tokenized_as_the_engine_would_is_refused(
    engine: Callable[[Answers], Upstream], answers: Answers, asked: bytes, words: str
) -> None:
    """Never a guess, and no content in the reason."""
    tokenizer = Tokenizer(engine(answers))
    with pytest.raises(NoTokens, match=words) as refused:
        tokenizer.tokens(head(), asked)
    assert "secret" not in str(refused.value)
    tokenizer.close()


def test_an_engine_that_is_away_is_a_reason() -> None:
    """Nobody listens."""
    with pytest.raises(NoTokens, match="does not answer"):
        Tokenizer(parse_upstream("http://127.0.0.1:1")).tokens(head(), json.dumps(CHAT).encode())


UPSTREAM = parse_upstream("w0=http://127.0.0.1:1")


class Fixed(Tokenizer):
    """Gives the tokens of `prompt` once `gate` is open."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        super().__init__(UPSTREAM, 2)
        self.gate = gate

    def tokens(self, head: RequestHead, body: bytes) -> list[int]:
        if self.gate is not None:
            assert self.gate.wait(10)
        if body == b"boom":
            raise ValueError("secret")
        tokens: list[int] = json.loads(body)
        return tokens


def job(tokenizing: Tokenizing, body: bytes, path: str = "/v1/chat/completions") -> Job:
    made = tokenizing.new_job(head(path))
    assert made is not None
    made.keep(body)
    tokenizing.submit(made, UPSTREAM)
    return made


def row(prompt_tokens: int | None = None) -> RequestRow:
    return RequestRow({"request_id": "r"} | ({} if prompt_tokens is None else {"prompt_tokens": prompt_tokens}))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_row_gets_the_chain_hashes_of_its_full_blocks() -> None:
    """Whether the request ended before or after its prompt was named."""
    gate = threading.Event()
    tokenizing = Tokenizing(SALT, lambda upstream: Fixed(gate))
    rows: list[RequestRow] = []
    early, late = job(tokenizing, b"[1, 2, 3, 4, 5]"), job(tokenizing, b"[1, 2]")
    tokenizing.complete(early, row(5), rows.append)
    assert rows == []
    gate.set()
    wait_for(lambda: late.is_done)
    tokenizing.complete(late, row(), rows.append)
    tokenizing.close()
    blocks = [one.columns["prompt_blocks"] for one in rows]
    assert blocks == [chain([1, 2, 3, 4, 5], 2, SALT), chain([1, 2], 2, SALT)]
    assert [len(one) for one in blocks] == [2, 1]
    assert blocks[0][0] == blocks[1][0]
    assert (tokenizing.num_named, dict(tokenizing.left_out)) == (2, {})
    assert early.body == late.body == []


def test_tokens_that_the_engine_did_not_count_are_not_its_prompt() -> None:
    """Its usage says 7, its tokenizer 5: another template was used, so the blocks would join with nothing."""
    tokenizing = Tokenizing(SALT, lambda upstream: Fixed())
    rows: list[RequestRow] = []
    tokenizing.complete(job(tokenizing, b"[1, 2, 3, 4, 5]"), row(7), rows.append)
    tokenizing.close()
    assert "prompt_blocks" not in rows[0].columns
    assert dict(tokenizing.left_out) == {"the engine counted other tokens": 1}


@pytest.mark.parametrize(("counted", "named"), [(2, 1), (None, 0), (3, 0)])
def test_a_prompt_in_another_form_is_named_only_where_its_count_agrees(counted: int | None, named: int) -> None:
    """What chat the engine made of it is our reading: without the engine's own count nothing speaks for it."""
    tokenizing = Tokenizing(SALT, lambda upstream: Fixed())
    rows: list[RequestRow] = []
    tokenizing.complete(job(tokenizing, b"[1, 2]", "/v1/messages"), row(counted), rows.append)
    tokenizing.close()
    assert (len(rows), tokenizing.num_named) == (1, named)


def test_what_comes_too_fast_or_too_large_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and no row waits for what will not come."""
    monkeypatch.setattr("engine_probe.proxy.tokenizing.MAX_JOBS", 2)
    gate = threading.Event()
    tokenizing = Tokenizing(SALT, lambda upstream: Fixed(gate))
    rows: list[RequestRow] = []
    large = tokenizing.new_job(head())
    assert large is not None
    for _ in range(5):
        large.keep(b"x" * (MAX_BODY_BYTES // 4))
    assert large.body == []
    tokenizing.submit(large, UPSTREAM)
    jobs = [large, *(job(tokenizing, b"[1, 2]") for _ in range(4))]
    for one in jobs:
        tokenizing.complete(one, row(), rows.append)
    assert len(rows) == 3
    gate.set()
    tokenizing.close()
    assert len(rows) == 5
    assert dict(tokenizing.left_out) == {"too large": 1, "too many at once": 2}


def test_a_failure_names_its_kind_alone(caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error's text may quote a prompt."""
    tokenizing = Tokenizing(SALT, lambda upstream: Fixed())
    rows: list[RequestRow] = []
    tokenizing.complete(job(tokenizing, b"boom"), row(), rows.append)
    tokenizing.close()
    assert dict(tokenizing.left_out) == {"ValueError": 1}
    assert "secret" not in caplog.text
    assert len(rows) == 1


def test_what_is_left_at_the_end_goes_out_without_blocks() -> None:
    """Stopping waits a bounded time, then every row is written as it is."""
    gate = threading.Event()
    tokenizing = Tokenizing(SALT, lambda upstream: Fixed(gate))
    rows: list[RequestRow] = []
    for _ in range(3):
        tokenizing.complete(job(tokenizing, b"[1, 2]"), row(), rows.append)
    threading.Timer(0.2, gate.set).start()
    tokenizing.close(timeout_s=0.05)
    wait_for(lambda: len(rows) == 3)


def test_only_prompts_that_can_be_named_are_kept() -> None:
    """Embeddings, other paths and compressed requests cost no memory."""
    tokenizing = Tokenizing(SALT, lambda upstream: Fixed())
    assert tokenizing.new_job(head("/v1/embeddings")) is None
    assert tokenizing.new_job(head("/v1/messages/count_tokens")) is None
    assert tokenizing.new_job(head("/v1/completions", "Content-Encoding: gzip")) is None
    tokenizing.close()
