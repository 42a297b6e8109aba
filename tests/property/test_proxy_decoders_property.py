"""The proxy's readers under any input: as simple oracles say, whatever the cuts; never an exception; bounded."""

from __future__ import annotations

import gzip
import json
import re
from contextlib import suppress
from itertools import pairwise
from typing import Any

import zstandard
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.proxy.dialects import read_event, read_whole
from engine_probe.proxy.heads import parse_request, parse_response
from engine_probe.proxy.inflate import Unreadable, inflater
from engine_probe.proxy.peek import Peek
from engine_probe.proxy.recording import Recording
from engine_probe.proxy.sse import SseParser
from engine_probe.recording.recorder import Recorder
from engine_probe.sending.sink import MemorySink
from tests.proxy_answers import S, chat, llama, messages, new_reading, responses, sglang, usage, wire

CUTS = st.lists(st.integers(0, 10_000), max_size=8)
LINES = st.lists(
    st.sampled_from(
        [b"data: a", b"data:b", b"data", b"event: e", b": c", b"id: 1", b"", b"", b"x", b"data: \xc3\xa9", b"dat"]
    )
    | st.binary(max_size=12).map(lambda line: re.sub(rb"[\r\n]", b"", line)),
    max_size=14,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 1 << 60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    """id type model choices usage timings metrics error status sequence_number index delta message content_block content
    stop_reason response item meta_info token details stop tokens text finish_reason logprobs prompt_tokens
    completion_tokens prompt_tokens_details cached_tokens""".split()  # noqa: SIM905
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def oracle_events(data: bytes) -> list[tuple[bytes, bytes]]:
    """The standard's algorithm on the whole stream, and what it leaves undispatched."""
    name = b""
    lines: list[bytes] = []
    made: list[tuple[bytes, bytes]] = []
    for line in [*re.split(rb"\r\n|\n|\r", data.removeprefix(b"\xef\xbb\xbf")), b""]:
        if not line:
            if lines:
                made.append((name, b"\n".join(lines)))
            name, lines = b"", []
            continue
        field, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data" and (colon or field == line):
            lines.append(value)
        elif field == b"event":
            name = value
    return made


@given(LINES, st.lists(st.sampled_from([b"\n", b"\r", b"\r\n"]), min_size=14, max_size=14), CUTS, st.booleans())
def test_events_are_what_the_standard_says_wherever_the_stream_is_cut(
    lines: list[bytes], ends: list[bytes], places: list[int], has_bom: bool
) -> None:
    """Any mix of line ends, comments, fields and rubbish, in any pieces."""
    data = (b"\xef\xbb\xbf" if has_bom else b"") + b"".join(line + end for line, end in zip(lines, ends, strict=False))
    parser = SseParser()
    found = [event for part in cut(data, places) for event in parser.feed(part)] + parser.finish()
    assert [tuple(event) for event in found] == oracle_events(data)


@given(
    st.dictionaries(st.sampled_from(["model", "n", "usage", "other", 'q"uo\\te', "é"]), JSON),
    CUTS,
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_a_peek_finds_what_a_whole_decoding_finds(
    document: dict[str, Any], places: list[int], indent: int | None, ascii_only: bool
) -> None:
    """Scalars and small objects of the outermost object, for any document, spelling and cut."""
    peek = Peek(["model", "n", "é", 'q"uo\\te'], ["usage"])
    for part in cut(json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode(), places):
        peek.feed(part)
    wanted = {name: document[name] for name in ("model", "n", "é", 'q"uo\\te') if name in document}
    expected: dict[str, Any] = {name: value for name, value in wanted.items() if isinstance(value, str | int | float)}
    if isinstance(document.get("usage"), str | int | float | dict):
        expected["usage"] = document["usage"]
    assert peek.values == expected


@given(st.binary(max_size=300) | st.text('{}[]":,\\ abtruefalsn0123.-', max_size=80).map(str.encode), CUTS)
def test_a_peek_never_fails(data: bytes, places: list[int]) -> None:
    """Whatever comes, also what only looks like JSON."""
    peek = Peek(["a", "model"], ["usage", "b"])
    for part in cut(data, places):
        peek.feed(part)
    assert all(isinstance(name, str) for name in peek.values)


@given(
    st.dictionaries(
        NAMES,
        JSON
        | st.dictionaries(NAMES, JSON, max_size=4)
        | st.lists(st.dictionaries(NAMES, JSON, max_size=4), max_size=3),
        max_size=8,
    )
)
def test_any_document_is_read_or_passed_over(document: dict[str, Any]) -> None:
    """The right names with the wrong things in them: no exception, and no count below zero."""
    data = json.dumps(document).encode()
    streamed, whole = new_reading(), new_reading()
    for now in (1, 2):
        read_event(streamed, b"", data, now)
    read_whole(whole, data)
    for reading in (streamed, whole):
        numbers = [value for value in reading.columns.values() if isinstance(value, int | float)]
        assert all(number >= 0 for number in numbers)
        counted = reading.tokens.counts(None)
        assert counted is None or counted.min() >= 0


ALL = [
    *wire([chat("a"), chat("b"), usage(prompt_tokens=1, completion_tokens=2)]),
    *wire(responses("a")),
    *wire(messages("a"), names=True),
    *wire(sglang(1, 2)),
    *wire(llama("a")),
]


@given(
    st.lists(st.sampled_from(ALL), max_size=8),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=6),
    CUTS,
)
def test_real_streams_with_bytes_changed_never_fail(
    events: list[bytes], changes: list[tuple[int, int]], places: list[int]
) -> None:
    """Bits flip, events are mixed between APIs: what can be read is read."""
    data = bytearray(b"".join(events))
    for place, value in changes:
        if data:
            data[place % len(data)] = value
    parser, reading = SseParser(), new_reading()
    for now, part in enumerate(cut(bytes(data), places)):
        for event in parser.feed(part):
            read_event(reading, event.name, event.data, now)
    assert len(reading.order.findings) <= 8


@given(st.binary(max_size=400), CUTS, st.sampled_from([b"gzip", b"deflate", b"zstd"]), st.integers(0, 2))
def test_compressed_rubbish_is_said_to_be_none(data: bytes, places: list[int], encoding: bytes, how: int) -> None:
    """Rubbish, a real stream cut off, or one with rubbish behind it: pieces, or Unreadable, nothing else."""
    if how:
        packed = gzip.compress(data) if encoding == b"gzip" else zstandard.compress(data)
        data = packed[: len(packed) // 2] if how == 1 else packed + data
    reader = inflater(encoding)
    assert reader is not None
    with suppress(Unreadable):
        for part in cut(data, places):
            for piece in reader.feed(part):
                assert isinstance(piece, bytes)


HEAD = parse_request(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n")
ANSWER = parse_response(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")


@given(
    texts=st.lists(
        st.text(max_size=6) | st.sampled_from(['"', "\\", "a\\", "\n", "\n\ndata: x", '","x":"', "é", " "]), max_size=8
    ),
    places=CUTS,
    spaced=st.booleans(),
)
def test_chunks_that_are_recognised_count_as_chunks_that_are_parsed(
    texts: list[str], places: list[int], spaced: bool
) -> None:
    """Whatever the texts: with the shortcut for chunks that look alike, instants and counts are those of parsing all."""
    separators = (", ", ": ") if spaced else (",", ":")
    events = [
        b"data: " + json.dumps(chat(text), separators=separators, ensure_ascii=False).encode() + b"\n\n"
        for text in texts
    ]
    sink = MemorySink()
    recorder = Recorder(sink, flush_s=0)
    watch = Recording(recorder, router="p", policy="x").observe(HEAD, "r", 1)
    assert watch is not None
    watch.answered(ANSWER, 2)
    parsed = new_reading()
    now = 2
    for event in events:
        for part in cut(event, places):
            now += S
            watch.payload([part], now)
        read_event(parsed, b"", event[6:-2], now)
    assert watch.reading.tokens.num_chunks == parsed.tokens.num_chunks == sum(bool(text) for text in texts)
    ours, theirs = watch.reading.tokens.instants(), parsed.tokens.instants()
    assert (None if ours is None else list(ours)) == (None if theirs is None else list(theirs))
    recorder.close()
