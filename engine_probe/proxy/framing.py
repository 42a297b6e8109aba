"""Where a message body ends, found without changing a byte: fixed length, chunked, until the connection closes, or none.

`feed` takes raw bytes as they came from the socket, says how many of them belong to this body (the rest is the next message,
or rubbish), and appends the payload inside them to `pieces`. Chunk sizes, extensions and trailers count as body and pass
through raw. Strict where leniency would let two parsers disagree (request smuggling): a size is 1 to 15 hex digits, lines
end in CRLF. Source: RFC 9112, sections 6 and 7.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

MAX_LINE_BYTES: Final = 4096
MAX_TRAILER_BYTES: Final = 65536

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\Z")
_FIELD_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\Z")


class BadFraming(Exception):
    """The bytes are no body of this framing. `consumed` bytes of the last `feed` came before the fault."""


class Body(Protocol):
    """One body. `done`: its last byte was fed."""

    done: bool

    def feed(self, data: bytes, pieces: list[bytes]) -> int:
        """How many bytes of `data` belong to the body; payload is appended to `pieces`. Raises BadFraming."""
        ...

    def closed(self) -> bool:
        """The connection closed; True where that is a proper end of this body."""
        ...


class LengthBody:
    """A body of so many bytes; 0 for a message without one."""

    __slots__ = (
        "done",
        "left",
    )

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = length == 0

    def feed(self, data: bytes, pieces: list[bytes]) -> int:
        if self.done:
            return 0
        taken = min(len(data), self.left)
        pieces.append(data if taken == len(data) else data[:taken])
        self.left -= taken
        self.done = self.left == 0
        return taken

    def closed(self) -> bool:
        return self.done


class UntilClose:
    """A body that ends with its connection."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes, pieces: list[bytes]) -> int:
        pieces.append(data)
        return len(data)

    def closed(self) -> bool:
        self.done = True
        return True


_SIZE, _DATA, _DATA_END, _TRAILER = range(4)


class ChunkedBody:
    """A body in chunks."""

    __slots__ = (
        "_left",
        "_line",
        "_state",
        "_trailer_bytes",
        "done",
    )

    def __init__(self) -> None:
        self.done = False
        self._state = _SIZE
        self._left = 0
        self._line = b""
        self._trailer_bytes = 0

    def feed(self, data: bytes, pieces: list[bytes]) -> int:
        at, end = 0, len(data)
        if self._state == _SIZE and not self._line:
            # Almost always a read is one chunk, whole: what follows is this case of the loop below, in one step.
            newline = data.find(b"\r\n", 0, 18)
            match = _SIZE_LINE.match(data[:newline]) if newline > 0 else None
            if match is not None:
                size = int(match[1], 16)
                if size and newline + size + 4 == end and data.endswith(b"\r\n"):
                    pieces.append(data[newline + 2 : -2])
                    return end
        while at < end and not self.done:
            if self._state == _DATA:
                stop = min(at + self._left, end)
                pieces.append(data[at:stop])
                self._left -= stop - at
                at = stop
                if self._left == 0:
                    self._state = _DATA_END
                continue
            newline = data.find(b"\n", at)
            if newline < 0:
                self._line += data[at:]
                if len(self._line) > MAX_LINE_BYTES:
                    raise BadFraming("a chunk's line is too long")
                return end
            line = self._line + data[at:newline]
            if len(line) > MAX_LINE_BYTES:
                raise BadFraming("a chunk's line is too long")
            if not line.endswith(b"\r"):
                raise BadFraming("a chunk's line does not end in CRLF")
            self._line = b""
            at = newline + 1
            self._take_line(line[:-1])
        return at

    def closed(self) -> bool:
        return self.done

    def _take_line(self, line: bytes) -> None:
        if self._state == _DATA_END:
            if line:
                raise BadFraming("a chunk is longer than its size says")
            self._state = _SIZE
        elif self._state == _SIZE:
            match = _SIZE_LINE.match(line)
            if match is None:
                raise BadFraming("a chunk's size is not a hexadecimal number")
            self._left = int(match[1], 16)
            self._state = _DATA if self._left else _TRAILER
        elif not line:
            self.done = True
        else:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILER_BYTES or _FIELD_LINE.match(line) is None:
                raise BadFraming("the trailer is too long, or not made of header fields")
