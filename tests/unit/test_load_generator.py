"""The load generator against a small endpoint of ours: what it sends, when, and what it writes down of every kind of answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine_probe.clock import Clock
from engine_probe.engine.traffic.call import Call, made_up_blocks
from engine_probe.errors import EngineUnreachable, UnknownFormat, UsageError
from engine_probe.load.generator import Ask, closed_loop, open_loop
from engine_probe.load.openai_client import Endpoint, OpenAiClient, path_of, sampling
from engine_probe.load.prompts import PromptWriter
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate
from tests.scripted_openai import ScriptedOpenAi
from tests.servers import free_port

MS = 1_000_000


@pytest.fixture
def server() -> Iterator[ScriptedOpenAi]:
    """One that behaves."""
    running = ScriptedOpenAi()
    yield running
    running.stop()


def call(number: int, *, at_ns: int = 0, shared: int = 4, own: int = 16, output: int = 4) -> Call:
    """`shared` blocks that all have, then its own."""
    blocks = [*made_up_blocks(1, shared), *made_up_blocks(100 + number, own // 16)]
    return Call(f"r1-{number:06d}", at_ns, 16 * shared + own, output, blocks, prefix_hash=7, labels={"repeat": "1"})


def ask(made: Call, kind: str = "words", salt: str = "") -> Ask:
    return Ask(made, path_of(kind), {**PromptWriter(kind).body(made, salt), **sampling(made.output_tokens, seed=5)})


def rows_of(server: ScriptedOpenAi, asks: list[Ask], in_flight: int | None = None, **more: Any) -> list[dict[str, Any]]:
    """What came of these calls."""

    async def story() -> list[dict[str, Any]]:
        async with OpenAiClient(Endpoint(server.url, "m", **more), Clock()) as client:
            client.model = "m"
            return await (open_loop(client, asks) if in_flight is None else closed_loop(client, asks, in_flight))

    return asyncio.run(story())


def checked(endpoint: Endpoint) -> dict[str, Any]:
    """What the endpoint says of itself."""

    async def story() -> dict[str, Any]:
        async with OpenAiClient(endpoint, Clock()) as client:
            return await client.check()

    return asyncio.run(story())


def test_a_row_is_what_the_client_saw(server: ScriptedOpenAi) -> None:
    """Four chunks, four instants, each one token; prompt and cached tokens as the usage says; the row keeps the contract."""
    first, second = rows_of(server, [ask(call(0)), ask(call(1))], in_flight=1)
    validate("request", table_from_rows("request", [first, second]), time.time_ns())
    assert (first["state"], first["vantage"], first["http_status"], first["finish_reason"]) == (
        "finished",
        "client",
        200,
        "length",
    )
    assert (first["prompt_tokens"], first["output_tokens"], first["cached_tokens"]) == (80, 4, 0)
    assert second["cached_tokens"] == 64
    assert len(second["token_ns"]) <= 4
    assert sum(second["token_counts"]) == 4
    instants = [second["arrival_ns"], second["first_token_ns"], second["last_token_ns"], second["end_ns"]]
    assert instants == sorted(instants)
    assert second["labels"]["repeat"] == "1"
    assert second["prefix_hash"] == 7


def test_what_fixes_an_answer_is_sent(server: ScriptedOpenAi) -> None:
    """Length, temperature, seed, no early stop, usage in the stream."""
    rows_of(server, [ask(call(0))], in_flight=1)
    sent = server.asked[0]
    assert (sent["max_tokens"], sent["temperature"], sent["seed"], sent["ignore_eos"]) == (4, 0.0, 5, True)
    assert sent["stream_options"] == {"include_usage": True}
    assert sent["model"] == "m"


@pytest.mark.parametrize("kind", ["words", "tokens", "chat"])
def test_calls_share_exactly_what_their_blocks_share(server: ScriptedOpenAi, kind: str) -> None:
    """Four of five blocks are common: 64 of 80 tokens are found again, whatever the prompt is made of; a salt ends that."""
    first, second, salted = rows_of(
        server, [ask(call(0), kind), ask(call(1), kind), ask(call(2), kind, "x9")], in_flight=1
    )
    assert [row["cached_tokens"] for row in (first, second, salted)] == [0, 64, 0]
    assert server.asked[0]["path"] == path_of(kind)


def test_an_open_loop_does_not_wait_for_answers(server: ScriptedOpenAi) -> None:
    """Three calls 10 ms apart to a server that takes 300 ms: all are there at once, each counted from when it was due."""
    server.delay_s = 0.3
    rows = rows_of(server, [ask(call(n, at_ns=n * 10 * MS)) for n in range(3)])
    assert server.most_at_once == 3
    due = [row["arrival_ns"] - rows[0]["arrival_ns"] for row in rows]
    assert due == [0, 10 * MS, 20 * MS]
    assert all(float(row["labels"]["sent_late_s"]) >= 0 for row in rows)
    assert [row["request_id"] for row in rows] == ["r1-000000", "r1-000001", "r1-000002"]


def test_a_closed_loop_keeps_so_many_in_flight(server: ScriptedOpenAi) -> None:
    """Six calls by two clients: never more than two at once, none lost, in the order of the calls."""
    server.delay_s = 0.02
    rows = rows_of(server, [ask(call(n)) for n in range(6)], in_flight=2)
    assert server.most_at_once == 2
    assert [row["request_id"] for row in rows] == [f"r1-{n:06d}" for n in range(6)]


@pytest.mark.parametrize(
    ("bad", "state", "words"),
    [
        ("cut", "failed", "cut"),
        ("error", "failed", "HTTP 500 (overloaded)"),
        ("refuse", "rejected", "HTTP 429"),
        ("html", "failed", "it answers text/html, not a stream of events"),
        ("whole", "failed", "application/json"),
        ("in_stream", "failed", "an error in the stream (engine_dead)"),
        ("hang_up", "failed", "broke the connection off"),
        ("empty", "failed", "nothing in the stream is an answer"),
        ("nonsense", "failed", "nothing in the stream is an answer"),
    ],
)
def test_a_bad_answer_is_a_row_that_says_why(server: ScriptedOpenAi, bad: str, state: str, words: str) -> None:
    """And never an exception; what the server's error quotes is not kept."""
    server.misbehaviour = bad
    (row,) = rows_of(server, [ask(call(0))], in_flight=1)
    assert row["state"] == state
    assert words in row["error"]
    assert "secret" not in row["error"]
    validate("request", table_from_rows("request", [row]), time.time_ns())


