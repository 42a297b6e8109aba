"""Heads: what passes, what is taken off, and what is refused before an upstream could read it otherwise."""

from __future__ import annotations

import pytest

from engine_probe.proxy.framing import ChunkedBody, LengthBody, UntilClose
from engine_probe.proxy.heads import BadHead, parse_request, parse_response, render


def request(*lines: str, first: str = "POST /v1/chat/completions HTTP/1.1") -> bytes:
    return "\r\n".join([first, *lines, "", ""]).encode("latin-1")


def answer(*lines: str, first: str = "HTTP/1.1 200 OK") -> bytes:
    return request(*lines, first=first)


def test_headers_pass_with_their_case_order_and_odd_bytes() -> None:
    """A name or a value is never rewritten, also where it is empty, repeated or not ASCII."""
    head = parse_request(request("hOsT: a", "X-A: 1", "x-a: 2", "X-Empty:", "X-Latin: caf\xe9"))
    assert list(head.passed_on()) == [
        (b"hOsT", b"a"),
        (b"X-A", b"1"),
        (b"x-a", b"2"),
        (b"X-Empty", b""),
        (b"X-Latin", b"caf\xe9"),
    ]


def test_what_speaks_of_one_connection_stays_on_it() -> None:
    """Connection, what it names, Keep-Alive, Upgrade and the h2c headers are taken off; TE stays where it asks for trailers."""
    head = parse_request(
        request(
            "Host: a", "Connection: X-Hop, keep-alive", "X-Hop: 1", "Keep-Alive: timeout=5", "TE: trailers", "X-End: 2"
        )
    )
    assert list(head.passed_on()) == [(b"Host", b"a"), (b"TE", b"trailers"), (b"X-End", b"2")]
    h2c = parse_request(request("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"))
    assert h2c.upgrade == b"h2c"
    assert list(h2c.passed_on()) == []


def test_connection_cannot_take_framing_or_keys_away() -> None:
    """A sender that names Content-Length, Host or Authorization in Connection does not hide them from the upstream."""
    head = parse_request(
        request(
            "Host: a", "Content-Length: 3", "Authorization: Bearer k", "Connection: content-length, host, authorization"
        )
    )
    assert [name for name, _ in head.passed_on()] == [b"Host", b"Content-Length", b"Authorization"]


@pytest.mark.parametrize(
    ("block", "status"),
    [
        (request("Content-Length: 3", "Transfer-Encoding: chunked"), 400),
        (request("Content-Length: 3", "Content-Length: 3"), 400),
        (request("Content-Length: +3"), 400),
        (request("Content-Length: 3, 3"), 400),
        (request("Transfer-Encoding: gzip, chunked"), 501),
        (request("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400),
        (request("Host : a"), 400),
        (request("A: b", " folded"), 400),
        (request("A: b\nC: d"), 400),
        (request("A: b\x00c"), 400),
        (request(first="POST  /two-spaces HTTP/1.1"), 400),
        (request(first="POST /a b HTTP/1.1"), 400),
        (request(first="POST / HTTP/2.0"), 400),
        (request(first="\x16\x03\x01\x02\x00"), 400),
        (request(first="PRI * HTTP/2.0"), 505),
        (request("Host: a:1", first="CONNECT a:1 HTTP/1.1"), 501),
    ],
)
def test_a_head_that_two_readers_could_read_differently_is_refused(block: bytes, status: int) -> None:
    """Two lengths, folded lines, bare line feeds, TLS or HTTP/2 on a plain port: refused, with the status that says it."""
    with pytest.raises(BadHead) as refused:
        parse_request(block)
    assert refused.value.status == status


def test_an_absolute_target_becomes_a_path() -> None:
    """What a client that takes us for a forward proxy sends is asked from the upstream, whatever host it names."""
    assert parse_request(request(first="GET http://elsewhere:1/v1/models?x=1 HTTP/1.1")).target == b"/v1/models?x=1"
    assert parse_request(request(first="GET http://elsewhere HTTP/1.1")).target == b"/"
    assert parse_request(request(first="GET /v1/models?x=1 HTTP/1.1")).path == b"/v1/models"


def test_the_body_of_an_answer_is_framed_as_the_standard_says() -> None:
    """HEAD, 204 and 304 have none whatever they say; chunked, a length, or until the connection closes."""
    chunked = parse_response(answer("Transfer-Encoding: Chunked"))
    sized = parse_response(answer("Content-Length: 5"))
    bare = parse_response(answer())
    coded = parse_response(answer("Transfer-Encoding: gzip"))
    assert isinstance(chunked.body(b"POST"), ChunkedBody)
    assert isinstance(sized.body(b"POST"), LengthBody)
    assert isinstance(bare.body(b"POST"), UntilClose)
    assert isinstance(coded.body(b"POST"), UntilClose)
    assert sized.body(b"HEAD").done
    assert parse_response(answer("Content-Length: 5", first="HTTP/1.1 304 Not Modified")).body(b"GET").done
    assert parse_response(answer(first="HTTP/1.1 204 No Content")).body(b"POST").done


def test_an_answer_keeps_its_reason_or_its_lack_of_one() -> None:
    """The reason phrase passes as it came, also where there is none."""
    assert parse_response(answer(first="HTTP/1.1 299 As I please")).reason == b"As I please"
    assert parse_response(answer(first="HTTP/1.1 200")).reason == b""


@pytest.mark.parametrize("first", ["HTTP/2 200 OK", "HTTP/1.1 20 OK", "SSH-2.0-OpenSSH", "ICY 200 OK", "<html>"])
def test_what_is_no_http_is_no_head(first: str) -> None:
    """A wrong port is told from an engine."""
    with pytest.raises(BadHead) as refused:
        parse_response(answer(first=first))
    assert refused.value.status == 502


def test_who_wants_to_close_is_read_from_version_and_connection() -> None:
    """HTTP/1.0 closes unless it says keep-alive, HTTP/1.1 stays unless it says close."""
    assert parse_request(request(first="GET / HTTP/1.0")).wants_close
    assert not parse_request(request("Connection: keep-alive", first="GET / HTTP/1.0")).wants_close
    assert not parse_request(request(first="GET / HTTP/1.1")).wants_close
    assert parse_request(request("Connection: close", first="GET / HTTP/1.1")).wants_close


def test_a_rendered_head_is_what_was_parsed() -> None:
    """Nothing is added or lost between the two."""
    block = answer("Content-Type: text/event-stream", "X-A: 1", "x-a: 2", "Transfer-Encoding: chunked")
    head = parse_response(block)
    assert render(b"HTTP/1.1 %d %b" % (head.status, head.reason), head.passed_on()) == block
