"""Server-sent events out of bytes that come in any pieces: also cut in mid-rune, in mid-line, between CR and LF.

Works on bytes, since a field's bytes need not be text to be found; what is in `data` is somebody else's to decode. An event
larger than `MAX_EVENT_BYTES` is skipped and counted, so memory is bounded. What an end of stream leaves undispatched is
given all the same (the standard would drop it; servers that forget the last empty line exist).
Source: WHATWG HTML, section 9.2.6.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MAX_EVENT_BYTES: Final = 1 << 20

_LINE_END = re.compile(rb"\r\n|\n|\r")
_PLAIN: Final = b"data: "


class Event(NamedTuple):
    """One event: `name` is its `event` field, b"" where it has none."""

    name: bytes
    data: bytes


class SseParser:
    """`feed` bytes, get the events that they complete."""

    __slots__ = (
        "_after_cr",
        "_data",
        "_is_skipping",
        "_is_start",
        "_line",
        "_name",
        "_size",
        "num_skipped",
    )

    def __init__(self) -> None:
        self.num_skipped = 0
        self._is_start = True
        self._after_cr = False
        self._line = bytearray()
        self._name = b""
        self._data: list[bytes] = []
        self._size = 0
        self._is_skipping = False

    def feed(self, chunk: bytes) -> list[Event]:
        """Events in order."""
        if self._is_start and chunk:
            chunk = self._without_bom(chunk)
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if not chunk:
            return []
        if not self._line and not self._size and chunk.endswith(b"\n\n") and b"\r" not in chunk:
            plain = self._plain(chunk)
            if plain is not None:
                return plain
        return self._lines(chunk)

    @property
    def is_between(self) -> bool:
        """The last event is whole, and nothing of a next one has come."""
        return not self._line and not self._size and not self._name and not self._after_cr and not self._is_start

    def finish(self) -> list[Event]:
        """The stream ended: what was begun, where there is something."""
        if self._line:
            self._take_line(bytes(self._line))
            self._line.clear()
        event = self._dispatch()
        return [] if event is None else [event]

    def _plain(self, chunk: bytes) -> list[Event] | None:
        """Whole events of one `data` line each, which is what engines send; None where it is anything else."""
        events = []
        for block in chunk[:-2].split(b"\n\n"):
            if not block.startswith(_PLAIN) or b"\n" in block or len(block) > MAX_EVENT_BYTES:
                return None
            events.append(Event(b"", block[6:]))
        return events

    def _without_bom(self, chunk: bytes) -> bytes:
        """A byte order mark may come in three pieces."""
        self._line += chunk
        begun = bytes(self._line[:3])
        if len(begun) < 3 and b"\xef\xbb\xbf".startswith(begun):
            return b""
        self._is_start = False
        whole = bytes(self._line)
        self._line.clear()
        return whole.removeprefix(b"\xef\xbb\xbf")

    def _lines(self, chunk: bytes) -> list[Event]:
        events = []
        at = 0
        for match in _LINE_END.finditer(chunk):
            line = bytes(self._line) + chunk[at : match.start()] if self._line else chunk[at : match.start()]
            self._line.clear()
            at = match.end()
            if line:
                self._take_line(line)
                continue
            event = self._dispatch()
            if event is not None:
                events.append(event)
        self._after_cr = chunk.endswith(b"\r")
        self._line += chunk[at:]
        if len(self._line) > MAX_EVENT_BYTES:
            self._is_skipping = True
            # Its beginning is kept: whether the line is a comment or a field no longer matters.
            del self._line[1:]
        return events

    def _take_line(self, line: bytes) -> None:
        field, colon, value = line.partition(b":")
        if not field and colon:
            return  # a comment: keep-alive
        value = value.removeprefix(b" ")
        if field == b"data":
            self._size += len(value) + 1
            if self._size > MAX_EVENT_BYTES:
                self._is_skipping = True
                self._data.clear()
            else:
                self._data.append(value)
        elif field == b"event":
            self._name = value

    def _dispatch(self) -> Event | None:
        name, data, size, is_skipping = self._name, self._data, self._size, self._is_skipping
        self._name, self._data, self._size, self._is_skipping = b"", [], 0, False
        if is_skipping:
            self.num_skipped += 1
            return None
        return Event(name, b"\n".join(data)) if size else None
