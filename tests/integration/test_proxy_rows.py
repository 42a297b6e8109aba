"""What the proxy records of requests that really passed through it: the row of each way in which one can end."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_probe.proxy.recording import Recording
from engine_probe.proxy.watch import Watch
from engine_probe.recording.recorder import Recorder
from engine_probe.sampling import Sampling
from engine_probe.sending.sink import MemorySink
from tests.proxy_answers import DONE, Event, chat, messages, responses, usage, wire
from tests.proxy_lab import Peer, Script, body_of, lab, post, run

PROMPT = json.dumps({"model": "m", "stream": True, "max_tokens": 7, "messages": [{"role": "user", "content": "hi"}]})


class Record:
    """A recorder in memory; `rows` once it is closed."""

    def __init__(self, rate: float = 1.0, **options: Any) -> None:
        self.sink = MemorySink()
        constants = {"request": {"vantage": "client"}}
        self.recorder = Recorder(self.sink, flush_s=0, constants=constants, sampling=Sampling(rate))
        self.recording = Recording(self.recorder, router="p", policy="least_outstanding", **options)

    def rows(self, kind: str = "request") -> list[dict[str, Any]]:
        """All rows of a kind, without nulls."""
        self.recorder.close()
        assert self.recorder.lost == {}
        table = self.sink.table(kind).to_pylist(maps_as_pydicts="strict")
        return [{name: value for name, value in row.items() if value is not None} for row in table]


def stream(*events: Event, headers: bytes = b"", names: bool = False) -> Script:
    """An upstream that answers with these events, one write each."""

    async def script(peer: Peer) -> None:
        while (await peer.request())[0]:
            await peer.send(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                + headers
                + b"Transfer-Encoding: chunked\r\n\r\n"
            )
            for data in wire(events, names=names):
                await peer.send(b"%x\r\n%b\r\n" % (len(data), data))
                await asyncio.sleep(0.002)
            await peer.send(b"0\r\n\r\n")

    return script


def whole(document: Any, status: bytes = b"200 OK", headers: bytes = b"", packed: bool = False) -> Script:
    """An upstream that answers with one document."""

    async def script(peer: Peer) -> None:
        body = json.dumps(document).encode()
        more = headers
        if packed:
            body, more = gzip.compress(body), more + b"Content-Encoding: gzip\r\n"
        while (await peer.request())[0]:
            head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (status, len(body))
            await peer.send(head + more + b"\r\n" + body)

    return script


def ask(record: Record, script: Script, request: bytes | None = None, **options: Any) -> bytes:
    """One request through a proxy; the answer."""
    answers = []

    async def story() -> None:
        async with lab(script, observers=record.recording, **options) as here:
            answers.append(await here.ask(request or post(PROMPT.encode())))

    run(story)
    return answers[0]


CHAT: Sequence[Event] = (
    chat(delta={"role": "assistant", "content": ""}),
    chat("a"),
    chat("b"),
    chat("", finish="stop"),
    usage(prompt_tokens=20, completion_tokens=2, prompt_tokens_details={"cached_tokens": 16}),
    DONE,
)


def test_a_streamed_chat_has_a_row_with_all_that_passed() -> None:
    """Ids, tags, instants in order, counts, usage, end; and the routing decision beside it."""
    record = Record(tags={b"x-team": "team", b"x-tenant-id": "tenant"})
    headers = (
        "X-Request-Id: 6f9619ff-8b86-d011-b42d-00c04fc964ff",
        "X-Tenant-Id: acme",
        "X-Team: search",
        "X-Kvscope-Product: shop",
        "X-Kvscope-Template: v7",
        "X-Kvscope-Session: s-1",
        "X-Kvscope-Turn: 3",
        "X-Kvscope-Cost-Center: cc",
        "X-Stainless-Retry-Count: 2",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    limits = b"x-ratelimit-remaining-tokens: 99\r\nopenai-processing-ms: 12\r\nX-Request-Id: req_9\r\n"
    ask(record, stream(*CHAT, headers=limits), post(PROMPT.encode(), "/openai/v1/chat/completions?x=1", *headers))
    (row,) = record.rows()
    instants = [row[name] for name in ("arrival_ns", "first_token_ns", "last_token_ns", "end_ns", "at_ns")]
    assert instants == sorted(instants)
    assert row["token_ns"] == [row["first_token_ns"], row["last_token_ns"]]
    assert row["end_ns"] == row["at_ns"]
    expected = {
        "worker": "up0",
        "request_id": "6f9619ff-8b86-d011-b42d-00c04fc964ff",
        "attempt": 2,
        "vantage": "client",
        "state": "finished",
        "model": "m",
        "tenant": "acme",
        "session_id": "s-1",
        "turn": 3,
        "cost_center": "cc",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "token_counts": [1, 1],
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "computed_tokens": 4,
        "output_tokens": 2,
        "finish_reason": "stop",
        "http_status": 200,
        "retry_count": 0,
        "labels": {
            "api": "chat",
            "stream": "true",
            "team": "search",
            "product": "shop",
            "template": "v7",
            "max_tokens": "7",
            "ratelimit_remaining_tokens": "99",
            "upstream_processing_ms": "12",
            "upstream_request_id": "req_9",
            "engine_request_id": "chatcmpl-1",
        },
    }
    assert {name: row[name] for name in expected} == expected
    (route,) = record.rows("route")
    assert (route["request_id"], route["chosen"], route["router"]) == (row["request_id"], "up0", "p")
    assert [one["worker"] for one in route["candidates"]] == ["up0"]
    assert record.rows("check") == record.rows("mark") == []


@pytest.mark.parametrize("form", ["chatcmpl-{}", "chatcmpl-{}-1f2e3d4c", "cmpl-{}-0", "cmpl-{}-0-1f2e3d4c"])
def test_the_row_has_the_id_under_which_vllm_reports_the_request(form: str) -> None:
    """vLLM puts prefixes and suffixes around the X-Request-Id that it got: its own record, normalised, is the row's id."""
    from engine_probe.adapters.vllm import normalise_request_id

    record = Record()
    seen: list[str] = []

    async def upstream(peer: Peer) -> None:
        head, _ = await peer.request()
        sent = head.partition(b"X-Request-Id: ")[2].partition(b"\r\n")[0].decode()
        seen.append(form.format(sent))
        await stream(*(({**event, "id": seen[0]}) for event in CHAT if isinstance(event, dict)))(_Replay(peer))

    ask(record, upstream)
    (row,) = record.rows()
    assert row["request_id"] == normalise_request_id(seen[0])
    assert "engine_request_id" not in row["labels"]
    assert row["state"] == "finished"


