"""Misplaced streams: what the protocols forbid is found, what they allow never is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine_probe.proxy.order import OpenAnswers
from engine_probe.proxy.reading import Reading
from tests.proxy_answers import (
    DONE,
    Event,
    chat,
    completion,
    llama,
    messages,
    new_reading,
    read,
    responses,
    sglang,
    usage,
)

MADE = "0af7651916cd43dd8448eb211c80319c"


def found(reading: Reading) -> list[tuple[str, str]]:
    return [(check, what) for check, what, _ in reading.order.findings]


@pytest.mark.parametrize(
    "events",
    [
        [
            chat("ha"),
            chat("ha"),
            chat("ha"),
            chat("", finish="stop"),
            usage(prompt_tokens=1, completion_tokens=3),
            DONE,
        ],
        [chat("a", index=1), chat("b", index=0), chat(None, index=0, finish="stop"), chat("c", index=1)],
        [{**chat(""), "id": "", "model": ""}, chat("a"), chat("b"), {**usage(completion_tokens=2), "id": "other"}],
        [chat("a", id="c-1"), chat("b", id="c-2"), chat("c", id="c-3"), chat("d", id="c-4")],
        [{**chat("a"), "created": 5}, {**chat("b"), "created": 4}],
        [chat("a", finish=""), chat("b", finish="")],
        [completion("a"), completion("b", finish="length")],
        responses("a", "b"),
        [{**event, "sequence_number": event["sequence_number"] * 3 + 7} for event in responses("a", "b")],
        messages("a", "b"),
        [event for event in messages("a", "b") if event["type"] not in ("content_block_start", "content_block_stop")],
        sglang(1, 1, 3),
        llama("a", "b"),
        [
            chat(t, _top={"usage": {"completion_tokens": n}}, index=i)
            for t, n, i in (("a", 2, 0), ("b", 1, 1), ("c", 3, 0))
        ],
        [
            chat("a", _top={"timings": {"predicted_n": 2}, "usage": {"completion_tokens": 3}}),
            chat("b", _top={"timings": {"predicted_n": 3}}),
        ],
    ],
)
def test_a_legal_stream_has_no_finding(events: Sequence[Event]) -> None:
    """Repeated tokens, interleaved choices, ids that servers make up a chunk, late usage, gaps in numbers: all legal."""
    assert read(events).order.findings == []


def test_a_chunk_of_another_open_answer_is_found_with_its_request() -> None:
    """The id in the chunk is one that another stream of this proxy goes by: both requests are named."""
    open_answers = OpenAnswers()
    mine, other = new_reading("req-1", open_answers), new_reading("req-2", open_answers)
    read([chat("a", id="chatcmpl-1")], mine)
    read([chat("x", id="chatcmpl-2")], other)
    read([chat("y", id="chatcmpl-2")], mine)
    assert mine.order.findings == [("leakage", "a chunk carries the id of another open answer", "req-2")]
    assert other.order.findings == []
    other.order.close()
    later = new_reading("req-3", open_answers)
    read([chat("a", id="chatcmpl-3"), chat("y", id="chatcmpl-2")], later)
    assert later.order.findings == []


def test_answers_that_share_an_id_are_not_judged_by_it() -> None:
    """A server that calls every answer the same tells nothing by it."""
    open_answers = OpenAnswers()
    first, second, third = (new_reading(name, open_answers) for name in "abc")
    for reading in (first, second):
        read([chat("a", id="always")], reading)
    read([chat("a", id="chatcmpl-3"), chat("b", id="always")], third)
    assert [reading.order.findings for reading in (first, second, third)] == [[], [], []]


def test_an_answer_made_for_another_request_is_found_by_the_id_we_gave_that_one() -> None:
    """vLLM makes the answer's id from X-Request-Id: one made from another open request's id is that request's answer."""
    open_answers = OpenAnswers()
    mine, other = new_reading("mine" * 8, open_answers), new_reading(MADE, open_answers)
    open_answers.expect(other.order)
    read([chat("a", id=f"chatcmpl-{MADE}")], mine)
    assert mine.order.findings == [("leakage", "the answer's id is made from the id of another open request", MADE)]
    read([chat("a", id=f"chatcmpl-{MADE}")], other)
    assert other.order.findings == []


@pytest.mark.parametrize(
    ("events", "finding"),
    [
        (
            [chat("a"), chat("b"), chat("c", id="chatcmpl-9"), chat("d")],
            ("leakage", "the answer's id changes in mid-stream"),
        ),
        (
            [chat("a"), chat("b"), {**chat("c"), "model": "other"}],
            ("leakage", "the answer's model changes in mid-stream"),
        ),
        ([chat("a"), chat("", finish="stop"), chat("b")], ("position", "tokens come after the end of choice 0")),
        (
            [chat(t, _top={"usage": {"completion_tokens": n}}) for t, n in (("a", 1), ("b", 2), ("a", 1))],
            ("position", "a running token count falls from 2 to 1"),
        ),
        (sglang(1, 3, 2), ("position", "a running token count falls from 3 to 2")),
    ],
)
def test_what_the_protocol_forbids_is_found(events: Sequence[Event], finding: tuple[str, str]) -> None:
    """Tokens of another answer are leakage; pieces in the wrong place are position."""
    assert found(read(events)) == [finding]


def swap(events: list[dict[str, Any]], a: int, b: int) -> list[dict[str, Any]]:
    events = list(events)
    events[a], events[b] = events[b], events[a]
    return events


def test_events_out_of_order_or_twice_are_found_by_their_number() -> None:
    """OpenAI's responses number their events: a swap and a repetition both show, each once."""
    events = responses("a", "b", "c")
    assert found(read(swap(events, 3, 4))) == [("position", "event 3 comes after event 4")]
    assert found(read([*events[:4], events[3], events[3], *events[4:]])) == [("position", "event 3 comes twice")]


def test_another_responses_end_is_found_by_its_id() -> None:
    """The answer names itself at its begin and at its end: they must be the same."""
    events = responses("a")
    events[-1] = {**events[-1], "response": {**events[-1]["response"], "id": "resp_2"}}
    assert found(read(events)) == [("leakage", "the answer's id changes in mid-stream")]


@pytest.mark.parametrize(
    ("piece", "what"),
    [
        ({"type": "content_block_delta", "index": 0}, "content block 0 goes on after its end"),
        ({"type": "content_block_start", "index": 0}, "content block 0 begins after block 0"),
        ({"type": "content_block_delta", "index": 3}, "content block 3 goes on without a begin"),
        ({"type": "message_start", "message": {"id": "msg_1"}}, "a second message begins in the same answer"),
    ],
)
def test_content_blocks_are_begun_once_and_end_once(piece: dict[str, Any], what: str) -> None:
    """Anthropic's blocks have an index and a life."""
    events = messages("a")
    at = next(number for number, event in enumerate(events) if event["type"] == "content_block_stop") + 1
    assert found(read([*events[:at], piece, *events[at:]])) == [("position", what)]


def test_findings_are_bounded() -> None:
    """A stream that is wrong all the way has one finding of a kind."""
    events = [chat("a"), chat("b"), *(chat("x", id=f"chatcmpl-{number}") for number in range(100, 200))]
    assert len(read(events).order.findings) == 1
