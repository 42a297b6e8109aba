"""The embedded engine's server under what clients and operators do to it: nothing hangs, no block leaks, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_probe.engine.server.assembly import ServerOptions
from engine_probe.errors import EngineError
from tests.engine_server import Running, ended, engine_server, launch, served_model

LONG: dict[str, Any] = {"prompt": [7] * 41, "max_tokens": 210, "ignore_eos": True, "temperature": 0}
"""With steps of 20 ms it takes four seconds: enough to be interrupted."""
SPINNING = {**LONG, "stream": True}


def pace(running: Running, step_s: float = 0.02) -> None:
    """Every step takes at least so long."""
    executor = running.assembled.engine.executor
    original = executor.execute

    def execute(*args: Any, **kwargs: Any) -> Any:
        time.sleep(step_s)
        return original(*args, **kwargs)

    running.ask(lambda engine: setattr(executor, "execute", execute))


def test_a_client_that_goes_away_in_mid_stream_is_aborted_and_leaves_no_block() -> None:
    """After its third chunk: the sequence ends long before its 210 tokens, its row says aborted, its blocks are free."""
    with engine_server() as running:
        pace(running)
        with running.client.stream("POST", "/v1/completions", json=SPINNING) as answer:
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
            assert running.ask(lambda engine: engine.num_running) == 1
        running.wait_until_empty()
        assert running.metric("vllm:request_success_total", finished_reason="abort") == 1
        assert running.metric("vllm:generation_tokens_total") < 210
    (row,) = running.sink.table("request").to_pylist()
    assert (row["state"], row["finish_reason"]) == ("aborted", "abort")
    assert row["output_tokens"] < 210


@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_goes_away_before_an_answer_in_one_piece_is_aborted(choices: int) -> None:
    """Nothing is being sent, and still it is noticed; also the choices that wait for the first."""
    with engine_server() as running:
        pace(running)
        body = json.dumps({**LONG, "n": choices}).encode()
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            running.wait_until(lambda: running.ask(lambda engine: engine.num_running))
        running.wait_until_empty()
        front, thread = running.assembled.front, running.assembled.thread
        assert (front.num_open, front._open_ids, thread._tickets) == (0, set(), {}), "something is remembered for ever"
    assert {row["state"] for row in running.sink.table("request").to_pylist()} == {"aborted"}


def test_a_client_that_goes_away_while_it_queues_is_taken_off_the_queue() -> None:
    """One seat: the second request waits, and its client leaves; the first goes on."""
    with engine_server(max_num_seqs=1) as running:
        pace(running)
        with running.client.stream("POST", "/v1/completions", json=SPINNING) as first:
            lines = first.iter_lines()
            next(lines)
            with httpx.Client(base_url=running.url, trust_env=False) as other, pytest.raises(httpx.ReadTimeout):
                other.post("/v1/completions", json=LONG, timeout=0.3)
            running.wait_until(lambda: running.ask(lambda engine: engine.num_waiting) == 0)
            assert running.ask(lambda engine: engine.num_running) == 1


def test_a_client_that_goes_away_in_the_middle_of_its_body_leaves_nothing() -> None:
    """No call is made of half a body."""
    with engine_server() as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{")
            time.sleep(0.1)
        assert running.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert running.assembled.front.num_calls == 1


def test_a_body_that_does_not_arrive_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """408 in OpenAI's shape once the time is up."""
    monkeypatch.setattr("engine_probe.engine.server.exchange.BODY_S", 0.1)
    with engine_server() as running:
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1])), timeout=20) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{")
            answer = sock.recv(2000)
        assert b" 408 " in answer.partition(b"\r\n")[0]
        assert running.assembled.front.num_calls == 0


def test_a_hundred_streams_at_once_each_get_their_own_answer() -> None:
    """More sequences than the pool holds at once: some wait, some give way, all say what they say alone."""

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        body = {"prompt": [number % 25, 3, 4, 5, 6], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        text = ""
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def all_of_them(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120, trust_env=False) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(100)))

    with engine_server() as running:
        alone = [
            running.complete([number, 3, 4, 5, 6], max_tokens=16, ignore_eos=True)["choices"][0]["text"]
            for number in range(25)
        ]
        texts = asyncio.run(all_of_them(running.url))
        assert texts == [alone[number % 25] for number in range(100)]
        running.wait_until_empty()