class _Replay(Peer):
    """A peer whose one request was read already."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer.reader, peer.writer)
        self._left = 1

    async def request(self) -> tuple[bytes, bytes]:
        self._left -= 1
        return (b"x", b"") if self._left >= 0 else (b"", b"")


def test_an_answer_in_one_piece_has_no_first_token_but_a_last() -> None:
    """Nobody saw the first token; the last came with the body. Also where the body is compressed."""
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m-2025",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 9},
    }
    for packed in (False, True):
        record = Record()
        ask(record, whole(document, packed=packed))
        (row,) = record.rows()
        assert (row["state"], row["finish_reason"], row["output_tokens"]) == ("finished", "length", 9)
        assert "first_token_ns" not in row
        assert "token_ns" not in row
        assert row["arrival_ns"] < row["last_token_ns"] <= row["end_ns"]
        assert row["labels"]["stream"] == "false"
        assert (row["model"], row["labels"]["requested_model"]) == ("m-2025", "m")


def test_a_large_answer_is_read_without_being_held() -> None:
    """Embeddings of megabytes: usage and model are picked while they pass."""
    vectors = [{"object": "embedding", "index": n, "embedding": [0.125] * 3000} for n in range(50)]
    record = Record()
    document = {"object": "list", "data": vectors, "model": "e", "usage": {"prompt_tokens": 50, "total_tokens": 50}}
    ask(record, whole(document), post(b'{"model": "e", "input": []}', "/v1/embeddings"))
    (row,) = record.rows()
    assert (row["labels"]["api"], row["model"], row["prompt_tokens"]) == ("embeddings", "e", 50)
    assert "last_token_ns" not in row
    assert row["state"] == "finished"


def test_a_prompt_of_a_hundred_megabytes_is_looked_at_without_being_held() -> None:
    """What stands behind it in the request is still found; memory is that of two reads."""
    import tracemalloc

    size, piece = 100 << 20, b"word " * 13107
    count = size // len(piece)
    before, after = b'{"messages": [{"role": "user", "content": "', b'"}], "model": "m", "max_tokens": 3}'
    length = len(before) + count * len(piece) + len(after)

    async def upstream(peer: Peer) -> None:
        await peer.head()
        left = length
        while left:
            left -= len(await peer.reader.read(1 << 20))
        await stream(*CHAT)(_Replay(peer))

    record = Record()
    peaks: list[int] = []

    async def story() -> None:
        async with lab(upstream, observers=record.recording) as here:
            client = await here.connect()
            await client.send(post(b"").replace(b"Content-Length: 0", b"Content-Length: %d" % length) + before)
            tracemalloc.start()
            for _ in range(count):
                client.writer.write(piece)
                await client.writer.drain()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            await client.send(after)
            await client.rest()

    run(story)
    (row,) = record.rows()
    assert (row["state"], row["model"], row["labels"]["max_tokens"]) == ("finished", "m", "3")
    assert peaks[0] < 16 << 20


@pytest.mark.parametrize(
    ("status", "state", "error"),
    [
        (b"429 Too Many Requests", "rejected", "rate_limit"),
        (b"503 No", "rejected", "rate_limit"),
        (b"400 Bad", "failed", "rate_limit"),
    ],
)
def test_a_refusal_keeps_its_status_its_kind_and_its_limits(status: bytes, state: str, error: str) -> None:
    """The engine's words are not kept, since they may quote the prompt."""
    record = Record()
    document = {"error": {"message": "you said: hi", "type": "rate_limit", "code": None}}
    ask(record, whole(document, status, b"Retry-After: 7\r\nanthropic-ratelimit-requests-remaining: 0\r\n"))
    (row,) = record.rows()
    assert (row["state"], row["error"], row["http_status"]) == (state, error, int(status[:3]))
    assert row["labels"]["retry_after"] == "7"
    assert row["labels"]["ratelimit_requests_remaining"] == "0"
    assert row["model"] == "m"