def test_what_got_no_answer_is_sent_once_more(server: ScriptedOpenAi) -> None:
    """An idle connection may close as it is used; the row says that it was tried again."""
    server.misbehaviour = "hang_up"
    (row,) = rows_of(server, [ask(call(0))], in_flight=1)
    assert row["retry_count"] == 1
    assert len(server.asked) == 2


def test_an_answer_that_takes_too_long_is_given_up(server: ScriptedOpenAi) -> None:
    """It says how long it waited."""
    server.delay_s = 0.5
    (row,) = rows_of(server, [ask(call(0))], in_flight=1, timeout_s=0.1)
    assert row["state"] == "failed"
    assert "0.1 s" in row["error"]


def test_usage_that_is_not_told_stays_unknown(server: ScriptedOpenAi) -> None:
    """No prompt tokens, no cached tokens; the instants are there all the same."""
    server.misbehaviour = "no_usage"
    (row,) = rows_of(server, [ask(call(0))], in_flight=1)
    assert row["state"] == "finished"
    assert row.get("prompt_tokens") is None
    assert row.get("cached_tokens") is None
    assert row["first_token_ns"] is not None


def test_an_endpoint_says_what_it_is(server: ScriptedOpenAi) -> None:
    """Its only model is taken where none is named; address with /v1 or without."""
    assert checked(Endpoint(server.url + "/v1")) == {"model": "m", "served_by": "scripted", "engine_version": "9.9"}


def test_reset_is_told_apart_from_no_such_door(server: ScriptedOpenAi) -> None:
    """vLLM has it in its development mode alone."""

    async def reset() -> bool:
        async with OpenAiClient(Endpoint(server.url, "m"), Clock()) as client:
            return await client.reset_prefix_cache()

    assert asyncio.run(reset())
    server.has_reset = False
    assert not asyncio.run(reset())


def test_nobody_there_is_unreachable() -> None:
    """With the address, and what to check."""
    with pytest.raises(EngineUnreachable, match=r"Nothing answers at .*Is the engine up"):
        checked(Endpoint(f"http://127.0.0.1:{free_port()}", "m"))


def test_a_wrong_key_says_how_to_give_one() -> None:
    """401 names the option and the variable; the right key is taken."""
    server = ScriptedOpenAi(key="k")
    try:
        with pytest.raises(UsageError, match="--key or KVSCOPE_ENGINE_KEY"):
            checked(Endpoint(server.url, "m", key="wrong"))
        assert checked(Endpoint(server.url, "m", key="k"))["model"] == "m"
    finally:
        server.stop()


def test_a_model_that_is_not_served_names_those_that_are() -> None:
    """And where several are, one has to be named."""
    server = ScriptedOpenAi(models=("a", "b"))
    try:
        with pytest.raises(UsageError, match="does not serve 'm'; it serves a, b"):
            checked(Endpoint(server.url, "m"))
        with pytest.raises(UsageError, match="name one with --model"):
            checked(Endpoint(server.url))
    finally:
        server.stop()


@pytest.mark.parametrize("page", [b"<html>Welcome</html>", b'{"data": 7}', b"[]", b'{"data": [{}]}', b"\xff\xfe"])
def test_a_page_in_place_of_models_is_no_endpoint(server: ScriptedOpenAi, page: bytes) -> None:
    """HTML of a portal, or JSON of something else."""
    server.models_page = page
    with pytest.raises(UnknownFormat, match="no list of models"):
        checked(Endpoint(server.url, "m"))


@pytest.mark.parametrize(("status", "error"), [(404, UnknownFormat), (503, EngineUnreachable), (302, UnknownFormat)])
def test_other_answers_to_models_are_told_by_number(
    server: ScriptedOpenAi, status: int, error: type[Exception]
) -> None:
    """Each with what it may mean."""
    server.models_status = status
    with pytest.raises(error, match=str(status)):
        checked(Endpoint(server.url, "m"))


def test_prompts_are_as_long_as_asked_for() -> None:
    """80 tokens: 80 ids; 80 words at one word a token, 40 at half a word."""
    made = call(0)
    assert len(PromptWriter("tokens").body(made)["prompt"]) == 80
    assert len(PromptWriter("words").body(made)["prompt"].split()) == 80
    assert len(PromptWriter("words", words_per_token=0.5).body(made)["prompt"].split()) == 40
    assert all(100 <= token < 1000 for token in PromptWriter("tokens").body(made)["prompt"])
    assert PromptWriter("words").body(made) == PromptWriter("words").body(made)
