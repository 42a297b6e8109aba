"""Server-sent events, compressed bodies, and values picked while they stream by."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
import zstandard

from engine_probe.proxy.inflate import MAX_BYTES, Unreadable, Zlib, inflater
from engine_probe.proxy.pattern import learn
from engine_probe.proxy.peek import MAX_VALUE_BYTES, Peek
from engine_probe.proxy.sse import MAX_EVENT_BYTES, Event, SseParser


def events(*chunks: bytes) -> list[Event]:
    parser = SseParser()
    made = [event for chunk in chunks for event in parser.feed(chunk)]
    return made + parser.finish()


def datas(*chunks: bytes) -> list[bytes]:
    return [event.data for event in events(*chunks)]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_lines_end_in_any_of_three_ways(end: bytes) -> None:
    """LF, CR and CRLF are the same, and data of several lines is joined with LF."""
    wire = end.join([b"event: a", b"data: 1", b"data: 2", b"", b"data:3", b"", b""])
    assert events(wire) == [Event(b"a", b"1\n2"), Event(b"", b"3")]
    assert events(*(wire[i : i + 1] for i in range(len(wire)))) == [Event(b"a", b"1\n2"), Event(b"", b"3")]


def test_comments_keepalives_and_other_fields_are_no_events() -> None:
    """`: ping`, `id`, `retry` and empty events pass without a trace."""
    assert datas(b": ping\n\nid: 7\nretry: 5\ndata: x\nfoo: bar\nbaz\n\n\n\n: ping\n\n") == [b"x"]


def test_a_byte_order_mark_is_taken_off_wherever_it_is_cut() -> None:
    """Also when it comes byte by byte."""
    wire = b"\xef\xbb\xbfdata: x\n\n"
    assert datas(wire) == datas(*(wire[i : i + 1] for i in range(len(wire)))) == [b"x"]


def test_only_one_space_after_the_colon_is_the_fields() -> None:
    """The rest belongs to the data."""
    assert datas(b"data:  x \n\ndata:y\n\ndata\n\n") == [b" x ", b"y", b""]


def test_what_the_end_leaves_begun_is_given() -> None:
    """A server that forgets the last empty line is heard all the same."""
    assert datas(b"data: a\n\ndata: b") == [b"a", b"b"]
    assert datas(b"data: a\n\ndata: b\n") == [b"a", b"b"]


def test_an_event_that_is_too_large_is_skipped_and_counted() -> None:
    """Memory is bounded: in one line, in many, and what follows is read."""
    parser = SseParser()
    big = b"x" * (MAX_EVENT_BYTES // 4)
    for _ in range(8):
        assert parser.feed(big) == []
    assert parser.feed(b"\n\n") == []
    assert [event.data for event in parser.feed(b"data: a\n\n")] == [b"a"]
    for _ in range(8):
        assert parser.feed(b"data: " + big + b"\n") == []
    assert [event.data for event in parser.feed(b"\ndata: b\n\n")] == [b"b"]
    assert parser.num_skipped == 2


PLAIN = b"data: one\n\ndata: two\n\n" * 300


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        (None, PLAIN),
        (b"identity", PLAIN),
        (b"gzip", gzip.compress(PLAIN)),
        (b"x-GZIP", gzip.compress(PLAIN[:100]) + gzip.compress(PLAIN[100:])),
        (b"deflate", zlib.compress(PLAIN)),
        (b"deflate", zlib.compress(PLAIN, wbits=-15)),
        (b"zstd", zstandard.compress(PLAIN)),
        (b"zstd", zstandard.compress(PLAIN[:99]) + zstandard.compress(PLAIN[99:])),
    ],
)
def test_compressed_bodies_are_read_as_they_come(encoding: bytes | None, packed: bytes) -> None:
    """gzip (members in a row), deflate (with and without header), zstd (frames in a row), cut anywhere."""
    for step in (1, 7, len(packed)):
        reader = inflater(encoding)
        assert reader is not None
        parts = [packed[at : at + step] for at in range(0, len(packed), step)]
        assert b"".join(piece for part in parts for piece in reader.feed(part)) == PLAIN


def test_an_encoding_that_cannot_be_read_is_said() -> None:
    """br and stacks of encodings are passed on unread."""
    assert inflater(b"br") is None
    assert inflater(b"gzip, br") is None


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"zstd"])
def test_rubbish_is_not_taken_for_a_compressed_body(encoding: bytes) -> None:
    """The error says what it is not, and nothing of what it holds."""
    reader = inflater(encoding)
    assert reader is not None
    with pytest.raises(Unreadable, match=encoding.decode()):
        list(reader.feed(b"secret words that are no " * 4))


def test_a_bomb_is_read_no_further_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small body that unfolds without end costs one piece at a time, and then nothing."""
    assert MAX_BYTES < 1 << 30
    monkeypatch.setattr("engine_probe.proxy.inflate.MAX_BYTES", 1 << 20)
    reader = Zlib(is_gzip=True)
    packed = gzip.compress(b"\0" * (8 << 20))
    sizes: list[int] = []
    with pytest.raises(Unreadable, match="unfolds to more"):
        sizes.extend(len(piece) for piece in reader.feed(packed))
    assert max(sizes) <= 1 << 18
    assert sum(sizes) <= 1 << 20


