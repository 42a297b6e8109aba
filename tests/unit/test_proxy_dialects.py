"""What each API's answers tell: token instants, counts, usage, ends; from events as engines write them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy_answers import (
    DONE,
    Event,
    chat,
    completion,
    counts,
    llama,
    messages,
    read,
    read_json,
    responses,
    seconds,
    sglang,
    usage,
)


def test_a_chat_has_an_entry_for_each_chunk_that_holds_text() -> None:
    """The role and the end hold none; usage tells that each chunk was one token, and what was cached."""
    events: list[Event] = [
        chat(delta={"role": "assistant", "content": ""}),
        chat("Hi"),
        chat(" there"),
        chat("", finish="stop"),
        usage(prompt_tokens=20, completion_tokens=2, prompt_tokens_details={"cached_tokens": 16}),
        DONE,
    ]
    reading = read(events)
    assert seconds(reading) == [2, 3]
    assert counts(reading) == [1, 1]
    assert reading.finish_reason == "stop"
    assert reading.has_end
    assert (reading.api, reading.model, reading.answer_id) == ("chat", "m", "chatcmpl-1")
    assert reading.columns == {"prompt_tokens": 20, "cached_tokens": 16, "computed_tokens": 4, "output_tokens": 2}


def test_reasoning_tool_calls_refusals_and_sound_are_tokens() -> None:
    """Whatever a delta adds took steps to generate."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "content": None},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"function_call": {"name": "f"}},
        {"refusal": "no"},
        {"audio": {"data": "AAAA"}},
        {"content": "", "tool_calls": [], "reasoning_content": None},
    ]
    assert seconds(read([chat(delta=delta) for delta in deltas])) == [1, 2, 3, 4, 5, 6, 7]


def test_counts_are_unknown_where_chunks_and_tokens_differ() -> None:
    """Three tokens in two chunks, and nobody says where: unknown as a whole, never guessed."""
    reading = read([chat("a"), chat("bc"), usage(prompt_tokens=1, completion_tokens=3)])
    assert seconds(reading) == [1, 2]
    assert counts(reading) is None


def test_counts_come_from_log_probabilities_token_ids_and_running_usage() -> None:
    """Where a chunk says itself how many tokens it holds, several in one are flagged by their count."""
    probability = {"token": "x", "logprob": -0.1, "bytes": None, "top_logprobs": []}
    by_probability = [
        chat("a", logprobs={"content": [probability]}),
        chat("bc", logprobs={"content": [probability] * 2}),
    ]
    assert counts(read([*by_probability, usage(prompt_tokens=1, completion_tokens=3)])) == [1, 2]
    assert counts(read([completion("a", token_ids=[5]), completion("bcd", token_ids=[6, 7, 8])])) == [1, 3]
    assert counts(
        read([completion("a", logprobs={"tokens": ["a"]}), completion("bc", logprobs={"tokens": ["b", "c"]})])
    ) == [1, 2]
    running = [
        chat(text, _top={"usage": {"prompt_tokens": 4, "completion_tokens": total, "total_tokens": 4 + total}})
        for text, total in (("a", 1), ("bcd", 4), ("e", 5))
    ]
    assert counts(read([*running, usage(prompt_tokens=4, completion_tokens=5)])) == [1, 3, 1]
    timed = [chat(text, _top={"timings": {"predicted_n": total}}) for text, total in (("a", 2), ("b", 3))]
    assert counts(read(timed)) == [2, 1]


def test_a_token_without_text_is_seen_where_its_id_is() -> None:
    """Half a rune gives no text yet; with ids asked for, the token shows all the same."""
    assert seconds(read([completion("", token_ids=[5]), completion("é", token_ids=[6])])) == [1, 2]
    assert seconds(read([completion(""), completion("é")])) == [2]


def test_chunks_that_came_together_are_one_entry() -> None:
    """Two events in one read are one instant with two tokens: their gap says nothing."""
    reading = read([chat("a")])
    read([chat("b")], reading)
    read([chat("c"), chat("d")], reading)
    reading.use(b'{"completion_tokens": 4}')
    assert seconds(reading) == [1, 2]
    assert counts(reading) == [3, 1]


def test_of_several_choices_the_one_that_spoke_first_is_followed() -> None:
    """n = 2: gaps between two sequences mean nothing, so entries are of one; the last token is of either."""
    events = [
        chat("a", index=1),
        chat("x", index=0),
        chat("b", index=1),
        chat("y", index=0),
        chat(None, index=1, finish="stop"),
        chat("z", index=0),
        chat(None, index=0, finish="length"),
        usage(prompt_tokens=3, completion_tokens=5),
    ]
    reading = read(events)
    assert seconds(reading) == [1, 3]
    assert reading.tokens.last_ns == 6_000_000_000
    assert reading.tokens.choices == {0, 1}
    assert counts(reading) is None
    assert reading.finish_reason == "length"
    assert not reading.order.findings