TGI_TIMES = b"x-validation-time: 3\r\nx-queue-time: 41\r\nx-inference-time: 90\r\nx-prompt-tokens: 12\r\n"


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        (TGI_TIMES, (0.003, 0.041, 12, "tgi")),
        (TGI_TIMES.replace(b": 41", b": \xb2"), (0.003, None, 12, "tgi")),
        (b"x-queue-time: 41\r\n", (None, None, None, None)),
    ],
)
def test_tgi_tells_its_times_in_the_head(headers: bytes, told: tuple[float | None, ...]) -> None:
    """Of an answer in one piece, in whole milliseconds; another server's header of one of these names is not read."""
    record = Record()
    ask(record, whole({"generated_text": "hi"}, b"200 OK", headers))
    (row,) = record.rows()
    assert tuple(row.get(name) for name in ("frontend_s", "queue_s", "prompt_tokens", "engine")) == told


def test_an_error_in_mid_stream_is_a_failure() -> None:
    """Status 200 went out long before."""
    record = Record()
    ask(record, stream(chat("a"), {"error": {"message": "hi", "type": "internal_error", "code": 500}}))
    (row,) = record.rows()
    assert (row["state"], row["error"], row["http_status"]) == ("failed", "internal_error 500", 200)
    assert len(row["token_ns"]) == 1