def peek(data: bytes, *wanted: str, nested: tuple[str, ...] = (), step: int = 1 << 20) -> dict[str, object]:
    looker = Peek(wanted, nested)
    for at in range(0, len(data), step):
        looker.feed(data[at : at + step])
    return looker.values


def test_values_of_the_outermost_object_are_picked_alone() -> None:
    """The same name deeper in, or inside a text, is not meant."""
    document = {
        "messages": [{"model": "no", "content": '"model": "no", {[}] \\'}],
        "model": "m/1",
        "stream": True,
        "n": 2,
        "max_tokens": None,
        "usage": {"prompt_tokens": 5, "details": {"a": [1, "}"]}},
        "list": [1, 2],
    }
    for text in (json.dumps(document), json.dumps(document, indent=2)):
        for step in (1, 2, 3, 5, 1 << 20):
            found = peek(text.encode(), "model", "stream", "n", "max_tokens", "list", nested=("usage",), step=step)
            assert found == {"model": "m/1", "stream": True, "n": 2, "usage": document["usage"]}


def test_a_key_with_escapes_and_a_value_with_a_rune_are_the_ones_they_spell() -> None:
    """JSON's own spelling does not matter."""
    assert peek(b'{"mo\\u0064el": "caf\\u00e9"}', "model") == {"model": "café"}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'"x"', b"{", b'{"model"', b'{"model": }', b'{model: "x"}', b"\xff\xfe", b'{"model": "\\x"}']
)
def test_what_is_no_object_has_no_values(data: bytes) -> None:
    """Nor does it raise."""
    assert peek(data, "model") == {}


def test_a_long_value_is_not_kept() -> None:
    """A prompt cannot get in by taking a wanted name."""
    assert peek(json.dumps({"model": "x" * MAX_VALUE_BYTES, "n": 1}).encode(), "model", "n") == {"n": 1}
    assert peek(json.dumps({"usage": {"a": "x" * 9000}, "n": 1}).encode(), "n", nested=("usage",)) == {"n": 1}


def chunk(text: str, **more: object) -> bytes:
    return json.dumps({"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], **more}).encode()


def event(text: str, **more: object) -> bytes:
    return b"data: " + chunk(text, **more) + b"\n\n"


def test_a_pattern_fits_the_same_chunk_with_another_text_and_nothing_else() -> None:
    """Other ids, other fields, an empty text, quotes, two events in one piece: all that is parsed instead."""
    pattern = learn(chunk("Hello"))
    assert pattern is not None
    assert pattern.fits(event("x"))
    assert pattern.fits(event("a longer text, with {braces} and \t"))
    assert not pattern.fits(event(""))
    assert not pattern.fits(event('say "x"'))
    assert not pattern.fits(event("ends in \\"))
    assert not pattern.fits(event("x") + event("y"))
    assert not pattern.fits(event("x", usage={"completion_tokens": 1}))
    assert not pattern.fits(event("x")[:-1])
    assert not pattern.fits(event("x").replace(b'"index": 0', b'"index": 1'))
    assert not pattern.fits(event("x").replace(b'"x"', b"null"))
    assert not pattern.fits(event("x").replace(b'"x"', b'"x\n: y"'))


def test_no_pattern_is_learned_where_there_are_two_texts_or_none() -> None:
    """Reasoning beside content, or a tool call: each such chunk is parsed."""
    assert learn(chunk("")) is None
    two = json.dumps({"choices": [{"delta": {"content": "a", "reasoning_content": "b"}}]}).encode()
    assert learn(two) is None
    assert (
        learn(json.dumps({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "x"}}]}}]}).encode()) is None
    )