def test_a_slow_reader_holds_up_nobody_and_loses_nothing() -> None:
    """It reads nothing until another request was answered whole; then it finds every token."""
    with engine_server() as running, running.client.stream("POST", "/v1/completions", json=SPINNING) as slow:
        running.complete("quick", max_tokens=5)
        running.wait_until_empty()
        chunks = [json.loads(line[6:]) for line in slow.iter_lines() if line.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    (row,) = (row for row in running.sink.table("request").to_pylist() if row["prompt_tokens"] == 41)
    assert row["output_tokens"] == 210


def test_drain_lets_what_runs_finish_and_refuses_what_comes() -> None:
    """After the signal: a new request and the health check get 503, the open stream its end; then the server ends."""
    with engine_server() as running, contextlib.ExitStack() as stack:
        pace(running)
        stream = stack.enter_context(running.client.stream("POST", "/v1/completions", json=SPINNING))
        lines = stream.iter_lines()
        next(lines)
        with httpx.Client(base_url=running.url, trust_env=False) as other:
            assert other.get("/health").status_code == 200
            running.server.drain()
            refused = other.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            assert refused.json()["error"]["type"] == "server_error"
            assert other.get("/health").status_code == 503
        assert list(lines)[-2:] == ["data: [DONE]", ""]
        running.thread.join(20)
        assert not running.thread.is_alive()


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_done_when_the_drain_ends_is_told_so(stream: bool) -> None:
    """No time to drain: the open request ends with an error, not with a connection that breaks off."""
    with engine_server(drain_s=0.0) as running:
        pace(running)
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(
                httpx.post(
                    f"{running.url}/v1/completions", json={**LONG, "stream": stream}, timeout=30, trust_env=False
                )
            )
        )
        asking.start()
        running.wait_until(lambda: running.ask(lambda engine: engine.num_running))
        running.server.drain()
        asking.join(30)
        running.thread.join(20)
    (answer,) = answers
    assert answer.status_code == (200 if stream else 503)
    text = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
    assert "stopped before the request was done" in json.loads(text)["error"]["message"]
    assert {row["state"] for row in running.sink.table("request").to_pylist()} == {"aborted"}


def failing(running: Running, error: Exception, times: int) -> None:
    """The executor's next steps raise."""
    executor = running.assembled.engine.executor
    original = executor.execute
    left = [times]

    def execute(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return original(*args, **kwargs)

    running.ask(lambda engine: setattr(executor, "execute", execute))


def test_a_step_that_fails_costs_its_requests_and_not_the_engine() -> None:
    """500 with the engine's own words; the next request is answered; the row says failed; blocks add up."""
    with engine_server() as running:
        failing(running, EngineError("a step of 3 tokens ran out of memory on cpu"), 1)
        answer = running.client.post("/v1/completions", json=LONG)
        assert answer.status_code == 500
        assert "ran out of memory" in answer.json()["error"]["message"]
        running.wait_until_empty()
        assert running.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert running.metric("kvscope_engine_steps_failed_total") == 1
        assert running.metric("vllm:request_success_total", finished_reason="error") == 1
    assert [row["state"] for row in running.sink.table("request").to_pylist()] == ["failed", "finished"]


def test_an_engine_that_fails_twice_in_a_row_is_dead_and_says_so() -> None:
    """From then on 503, for requests and for the health check; nothing hangs."""
    with engine_server() as running:
        failing(running, RuntimeError("the device is gone"), 2)
        assert running.client.post("/v1/completions", json=LONG).status_code == 500
        assert running.client.post("/v1/completions", json=LONG).status_code == 500
        running.wait_until(lambda: running.client.get("/health").status_code == 503)
        answer = running.client.post("/v1/completions", json=LONG)
        assert answer.status_code == 503
        assert "the device is gone" in answer.json()["error"]["message"]


def test_text_that_cannot_be_made_costs_one_request() -> None:
    """A tokenizer that raises on a token: 500 for that request, its blocks come back, the others go on."""
    model = served_model()

    class Broken(type(model.tokenizer)):  # type: ignore[misc]
        def decode(self, token_ids: Any) -> str:
            raise ValueError("no such id")

    with engine_server(model) as running:
        original = model.tokenizer.__class__
        model.tokenizer.__class__ = Broken
        assert running.client.post("/v1/completions", json=LONG).status_code == 500
        running.wait_until_empty()
        model.tokenizer.__class__ = original
        assert running.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_request_past_the_engines_limit_of_time_is_told_so() -> None:
    """504, and the row says aborted for timeout."""
    with engine_server(timeout_s=0.05) as running:
        pace(running)
        answer = running.client.post("/v1/completions", json=LONG)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
    (row,) = running.sink.table("request").to_pylist()
    assert (row["state"], row["finish_reason"]) == ("aborted", "timeout")


def test_with_a_token_only_who_brings_it_is_answered() -> None:
    """As OpenAI's api key; health needs none."""
    with engine_server(options=ServerOptions(token="secret")) as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = running.client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert running.client.get("/health").status_code == 200
        running.client.headers["Authorization"] = "Bearer secret"
        assert running.client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}],
    ids=str,
)
def test_pages_of_other_sites_are_kept_out_without_a_token(headers: dict[str, str]) -> None:
    """A browser of this machine is no way in."""
    with engine_server() as running:
        assert running.client.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 403
        assert running.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_preempted_streams_say_what_they_say_alone() -> None:
    """A pool of 24 blocks and four requests of 9 each: some give way; texts, usage and counters hold."""
    with engine_server(served_model(num_blocks=24)) as running:
        body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
        prompts = [[number] * 12 for number in range(1, 5)]
        alone = [running.complete(prompt, **body)["choices"][0]["text"] for prompt in prompts]
        running.client.post("/reset_prefix_cache")
        answer = running.complete(prompts, **body)
        assert [choice["text"] for choice in answer["choices"]] == alone
        assert answer["usage"]["completion_tokens"] == 96
        assert running.metric("vllm:num_preemptions_total") > 0