def test_responses_count_every_delta_and_end_with_their_usage() -> None:
    """Text, reasoning and arguments are deltas; the completed answer tells usage in the API's own words."""
    reading = read(responses("a", "b", "c", cached=16))
    assert seconds(reading) == [4, 5, 6]
    assert counts(reading) == [1, 1, 1]
    assert (reading.api, reading.model, reading.answer_id) == ("responses", "gpt-x", "resp_1")
    assert (reading.finish_reason, reading.has_end) == ("stop", True)
    assert reading.columns == {
        "prompt_tokens": 30,
        "cached_tokens": 16,
        "computed_tokens": 14,
        "output_tokens": 3,
        "reasoning": 0,
    }
    more = [
        {"type": "response.reasoning_summary_text.delta", "sequence_number": 0, "delta": "hm"},
        {"type": "response.output_item.added", "sequence_number": 1, "item": {"type": "function_call", "name": "f"}},
        {"type": "response.function_call_arguments.delta", "sequence_number": 2, "delta": "{"},
        {"type": "response.function_call_arguments.delta", "sequence_number": 3, "delta": ""},
    ]
    assert seconds(read(more)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("answer", "finish", "error"),
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length", None),
        ({"status": "failed", "error": {"code": "server_error", "message": "secret"}}, "error", "server_error"),
        ({"status": "cancelled"}, "abort", None),
        ({"status": "completed"}, "stop", None),
    ],
)
def test_responses_end_in_the_contracts_words(answer: dict[str, Any], finish: str, error: str | None) -> None:
    """Their statuses become finish reasons; an error keeps its code and loses its text."""
    kind = "response." + answer["status"]
    reading = read([{"type": kind, "sequence_number": 9, "response": {"id": "resp_1", **answer}}])
    assert (reading.finish_reason, reading.error, reading.has_end) == (finish, error, True)
    whole = read_json({"id": "resp_1", "object": "response", "model": "gpt-x", **answer})
    assert (whole.finish_reason, whole.error) == (finish, error)


def test_messages_count_blocks_and_add_up_what_was_cached() -> None:
    """Anthropic's input tokens leave out what the cache read and took in: the prompt is the sum of all three."""
    reading = read(messages("a", "b"))
    assert seconds(reading) == [4, 5]
    assert (reading.api, reading.model, reading.answer_id) == ("messages", "claude-x", "msg_1")
    assert (reading.finish_reason, reading.has_end) == ("stop", True)
    assert reading.columns == {
        "prompt_tokens": 115,
        "cached_tokens": 100,
        "computed_tokens": 15,
        "output_tokens": 2,
        "cache_created": 5,
    }


def test_messages_count_thinking_and_tools_but_no_signature() -> None:
    """What was generated counts; a signature over it was not."""
    events: list[Event] = [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "QUJD"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "f", "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a"'}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
    ]
    reading = read(events)
    assert seconds(reading) == [2, 5, 6]
    assert reading.finish_reason == "tool_calls"


def test_llama_cpps_own_api_and_its_timings() -> None:
    """/completion: ids tell counts, timings tell what the slot's cache gave and how long prompt and tokens took."""
    reading = read(llama("a", "b", "c"))
    assert seconds(reading) == [1, 2, 3]
    assert counts(reading) == [1, 1, 1]
    assert (reading.engine, reading.model, reading.finish_reason) == ("llamacpp", "small.gguf", "length")
    assert reading.columns == {
        "prompt_tokens": 9,
        "cached_tokens": 4,
        "computed_tokens": 5,
        "output_tokens": 3,
        "prefill_s": 0.05,
        "decode_s": 0.08,
    }


def test_sglangs_own_api_counts_what_is_new() -> None:
    """/generate repeats all text so far: an event's tokens are what its count gained, an event without gain is none."""
    reading = read([*sglang(1, 1, 4), DONE])
    assert seconds(reading) == [1, 3]
    assert counts(reading) == [1, 3]
    assert (reading.api, reading.answer_id, reading.finish_reason) == ("generate", "rid-1", "length")
    assert reading.columns["cached_tokens"] == 8


def test_tgi_gives_a_token_an_event() -> None:
    """/generate_stream, with details at the end."""
    events = [
        {"index": 1, "token": {"id": 5, "text": "a", "special": False}, "generated_text": None, "details": None},
        {
            "index": 2,
            "token": {"id": 2, "text": "</s>", "special": True},
            "generated_text": "a",
            "details": {"finish_reason": "eos_token", "generated_tokens": 2},
        },
    ]
    reading = read(events)
    assert (seconds(reading), counts(reading)) == ([1, 2], [1, 1])
    assert (reading.finish_reason, reading.has_end, reading.columns) == ("stop", True, {"output_tokens": 2})