def test_a_stream_that_ends_without_its_end_is_a_failure() -> None:
    """Neither a finish reason nor [DONE]: whatever stands behind closed it properly, and the answer is cut off."""
    record = Record()
    ask(record, stream(chat("a"), chat("b")))
    (row,) = record.rows()
    assert (row["state"], row["error"]) == ("failed", "the stream ended without saying that it was at its end")


def test_an_upstream_that_breaks_off_is_a_failure_with_what_came() -> None:
    """The tokens until then are kept."""

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for data in wire([chat("a"), chat("b")]):
            await peer.send(b"%x\r\n%b\r\n" % (len(data), data))
        await asyncio.sleep(0.05)
        peer.reset()

    record = Record()
    ask(record, upstream)
    (row,) = record.rows()
    assert row["state"] == "failed"
    assert row["error"].startswith("the upstream broke off in mid-answer (")
    assert 1 <= len(row["token_ns"]) <= 2
    assert record.recording.states == {"failed": 1}


@pytest.mark.parametrize("after_tokens", [0, 2])
def test_a_client_that_goes_away_is_an_abort(after_tokens: int) -> None:
    """Before the first token or after some: aborted, with the instants until then."""
    gone = asyncio.Event()

    async def upstream(peer: Peer) -> None:
        await peer.request()
        if after_tokens:
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for data in wire([chat("a")] * after_tokens):
                await peer.send(b"%x\r\n%b\r\n" % (len(data), data))
        await peer.rest()
        gone.set()

    record = Record()

    async def story() -> None:
        async with lab(upstream, observers=record.recording) as here:
            client = await here.connect()
            await client.send(post(PROMPT.encode()))
            if after_tokens:
                for _ in range(after_tokens):
                    await client.reader.readuntil(b'"a"')
            else:
                await asyncio.sleep(0.05)
            client.close()
            await asyncio.wait_for(gone.wait(), 10)
            await asyncio.sleep(0.05)

    run(story)
    (row,) = record.rows()
    assert (row["state"], row["error"]) == ("aborted", "the client closed")
    assert len(row.get("token_ns", [])) == after_tokens
    assert ("first_token_ns" in row) == bool(after_tokens)
    assert row["labels"]["stream"] == "true"


def test_no_upstream_is_a_failure_that_tells_every_try() -> None:
    """502, each decision as a route row, each address as a mark of its worker."""
    record = Record()
    answers: list[bytes] = []

    async def story() -> None:
        async with lab(dead=2, observers=record.recording) as here:
            answers.append(await here.ask(post(PROMPT.encode())))

    run(story)
    (row,) = record.rows()
    assert (row["state"], row["http_status"], row["error"], row["retry_count"]) == (
        "failed",
        502,
        "no upstream answers",
        2,
    )
    assert row["fallback_reason"].count("Nothing answers at http://127.0.0.1:") == 2
    assert {route["chosen"] for route in record.rows("route")} == {"up0", "up1"}
    marks = record.rows("mark")
    assert sorted((mark["mark"], mark["worker"]) for mark in marks) == [("worker_down", "up0"), ("worker_down", "up1")]


def test_a_fall_back_is_told_in_the_row_and_as_two_decisions() -> None:
    """The worker is the one that served; why the first did not is said."""
    record = Record()
    ask(record, stream(*CHAT), dead=1, policy="round_robin")
    (row,) = record.rows()
    assert (row["worker"], row["retry_count"], row["state"]) == ("up1", 1, "finished")
    assert "Nothing answers at" in row["fallback_reason"]
    routes = record.rows("route")
    assert [route["chosen"] for route in routes] == ["up0", "up1"]
    assert [len(route["candidates"]) for route in routes] == [2, 1]
    assert {route["request_id"] for route in routes} == {row["request_id"]}