def test_the_command_serves_records_and_stops_after_what_runs(tmp_path: Path) -> None:
    """SIGTERM in mid-stream: the stream ends as it should, the process with 0, and its rows can be read."""
    process, told = launch(
        "--record", str(tmp_path / "rows"), "--num-blocks", "64", "--salt-file", str(tmp_path / "salt")
    )
    try:
        body = {"prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{told['url']}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        code, said = ended(process)
    finally:
        process.kill()
    assert code == 0, said
    assert "stopped" in said
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "rows" / "kind=request").to_pylist()
    assert [(row["state"], row["output_tokens"]) for row in rows] == [("finished", 200)]


def test_a_server_that_is_killed_breaks_its_streams_off_and_starts_again(tmp_path: Path) -> None:
    """kill -9 in mid-stream: the client sees a broken stream, never a whole one; the port is free for the next."""
    process, told = launch("--salt-file", str(tmp_path / "salt"))
    body = {"prompt": "hello", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{told['url']}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.kill()
        with pytest.raises(httpx.HTTPError):
            list(lines)
    process.communicate(timeout=30)
    port = told["url"].rsplit(":", 1)[1]
    process, again = launch("--port", port, "--salt-file", str(tmp_path / "salt"))
    try:
        assert again["url"] == told["url"]
        assert httpx.get(f"{again['url']}/health", trust_env=False).status_code == 200
        process.send_signal(signal.SIGINT)
        assert ended(process)[0] == 0
    finally:
        process.kill()


def test_blocks_come_back_however_a_hundred_requests_end() -> None:
    """Read to the end, left after the head, left after some chunks, refused: nothing is held afterwards."""
    with engine_server(served_model(num_blocks=40)) as running:

        async def one(client: httpx.AsyncClient, number: int) -> None:
            body = {"prompt": [number % 7] * (1 + number % 90), "max_tokens": 1 + number % 50, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                for _ in range(number % 4 * 10):
                    if await anext(lines, None) is None:
                        break

        async def all_of_them() -> None:
            limits = httpx.Limits(max_connections=50)
            async with httpx.AsyncClient(base_url=running.url, limits=limits, timeout=60, trust_env=False) as client:
                await asyncio.gather(*(one(client, number) for number in range(100)))

        asyncio.run(all_of_them())
        running.wait_until_empty()
        front, thread = running.assembled.front, running.assembled.thread
        assert (front.num_open, front._open_ids, thread._tickets) == (0, set(), {}), "something is remembered for ever"
