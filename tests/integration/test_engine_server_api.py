"""The embedded engine's server over HTTP: what OpenAI's API promises, with tokens that were really computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine_server import NAME, Running, engine_server, served_model

WORDS = "a prompt of forty bytes, to fill blocks."
"""40 bytes: with bos 41 tokens, ten blocks of 4 and one token."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for all tests here, which reset its cache where they need to."""
    with engine_server() as running:
        yield running


def events(running: Running, path: str, **body: Any) -> tuple[list[dict[str, Any]], bool]:
    """The chunks of a stream, and whether it ended with [DONE]."""
    with running.client.stream("POST", path, json={"temperature": 0, "stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"], lines[-1] == "[DONE]"


def test_completion_is_the_text_of_the_tokens_that_the_model_computes(server: Running) -> None:
    """Greedy tokens of the executor, decoded; usage counts bos and every token made."""
    answer = server.complete(WORDS, max_tokens=8)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == NAME
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 41
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == 49
    ids = [256, *WORDS.encode()]
    assert server.complete(ids, max_tokens=8)["choices"][0]["text"] == answer["choices"][0]["text"]


def test_a_prompt_that_was_seen_before_is_told_as_cached(server: Running) -> None:
    """41 tokens fill ten blocks of 4: 40 are found, one is left to compute; after a reset none are."""
    server.client.post("/reset_prefix_cache")
    first = server.complete(WORDS, max_tokens=2)
    again = server.complete(WORDS, max_tokens=2)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 40}
    assert again["choices"] == first["choices"]
    assert server.client.post("/reset_prefix_cache").json()["success"] is True
    assert server.complete(WORDS, max_tokens=2)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_another_cache_salt_shares_nothing(server: Running) -> None:
    """Two tenants with the same prompt and different salts do not see each other's blocks."""
    server.client.post("/reset_prefix_cache")
    seen = [
        server.complete(WORDS, max_tokens=1, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("a", "b", "a")
    ]
    assert seen == [0, 0, 40]


def test_stream_says_the_same_as_the_whole_answer(server: Running) -> None:
    """Chunks joined are the text; the last has the finish reason; usage comes last and only where it was asked for."""
    whole = server.complete(WORDS, max_tokens=12)
    chunks, is_done = events(server, "/v1/completions", prompt=WORDS, max_tokens=12)
    assert is_done
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert not any("usage" in chunk for chunk in chunks)
    told, _ = events(server, "/v1/completions", prompt=WORDS, max_tokens=12, stream_options={"include_usage": True})
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in told[:-1])
    every, _ = events(
        server, "/v1/completions", prompt=WORDS, max_tokens=3, stream_options={"continuous_usage_stats": True}
    )
    assert all(chunk["usage"]["prompt_tokens"] == 41 for chunk in every)


def test_chat_goes_through_the_template(server: Running) -> None:
    """The prompt is what /tokenize makes of the messages; the answer is the assistant's; a stream begins with the role."""
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    count = server.client.post("/tokenize", json={"messages": messages}).json()["count"]
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": 6}
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens"] == count == len("<|system|>\nbe brief\n<|user|>\nhi\n<|assistant|>\n")
    chunks, is_done = events(server, "/v1/chat/completions", **body)
    assert is_done
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert said == answer["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}


def test_chat_without_a_limit_may_fill_the_context(server: Running) -> None:
    """OpenAI's default: as long as the context allows. 256 tokens (64 blocks of 4) less the prompt's."""
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True}
    usage = server.client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == 256


