"""Whatever bytes an upstream sends, in whatever pieces, the client gets them; whatever a client sends, the upstream gets."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import h11
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_probe.proxy.framing import BadFraming, ChunkedBody
from engine_probe.proxy.heads import BadHead, parse_request, parse_response
from tests.proxy_lab import Peer, body_of, lab, post, run

PAYLOADS = st.lists(st.binary(min_size=1, max_size=400), max_size=6)
"""Pieces of a body: any bytes, so also half runes, bare CR and LF, and things that look like HTTP."""


def chunked(pieces: list[bytes], trailer: bytes = b"") -> bytes:
    return b"".join(b"%X\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` cut at these places (taken modulo its length)."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(
    PAYLOADS, st.lists(st.integers(0, 5000), max_size=8), st.sampled_from([b"", b"X-Sum: 1\r\n"]), st.binary(max_size=5)
)
def test_chunked_framing_finds_the_payload_wherever_it_is_cut(
    pieces: list[bytes], places: list[int], trailer: bytes, after: bytes
) -> None:
    """Payload and end are the same for every way of cutting the wire; what follows is left over."""
    wire = chunked(pieces, trailer)
    body, used = ChunkedBody(), 0
    found: list[bytes] = []
    for part in cut(wire + after, places):
        if not body.done:
            used += body.feed(part, found)
    assert b"".join(found) == b"".join(pieces)
    assert body.done
    assert used == len(wire)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_rubbish_is_a_body_or_is_refused(data: bytes, places: list[int]) -> None:
    """No bytes make the framing crash, and it never claims bytes it was not given."""
    body = ChunkedBody()
    try:
        for part in cut(data, places):
            assert 0 <= body.feed(part, []) <= len(part)
    except BadFraming:
        pass


@given(st.binary(max_size=200) | st.builds(lambda b: b"POST / HTTP/1.1\r\n" + b + b"\r\n\r\n", st.binary(max_size=200)))
def test_any_head_is_parsed_or_refused(block: bytes) -> None:
    """No bytes make the parsers crash."""
    for parse in (parse_request, parse_response):
        with contextlib.suppress(BadHead):
            parse(block + b"\r\n\r\n")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Content-Length", "Transfer-Encoding", "Host", "X-A"]),
            st.sampled_from(["0", "3", "chunked", "gzip", "a", "", "+3", "3,3", "chunked, chunked"]),
        ),
        max_size=4,
    )
)
def test_what_is_passed_on_a_second_parser_frames_alike(fields: list[tuple[str, str]]) -> None:
    """A request that we take has for h11 (strict, written by others) the same length of body: nothing to smuggle with."""
    lines = [("Host", "h"), *((n, v) for n, v in fields if n != "Host")]
    block = ("POST / HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in lines) + "\r\n").encode()
    try:
        head = parse_request(block)
    except BadHead:
        return
    server = h11.Connection(h11.SERVER)
    server.receive_data(block)
    event = server.next_event()
    assert isinstance(event, h11.Request)
    theirs = {name: value for name, value in event.headers if name in (b"content-length", b"transfer-encoding")}
    assert head.is_chunked == (theirs.get(b"transfer-encoding") == b"chunked")
    assert (head.length or 0) == int(theirs.get(b"content-length", b"0"))


@settings(max_examples=40)
@given(
    pieces=PAYLOADS,
    places=st.lists(st.integers(0, 5000), max_size=6),
    framing=st.sampled_from(["chunked", "trailer", "length", "close"]),
    status=st.sampled_from([b"200 OK", b"200", b"404 Not Found", b"429 Too Many Requests", b"500 \xe9"]),
    request=st.binary(max_size=300),
    kind=st.sampled_from([b"text/event-stream", b"application/json", b"application/octet-stream"]),
    encoding=st.sampled_from([None, b"gzip", b"br", b"zstd"]),
)
def test_the_client_gets_the_bytes_that_the_upstream_sent(
    pieces: list[bytes],
    places: list[int],
    framing: str,
    status: bytes,
    request: bytes,
    kind: bytes,
    encoding: bytes | None,
) -> None:
    """Status, reason and body arrive byte for byte, framing and trailers included, however the wire was cut."""
    payload = b"".join(pieces)
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\n" % (status, kind)
    if encoding:
        head += b"Content-Encoding: %b\r\n" % encoding
    if framing == "length":
        head, wire = head + b"Content-Length: %d\r\n" % len(payload), payload
    elif framing == "close":
        wire = payload
    else:
        head += b"Transfer-Encoding: chunked\r\n"
        wire = chunked(pieces, b"X-Sum: 1\r\n" if framing == "trailer" else b"")
    got: dict[str, Any] = {}

    async def upstream(peer: Peer) -> None:
        _, got["request"] = await peer.request()
        await peer.send(*cut(head + b"\r\n" + wire, places))

    async def story() -> None:
        async with lab(upstream) as here:
            answer = await here.ask(post(request))
            assert body_of(answer) == wire
            assert answer.split(b"\r\n", 1)[0] == b"HTTP/1.1 " + (status if b" " in status else status + b" ")
            assert got["request"] == request

    run(story)