def test_what_is_no_inference_is_passed_on_and_not_recorded() -> None:
    """Health checks, model lists, tokenizers, files: no row."""
    record = Record()

    async def story() -> None:
        async with lab(whole({"ok": True}), observers=record.recording) as here:
            for path in ("/health", "/v1/models", "/tokenize", "/v1/files"):
                assert b"200 OK" in await here.ask(post(b"{}", path))
            await here.ask(b"GET /v1/chat/completions HTTP/1.1\r\nConnection: close\r\n\r\n")

    run(story)
    assert record.rows() == record.rows("route") == []


def test_an_answer_that_cannot_be_read_is_said_to_be() -> None:
    """br is passed on untouched; times of request and end stay, tokens are not observable."""

    async def upstream(peer: Peer) -> None:
        await peer.request()
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: br\r\nContent-Length: 4\r\n\r\n"
        )
        await peer.send(head + b"\x8b\x00\x80\x03")

    record = Record()
    assert body_of(ask(record, upstream)) == b"\x8b\x00\x80\x03"
    (row,) = record.rows()
    assert (row["state"], row["labels"]["unreadable"]) == ("finished", "content-encoding")
    assert "first_token_ns" not in row


def test_a_gzipped_stream_is_read_as_it_comes() -> None:
    """Each event is flushed by the server, so each has its instant."""
    packer = gzip.zlib.compressobj(wbits=31)  # type: ignore[attr-defined]

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n\r\n")
        for data in wire(CHAT):
            await peer.send(packer.compress(data) + packer.flush(gzip.zlib.Z_SYNC_FLUSH))  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        await peer.send(packer.flush())
        peer.close()

    record = Record()
    ask(record, upstream)
    (row,) = record.rows()
    assert (row["state"], row["token_counts"]) == ("finished", [1, 1])
    assert row["token_ns"][0] < row["token_ns"][1]


def test_looking_that_fails_costs_the_row_its_columns_and_the_client_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong inside the reading half, every byte is passed on, and the failure is counted."""

    def broken(*_: Any) -> None:
        raise ValueError("secret words")

    monkeypatch.setattr(Watch, "_take", broken)
    record = Record()
    answers: list[bytes] = []

    async def story() -> None:
        async with lab(stream(*CHAT), observers=record.recording) as here:
            answers.append(await here.ask(post(PROMPT.encode())))
            assert here.context.num_observer_failures == 1

    run(story)
    assert body_of(answers[0]).count(b"data: ") == len(CHAT)
    (row,) = record.rows()
    assert row["labels"]["unreadable"] == "body"
    assert row["state"] == "finished"


def test_a_misplaced_chunk_is_a_check_row_and_a_label() -> None:
    """The answer holds a piece of another one: both are named, the client gets the bytes all the same."""
    record = Record()
    events = [chat("a"), chat("b"), chat("c", id="chatcmpl-2"), chat("", finish="stop")]
    assert b"chatcmpl-2" in ask(record, stream(*events))
    (row,) = record.rows()
    (check,) = record.rows("check")
    assert (check["check"], check["outcome"], check["sample_ids"]) == ("leakage", "failed", [row["request_id"]])
    assert check["leakage_test_result"] == "the answer's id changes in mid-stream"
    assert row["labels"]["misplaced"] == "leakage"
    assert record.recording.num_misplaced == 1


def test_a_client_that_reads_slowly_is_told_apart_from_a_slow_engine() -> None:
    """While the client does not take more, the engine is not read: these seconds are labelled."""
    size = 24 << 20

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % size)
        piece = b": " + b"x" * 65533 + b"\n"
        for _ in range(size // len(piece)):
            await peer.send(piece)

    record = Record()

    async def story() -> None:
        async with lab(upstream, observers=record.recording) as here:
            client = await here.connect()
            await client.send(post(PROMPT.encode()))
            await client.head()
            async with asyncio.timeout(20):
                while not any(connection.is_write_paused for connection in here.context.clients):
                    await asyncio.sleep(0.01)
            await client.rest()

    run(story)
    (row,) = record.rows()
    assert float(row["labels"]["client_stall_s"]) > 0


def test_sampling_keeps_the_same_requests_in_every_kind() -> None:
    """By request id: what is left out has neither request nor route row, and the rate stands with what is kept."""
    record = Record(rate=0.5)
    ids = [f"request-{number}" for number in range(40)]
    kept = {name for name in ids if Sampling(0.5).keeps_request(name)}

    async def story() -> None:
        async with lab(whole({"choices": []}), observers=record.recording) as here:
            for name in ids:
                await here.ask(post(PROMPT.encode(), "/v1/chat/completions", f"X-Request-Id: {name}"))

    run(story)
    rows = record.rows()
    assert {row["request_id"] for row in rows} == {row["request_id"] for row in record.rows("route")} == kept
    assert 0 < len(kept) < 40
    assert {row["sample_rate"] for row in rows} == {0.5}
    assert record.recording.num_left_out == 40 - len(kept)


SECRETS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), min_size=6, max_size=30).map(
    lambda text: "SECRET words " + text
)


class _Logged(logging.Handler):
    """Keeps every record with all its fields, as text."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += repr(vars(record)) + record.getMessage()
        if record.exc_info:
            self.text += logging.Formatter().formatException(record.exc_info)