def test_several_choices_share_the_prompt_and_count_it_once(server: Running) -> None:
    """n=3 with a seed: three texts, reproducible, the first that of the seed alone; the prompt is computed once."""
    server.client.post("/reset_prefix_cache")
    computed = server.metric("kvscope_engine_prompt_tokens_computed_total")
    answer = server.complete(WORDS, max_tokens=8, n=3, temperature=1.0, seed=7)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] == {
        "prompt_tokens": 41,
        "completion_tokens": 24,
        "total_tokens": 65,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert server.metric("kvscope_engine_prompt_tokens_computed_total") - computed == 41 + 1 + 1
    alone = server.complete(WORDS, max_tokens=8, temperature=1.0, seed=7)
    again = server.complete(WORDS, max_tokens=8, n=3, temperature=1.0, seed=7)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert texts[0] == alone["choices"][0]["text"]
    assert len(set(texts)) == 3


def test_several_prompts_are_answered_in_their_order(server: Running) -> None:
    """Texts or lists of ids; choices are numbered prompt by prompt; each answer is that of the prompt alone."""
    prompts = ["first one", "and another, longer prompt", "x"]
    answer = server.complete(prompts, max_tokens=4, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for at, prompt in enumerate(prompts):
        alone = server.complete(prompt, max_tokens=4)["choices"][0]["text"]
        assert [choice["text"] for choice in answer["choices"][2 * at : 2 * at + 2]] == [alone, alone]
    ids = server.complete([[1, 2, 3], [4]], max_tokens=1)
    assert ids["usage"]["prompt_tokens"] == 4
    chunks, _ = events(server, "/v1/completions", prompt=prompts, max_tokens=4)
    for at, choice in enumerate(answer["choices"][::2]):
        texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == at]
        assert "".join(texts) == choice["text"]


def test_a_stop_string_ends_the_text_before_it(server: Running) -> None:
    """Cut out of the answer that comes without it: the text ends there, the engine computes nothing after it."""
    full = server.complete(WORDS, max_tokens=40)["choices"][0]["text"]
    stop = full[10:13]
    cut = full.index(stop)
    made = server.metric("vllm:generation_tokens_total")
    answer = server.complete(WORDS, max_tokens=40, stop=["no such text", stop])
    assert answer["choices"][0]["text"] == full[:cut]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert server.metric("vllm:generation_tokens_total") - made == answer["usage"]["completion_tokens"] < 40
    chunks, _ = events(server, "/v1/completions", prompt=WORDS, max_tokens=40, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == full[:cut]
    kept = server.complete(WORDS, max_tokens=40, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == full[: cut + len(stop)]


def test_a_stop_token_ends_the_text_without_being_in_it(server: Running) -> None:
    """The fourth token of the answer, named as stop token, leaves three; it is counted."""
    ids = [256, *WORDS.encode()]
    full = server.complete(ids, max_tokens=1)["choices"][0]["text"]
    assert full
    token = None
    with engine_server() as own:
        own.complete(ids, max_tokens=6)
        sequences: list[Any] = []
        original = own.assembled.engine.submit

        def spy(sequence: Any, queued_ns: int | None = None) -> None:
            sequences.append(sequence)
            original(sequence, queued_ns)

        own.assembled.engine.submit = spy  # type: ignore[method-assign]
        own.complete(ids, max_tokens=6)
        made = sequences[0].token_ids[len(ids) :]
        token = made[3]
        answer = own.complete(ids, max_tokens=6, stop_token_ids=[token])
        before = made.index(token)
        assert answer["usage"]["completion_tokens"] == before + 1
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["text"] == bytes(t for t in made[:before] if t < 256).decode(errors="replace")


def test_seed_and_temperature_decide_the_draw(server: Running) -> None:
    """The same seed draws the same tokens; another seed others; greedy needs none."""
    drawn = [
        server.complete(WORDS, max_tokens=12, temperature=1.5, seed=seed)["choices"][0]["text"] for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_models_version_and_small_endpoints(server: Running) -> None:
    """What tools ask before they begin."""
    cards = server.client.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == [NAME, "other-name"]
    assert cards["data"][0]["max_model_len"] == 256
    assert server.client.get("/v1/models/tiny").json()["id"] == NAME
    assert server.client.get("/v1/models/nope").status_code == 404
    assert server.client.get("/version").json()["engine"] == "kvscope"
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ping").status_code == server.client.post("/ping").status_code == 200
    assert server.client.get("/load").json() == {"server_load": 0}
    assert server.client.get("/kv_event_sources").json() == {}
    assert server.complete("x", model="other-name", max_tokens=1)["model"] == "other-name"


def test_tokenize_and_detokenize_are_each_others_reverse(server: Running) -> None:
    """Bytes and bos; the words of the ids are told where they are asked for."""
    made = server.client.post("/tokenize", json={"prompt": "Grüße", "return_token_strs": True}).json()
    assert made["tokens"] == [256, *"Grüße".encode()]
    assert (made["count"], made["max_model_len"], len(made["token_strs"])) == (8, 256, 8)
    assert server.client.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "Grüße"}
    plain = server.client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()
    assert plain["tokens"] == [97]


def test_request_id_and_labels_reach_the_record() -> None:
    """X-Request-Id, traceparent, X-Kvscope headers, user and priority stand in the request's row; phases sum to TTFT."""
    headers = {
        "X-Request-Id": "mine-1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "X-Kvscope-Session": "s1",
        "X-Kvscope-Workload": "interactive",
        "X-Kvscope-Feature": "search",
    }
    with engine_server(policy="priority") as running:
        body = {"prompt": WORDS, "max_tokens": 3, "user": "team-a", "priority": 2}
        answer = running.client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json()["id"] == "cmpl-mine-1"
        running.client.post("/v1/completions", json={**body, "n": 2}, headers=headers | {"X-Kvscope-Tenant": "b"})
    rows = running.sink.table("request").to_pylist()
    first = rows[0]
    assert first["request_id"] == "mine-1"
    assert first["state"] == "finished"
    assert (first["engine"], first["model"], first["vantage"]) == ("kvscope", NAME, "engine")
    assert (first["tenant"], first["session_id"], first["workload"]) == ("team-a", "s1", "interactive")
    assert (first["priority_class"], first["trace_id"]) == ("2", "0af7651916cd43dd8448eb211c80319c")
    assert dict(first["labels"])["feature"] == "search"
    phases = ("frontend_s", "tokenize_s", "queue_s", "cache_lookup_s", "alloc_s", "prefill_s", "first_sample_s")
    told = sum(first[name] or 0.0 for name in (*phases, "unexplained_s"))
    assert told == pytest.approx((first["first_token_ns"] - first["arrival_ns"]) / 1e9, abs=1e-9)
    assert first["frontend_s"] > 0
    assert first["tokenize_s"] > 0
    assert [row["request_id"] for row in rows[1:]] == ["mine-1", "mine-1-1"]
    assert [row["tenant"] for row in rows[1:]] == ["b", "b"]
    assert [dict(row["labels"])["choice"] for row in rows[1:]] == ["0", "1"]
    (worker,) = running.sink.table("worker").to_pylist()
    assert worker["chat_template_version"].startswith("builtin-")


def test_two_requests_with_one_id_at_once_are_two_rows(server: Running) -> None:
    """A client that sends its id again while the first is under way gets an answer, under an id of its own."""
    headers = {"X-Request-Id": "twice"}
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as first:
        next(first.iter_lines())
        other = server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        assert other.status_code == 200
        assert other.headers["x-request-id"] == "twice"
    server.wait_until_empty()


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        (b"{", 400, None, "no JSON"),
        (b"", 400, None, "no JSON"),
        (b"[]", 400, None, "expected an object"),
        (b"\xff\xfe\x00", 400, None, "no JSON"),
        (b'{"prompt": ' + b"[" * 100_000, 400, None, "no JSON"),
        (b"{}", 400, "prompt", "needs a prompt"),
        (b'{"prompt": []}', 400, "prompt", "empty list"),
        (b'{"prompt": [[]]}', 400, "prompt", "no token"),
        (b'{"prompt": [1, "a"]}', 400, "prompt", "none of"),
        (b'{"prompt": [true]}', 400, "prompt", "none of"),
        (b'{"prompt": {"a": 1}}', 400, "prompt", "got `object`"),
        (b'{"prompt": [258]}', 400, "prompt", "token id 258"),
        (b'{"prompt": [-1]}', 400, "prompt", "token id -1"),
        (b'{"prompt": [99999999999999999999]}', 400, "prompt", "token id 99999999999999999999"),
        (b'{"prompt": "a", "model": "gpt-5"}', 404, None, "no model 'gpt-5'"),
        (b'{"prompt": "a", "model": 5}', 400, "model", "got `int`"),
        (b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens", "1 or more"),
        (b'{"prompt": "a", "max_tokens": -3}', 400, "max_tokens", "1 or more"),
        (b'{"prompt": "a", "max_tokens": "4"}', 400, "max_tokens", "got `str`"),
        (b'{"prompt": "a", "max_tokens": 99999999999999999999}', 400, "max_tokens", "expected"),
        (b'{"prompt": "a", "temperature": -0.1}', 400, "temperature", ">= 0"),
        (b'{"prompt": "a", "top_p": 0}', 400, "top_p", "above 0"),
        (b'{"prompt": "a", "top_p": 1.5}', 400, "top_p", "at most 1"),
        (b'{"prompt": "a", "n": 0}', 400, "n", ">= 1"),
        (b'{"prompt": [' + b'"a",' * 40 + b'"a"], "n": 100}', 400, "n", "4100 sequences in one call; at most 4096"),
        (b'{"prompt": "a", "n": 1000}', 400, "n", "<= 128"),
        (b'{"prompt": "a", "stop": [""]}', 400, "stop", "length >= 1"),
        (b'{"prompt": "a", "seed": 1e3}', 400, "seed", "expected"),
        (b'{"prompt": "a", "logprobs": 0}', 400, "logprobs", "does not do that"),
        (b'{"prompt": "a", "logprobs": 5}', 400, "logprobs", "does not do that"),
        (b'{"prompt": "a", "echo": true}', 400, "echo", "does not do that"),
        (b'{"prompt": "a", "best_of": 3}', 400, "best_of", "does not do that"),
        (b'{"prompt": "a", "presence_penalty": 0.5}', 400, "presence_penalty", "does not do that"),
        (b'{"prompt": "a", "no_such_field": 1}', 400, "no_such_field", "no field"),
        (b'{"prompt": "a", "priority": 3}', 400, "priority", "--scheduling-policy priority"),
        (b'{"prompt": "a", "stream_options": {"x": 1}}', 400, "stream_options", "unknown field"),
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_what_cannot_be_is_refused_by_name(
    server: Running, body: bytes, status: int, param: str | None, says: str
) -> None:
    """OpenAI's error shape, the right status, the field's name, and a sentence that says what was expected."""
    answer = server.client.post("/v1/completions", content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ([{"content": "x"}], "no role"),
        ([{"role": "user", "content": 5}], "neither a text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "reads text alone"),
        ("hello", "expected `array`"),
    ],
)
def test_messages_that_make_no_sense_are_refused(server: Running, messages: Any, says: str) -> None:
    """By the template, or before it."""
    answer = server.client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert says in answer.json()["error"]["message"]


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers() -> None:
    """Longer than the pool (8 blocks of 4), or as long as it; each is recorded as rejected."""
    with engine_server(served_model(num_blocks=8)) as running:
        for prompt in ([1] * 500, [1] * 32):
            answer = running.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert f"has {len(prompt)} of them" in error["message"]
            assert "32 tokens" in error["message"]
        assert running.metric("kvscope_engine_requests_refused_total") == 2
    rejected = running.sink.table("request").to_pylist()
    assert [(row["state"], row["prompt_tokens"], row["http_status"]) for row in rejected] == [
        ("rejected", 500, 400),
        ("rejected", 32, 400),
    ]


@pytest.mark.parametrize(("length", "limit", "made"), [(31, 1, 1), (20, 12, 12), (20, 500, 12), (30, None, 2)])
def test_an_answer_ends_where_the_context_does(length: int, limit: int | None, made: int) -> None:
    """32 tokens in all, whatever was asked for (as in vLLM): the reason is `length`, and usage says how many there were."""
    with engine_server(served_model(num_blocks=8)) as running:
        answer = running.complete([1] * length, max_tokens=limit, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == made
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_prompts_one_that_is_refused_leaves_none_behind(stream: bool) -> None:
    """The good prompts of the call are not computed either."""
    with engine_server(served_model(num_blocks=8)) as running:
        body = {"prompt": [[1, 2, 3], [1] * 100], "stream": stream}
        assert running.client.post("/v1/completions", json=body).status_code == 400
        assert running.metric("kvscope_engine_prompt_tokens_computed_total") == 0


def test_paths_and_methods_that_are_none_have_openais_shape(server: Running) -> None:
    """404 and 405 are readable by its clients."""
    for answer, status in (
        (server.client.get("/v1/nothing"), 404),
        (server.client.get("/v1/completions"), 405),
        (server.client.post("/v1/embeddings", json={"input": "x"}), 404),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large_is_refused(server: Running) -> None:
    """33 MiB of prompt: 413."""
    answer = server.client.post("/v1/completions", content=b'{"prompt": "' + b"a" * (33 << 20) + b'"}')
    assert answer.status_code == 413
    assert "33554432 bytes" in answer.json()["error"]["message"]


def test_a_lone_surrogate_is_refused_not_replaced(server: Running) -> None:
    """JSON can write half a character; no text has it."""
    answer = server.client.post("/v1/completions", content=b'{"prompt": "a\\ud800b"}')
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{"a": 1}]}, "tools"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, "prompt"),
    ],
    ids=str,
)
def test_other_endpoints_refuse_by_name_too(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    """400 and the field."""
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("own", ["", "x" * 201, "tab\tin it", "grün"])
def test_a_request_id_that_is_none_is_replaced(server: Running, own: str) -> None:
    """Too long, not printable, not ASCII: an id of our own, never the client's bytes in a header of ours."""
    headers = {b"X-Request-Id": own.encode()}
    answer = server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200
    assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["garbage", "negative", "letters", "tls"],
)
def test_what_is_no_http_is_answered_or_closed_and_harms_nobody(server: Running, raw: bytes) -> None:
    """The next request is answered as ever."""
    import socket

    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10) as sock:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(1000)
    assert answer == b"" or b" 400 " in answer.partition(b"\r\n")[0]
    assert server.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1