@pytest.mark.parametrize(
    ("told", "columns"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 0}, {"prompt_tokens": 9, "output_tokens": 0}),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, {"prompt_tokens": 9}),
        (
            {"prompt_tokens": 9, "prompt_cache_hit_tokens": 6, "prompt_cache_miss_tokens": 3},
            {"prompt_tokens": 9, "cached_tokens": 6, "computed_tokens": 3},
        ),
        ({"prompt_tokens": 9, "cached_tokens": 4}, {"prompt_tokens": 9, "cached_tokens": 4, "computed_tokens": 5}),
        (
            {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 9}},
            {"prompt_tokens": 4, "cached_tokens": 9},
        ),
        (
            {"completion_tokens_details": {"reasoning_tokens": 7}, "completion_tokens": 8},
            {"output_tokens": 8, "reasoning": 7},
        ),
        ({"prompt_tokens": -1, "completion_tokens": "5", "prompt_tokens_details": [1]}, {}),
        ({"prompt_tokens": True, "completion_tokens": 1.5}, {}),
        ({"prompt_tokens": 3.0}, {"prompt_tokens": 3}),
        (
            {"input_tokens": 3, "cache_read_input_tokens": None, "output_tokens": 1},
            {"prompt_tokens": 3, "computed_tokens": 3, "output_tokens": 1},
        ),
    ],
)
def test_usage_in_every_dialect(told: dict[str, Any], columns: dict[str, Any]) -> None:
    """Absent and null are unknown, no zero is made up, and what is no count is not taken."""
    assert read([usage(**told)]).columns == columns


def test_vllms_metrics_become_durations() -> None:
    """`--enable-per-request-metrics` puts the engine's own times into the answer."""
    told = {"queue_time_ms": 12.5, "time_to_first_token_ms": 100.0, "generation_time_ms": 900.0}
    reading = read([chat("a"), {**usage(prompt_tokens=1, completion_tokens=1), "metrics": told}])
    assert {k: v for k, v in reading.columns.items() if k.endswith("_s")} == {
        "queue_s": 0.0125,
        "prefill_s": 0.1,
        "decode_s": 0.9,
    }


def test_answers_in_one_piece_tell_usage_and_end() -> None:
    """Chat, completion, message, response, embeddings: the same columns, and no instants that nobody saw."""
    told = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    whole = read_json(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": "m",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
            "usage": told,
        }
    )
    assert (whole.api, whole.finish_reason, whole.columns) == ("chat", "stop", {"prompt_tokens": 5, "output_tokens": 2})
    assert whole.tokens.first_ns is None
    text = read_json(
        {"id": "cmpl-1", "choices": [{"index": 0, "text": "hi", "finish_reason": "length"}], "usage": told}
    )
    assert (text.api, text.finish_reason) == ("completions", "length")
    message = read_json(
        {
            "id": "msg_1",
            "type": "message",
            "model": "claude-x",
            "content": [{"type": "text", "text": "hi"}],
            "stop_reason": "max_tokens",
            "usage": {"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 0},
        }
    )
    assert (message.api, message.finish_reason) == ("messages", "length")
    vectors = read_json(
        {
            "object": "list",
            "model": "e",
            "data": [{"embedding": [0.1]}],
            "usage": {"prompt_tokens": 5, "total_tokens": 5},
        }
    )
    assert (vectors.api, vectors.model, vectors.columns) == ("embeddings", "e", {"prompt_tokens": 5})


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (
            {"error": {"message": "your prompt: secret", "type": "invalid_request_error", "code": None}},
            "invalid_request_error",
        ),
        ({"error": {"message": "secret", "type": "rate_limit", "code": 429}}, "rate_limit 429"),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "secret"}}, "overloaded_error"),
        ({"error": "secret words"}, "error"),
        ({"error": {"type": "a secret, with spaces"}}, "error"),
        ({"type": "error", "sequence_number": 3, "code": "server_error", "message": "secret"}, "server_error"),
    ],
)
def test_an_error_in_a_stream_keeps_its_kind_and_loses_its_text(document: dict[str, Any], error: str) -> None:
    """What an engine says of a prompt may quote it: only identifiers are kept."""
    assert read([chat("a"), document]).error == error


def test_fields_of_odd_types_cost_themselves_only() -> None:
    """A server with a number for an id, or null for an index, is still read for the rest."""
    reading = read([{**chat("a"), "id": 7}, {**chat("b"), "model": ["m"]}, chat("c", index=None)])
    assert seconds(reading) == [1, 2, 3]
    assert reading.num_unreadable == 0


@pytest.mark.parametrize("data", ["", "null", "[1]", "{", '"x"', "{}", '{"choices": 5}', '{"type": 5}', "NaN", "\x00"])
def test_what_is_no_document_is_counted_and_passed_over(data: str) -> None:
    """Rubbish between two chunks changes nothing about them."""
    reading = read([chat("a"), data, chat("b")])
    assert seconds(reading) == [1, 3]
    assert reading.num_unreadable == (data not in ("", "{}", '{"choices": 5}', '{"type": 5}'))
