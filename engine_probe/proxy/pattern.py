"""The next chunk of a stream looks like the last one, but for its text: recognised without being parsed.

Idea: engines write each chunk from one template. If a piece of the stream is one event that begins and ends with the bytes
around the last one's text, and between them there is no quote, no line end, and no backslash before the closing quote, then
it is the same document with another text: same ids, same choice, nothing else in it. Anything else is parsed. This saves
most of the work for most of the chunks.
"""

from __future__ import annotations

import re
from typing import Final

_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text)" ?: ?"')
MAX_FRAME_BYTES: Final = 4096


class Pattern:
    """The bytes before and after the text of an event."""

    __slots__ = ("_after", "_before", "_shortest", "_stop")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after
        self._shortest = len(before) + len(after)
        self._stop = -len(after)

    def fits(self, piece: bytes) -> bool:
        """The piece is such an event, with at least one byte of text."""
        if len(piece) <= self._shortest or not piece.startswith(self._before) or not piece.endswith(self._after):
            return False
        text = piece[len(self._before) : self._stop]
        return b'"' not in text and b"\n" not in text and b"\r" not in text and text[-1] != 0x5C


def learn(data: bytes) -> Pattern | None:
    """The pattern of a chunk that was parsed and holds text of one choice; None where it does not show plainly.

    data: of an event that came as one line.
    """
    if len(data) > MAX_FRAME_BYTES:
        return None
    # The one text that is not empty: a second field with text, or none, is no pattern.
    full = [place for place in _TEXT.finditer(data) if data[place.end() : place.end() + 1] != b'"']
    if len(full) != 1:
        return None
    begin = full[0].end()
    end = data.find(b'"', begin)
    if end < 0 or data[end - 1 : end] == b"\\":
        return None
    return Pattern(b"data: " + data[:begin], data[end:] + b"\n\n")