@settings(max_examples=25)
@given(
    secret=SECRETS,
    how=st.sampled_from(
        ["chat", "tools", "responses", "messages", "whole", "error", "late error", "rubbish", "broken"]
    ),
    breaks=st.booleans(),
)
def test_no_content_is_ever_recorded_or_logged(secret: str, how: str, breaks: bool) -> None:
    """A string that stands in prompt and answer, also in errors and in rubbish, is in no row and in no log line."""
    request = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": secret}], "user": secret, "prompt": secret}
    )
    call = {"index": 0, "id": "call_1", "function": {"name": secret, "arguments": secret}}
    scripts: dict[str, Script] = {
        "chat": stream(
            chat(secret), chat(secret, finish=secret), {**chat(secret), "id": secret, "model": secret}, DONE
        ),
        "tools": stream(chat(delta={"tool_calls": [call], "reasoning_content": secret}), chat(finish="tool_calls")),
        "responses": stream(*responses(secret, secret), names=True),
        "messages": stream(*messages(secret), names=True),
        "whole": whole({"id": "a", "choices": [{"index": 0, "message": {"content": secret}, "finish_reason": secret}]}),
        "error": whole({"error": {"message": secret, "type": secret, "code": secret}}, b"400 Bad"),
        "late error": stream(chat("a"), {"error": {"message": secret, "type": secret}}),
        "rubbish": stream(secret, f'{{"choices": {secret}', DONE),
        "broken": whole([secret, {"choices": secret}]),
    }
    record, logged = Record(), _Logged()
    root = logging.getLogger()
    level = root.level
    root.addHandler(logged)
    root.setLevel(logging.DEBUG)
    patch = pytest.MonkeyPatch()
    if breaks:
        patch.setattr("engine_probe.proxy.watch.read_event", _raise_with_content)
    try:
        answer = ask(record, scripts[how], post(request.encode(), "/v1/chat/completions", "X-Kvscope-Tenant: t"))
        kept = repr([record.rows(kind) for kind in ("request", "route", "check", "mark")])
    finally:
        patch.undo()
        root.removeHandler(logged)
        root.setLevel(level)
    assert b"SECRET" in answer
    assert "SECRET" not in kept
    assert "SECRET" not in logged.text


def _raise_with_content(reading: Any, name: bytes, data: bytes, now_ns: int) -> None:
    raise ValueError(data.decode("utf-8", "replace"))
