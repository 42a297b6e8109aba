"""Heads of requests and answers: checked by llhttp (Node's parser, through httptools), rewritten as a proxy must, no more.

Passed on: every header with its bytes, case and order. Left out: what speaks of one connection only (`Connection` and what it
names, `Keep-Alive`, `Proxy-Connection`, `Upgrade`; RFC 9110, section 7.6.1). `Transfer-Encoding` stays, because bodies pass raw.
Invariant: a head with two opinions about its length (two Content-Lengths, or one beside Transfer-Encoding) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httptools

from engine_probe.proxy.framing import Body, ChunkedBody, LengthBody, UntilClose

MAX_HEAD_BYTES: Final = 65536
END: Final = b"\r\n\r\n"

Header = tuple[bytes, bytes]

_HOP: Final = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"http2-settings"))
_DIGITS = re.compile(rb"[0-9]{1,18}\Z")
_REQUEST_LINE = re.compile(rb"([A-Z][A-Z0-9_\-]{0,31}) ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])\Z")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?\Z")
_NO_BODY_STATUSES: Final = frozenset((204, 304))


class BadHead(Exception):
    """The bytes are no head that can be passed on. `status` is what a client is answered."""

    def __init__(self, problem: str, status: int = 400) -> None:
        super().__init__(problem)
        self.problem = problem
        self.status = status


@dataclass(slots=True)
class Head:
    """What requests and answers share. `headers` as they came; `wants_close`: this connection ends after the message."""

    headers: Sequence[Header]
    minor: int
    wants_close: bool
    is_chunked: bool
    length: int | None
    by_name: dict[bytes, bytes] = field(default_factory=dict)

    def get(self, name: bytes) -> bytes | None:
        """The first header of this (lower-case) name."""
        return self.by_name.get(name)

    def passed_on(self) -> Iterable[Header]:
        """The headers without those that speak of one connection."""
        named = {token.strip().lower() for token in self.by_name.get(b"connection", b"").split(b",")}
        # A sender could name a header here to have it taken away from the next reader: framing and routing stay.
        named -= {b"host", b"content-length", b"transfer-encoding", b"authorization", b""}
        for name, value in self.headers:
            lower = name.lower()
            if lower not in _HOP and lower not in named and (lower != b"te" or b"trailers" in value):
                yield name, value


@dataclass(slots=True)
class RequestHead(Head):
    """A request's head. `target` is in origin form; `upgrade` what it wants to become (a websocket, ...), lower case."""

    method: bytes = b""
    target: bytes = b""
    upgrade: bytes | None = None

    @property
    def path(self) -> bytes:
        """The target without its query."""
        return self.target.partition(b"?")[0]

    def body(self) -> Body:
        """The framing of its body."""
        return ChunkedBody() if self.is_chunked else LengthBody(self.length or 0)


@dataclass(slots=True)
class ResponseHead(Head):
    """An answer's head. `reason` as it came."""

    status: int = 0
    reason: bytes = b""

    def body(self, method: bytes) -> Body:
        """The framing of the body that answers a request of this method."""
        if method == b"HEAD" or self.status < 200 or self.status in _NO_BODY_STATUSES:
            return LengthBody(0)
        if self.is_chunked:
            return ChunkedBody()
        if self.length is not None and self.get(b"transfer-encoding") is None:
            return LengthBody(self.length)
        return UntilClose()


def parse_request(block: bytes) -> RequestHead:
    """`block` is a whole head, END included. Raises BadHead."""
    line = block[: block.find(b"\r\n")]
    if line.startswith(b"PRI * HTTP/2"):
        raise BadHead("this is HTTP/2; kvscope proxy speaks HTTP/1.1", 505)
    match = _REQUEST_LINE.match(line)
    if match is None:
        raise BadHead("the first line is not METHOD TARGET HTTP/1.1")
    seen = _Seen()
    _feed(httptools.HttpRequestParser(seen), block)
    common = _common(seen.headers, int(match[3]))
    encoding = common["by_name"].get(b"transfer-encoding")
    if encoding is not None and not common["is_chunked"]:
        raise BadHead("the only Transfer-Encoding of requests that is known is chunked", 501)
    if match[1] == b"CONNECT":
        raise BadHead("CONNECT is for tunnels; this is a reverse proxy", 501)
    upgrade = common["by_name"].get(b"upgrade")
    wants = b"upgrade" in common["by_name"].get(b"connection", b"").lower()
    return RequestHead(
        **common,
        method=match[1],
        target=_origin_form(match[2]),
        upgrade=upgrade.strip().lower() if upgrade and wants else None,
    )


def parse_response(block: bytes) -> ResponseHead:
    """`block` is a whole head, END included. Raises BadHead."""
    match = _STATUS_LINE.match(block[: block.find(b"\r\n")])
    if match is None:
        raise BadHead("its first line is not HTTP/1.1 STATUS", 502)
    seen = _Seen()
    try:
        _feed(httptools.HttpResponseParser(seen), block)
        common = _common(seen.headers, int(match[1]))
    except BadHead as error:
        raise BadHead(error.problem, 502) from error
    return ResponseHead(**common, status=int(match[2]), reason=match[3] or b"")


def render(first_line: bytes, headers: Iterable[Header]) -> bytes:
    """The bytes of a head."""
    return b"".join((first_line, b"\r\n", *(b"%b: %b\r\n" % header for header in headers), b"\r\n"))


class _Seen:
    """What httptools calls back."""

    def __init__(self) -> None:
        self.headers: list[Header] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))


def _feed(parser: Any, block: bytes) -> None:
    try:
        parser.feed_data(block)
    except httptools.HttpParserUpgrade:
        pass  # what may follow an upgrade is none of the head's business
    except httptools.HttpParserError as error:
        raise BadHead(f"the head is not HTTP/1.1 ({error})") from error


def _common(headers: list[Header], minor: int) -> dict[str, Any]:
    by_name: dict[bytes, bytes] = {}
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"connection" and lower in by_name:
            by_name[lower] += b"," + value
        else:
            by_name.setdefault(lower, value)
        if lower == b"content-length":
            lengths.append(value)
        elif lower == b"transfer-encoding":
            encodings.append(value)
    if len(lengths) > 1 or (lengths and encodings) or len(encodings) > 1:
        raise BadHead("the head says twice how long its body is")
    if lengths and _DIGITS.match(lengths[0]) is None:
        raise BadHead("Content-Length is not a number")
    tokens = {token.strip().lower() for token in by_name.get(b"connection", b"").split(b",")}
    return {
        "headers": headers,
        "minor": minor,
        "wants_close": b"close" in tokens if minor else b"keep-alive" not in tokens,
        "is_chunked": bool(encodings) and encodings[0].strip().lower() == b"chunked",
        "length": int(lengths[0]) if lengths else None,
        "by_name": by_name,
    }


def _origin_form(target: bytes) -> bytes:
    """`http://host/path` -> `/path`; the other forms as they are."""
    scheme, mark, rest = target.partition(b"://")
    if mark and scheme.lower() in (b"http", b"https"):
        _, slash, path = rest.partition(b"/")
        return slash + path if slash else b"/"
    return target
