"""Where bodies end."""

from __future__ import annotations

import pytest

from engine_probe.proxy.framing import BadFraming, Body, ChunkedBody, LengthBody, UntilClose


def feed(body: Body, *parts: bytes) -> tuple[bytes, list[int]]:
    """Payload, and how many bytes of each part were the body's."""
    pieces: list[bytes] = []
    used = [body.feed(part, pieces) for part in parts]
    return b"".join(pieces), used


def test_a_length_ends_after_so_many_bytes() -> None:
    """What follows is not the body's."""
    body = LengthBody(5)
    assert feed(body, b"abc", b"deNEXT") == (b"abcde", [3, 2])
    assert body.done
    assert feed(body, b"NEXT") == (b"", [0])
    assert LengthBody(0).done
    assert not LengthBody(3).closed()


def test_chunks_with_extensions_and_trailers_end_at_the_last_empty_line() -> None:
    """Sizes in either case, extensions and trailer fields are body; the next message is not."""
    body = ChunkedBody()
    wire = b'A;name="v"\r\n0123456789\r\nb \r\n01234567890\r\n0\r\nX-Sum: 1\r\nX-B: 2\r\n\r\n'
    assert feed(body, wire + b"HTTP/1.1 200") == (b"012345678901234567890", [len(wire)])
    assert body.done


def test_chunks_may_be_cut_anywhere() -> None:
    """One byte at a time gives the same body."""
    wire = b"3\r\nabc\r\n2\r\nde\r\n0\r\nT: 1\r\n\r\n"
    body = ChunkedBody()
    payload, used = feed(body, *(wire[i : i + 1] for i in range(len(wire))))
    assert (payload, sum(used), body.done) == (b"abcde", len(wire), True)


@pytest.mark.parametrize(
    "wire",
    [
        b"x\r\n",
        b"\r\n",
        b"-1\r\n",
        b"0x3\r\nabc\r\n",
        b"3\nabc\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabc\n",
        b"1" * 16 + b"\r\n",
        b"3 3\r\nabc\r\n",
        b"3;\x00\r\nabc\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\n: no name\r\n\r\n",
        b"0\r\n" + b"A: b\r\n" * 20000,
        b"5" * 5000,
        b"3;" + b"e" * 5000,
    ],
)
def test_what_is_no_chunk_is_refused(wire: bytes) -> None:
    """Lenient readings are how two servers come to disagree about where a request ends."""
    with pytest.raises(BadFraming):
        feed(ChunkedBody(), wire)


def test_a_closed_connection_ends_only_a_body_that_ends_with_it() -> None:
    """Elsewhere it is a body cut off."""
    assert UntilClose().closed()
    assert not ChunkedBody().closed()
