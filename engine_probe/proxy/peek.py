"""A few top-level values of a JSON object, read while it streams by: a prompt of 100 MB is never held.

Idea: strings and nested values are skipped by C-level searches; only keys of the outermost object are looked at, and only
values that were asked for are kept (text, numbers, true, false; small objects where they were asked for; nothing longer than
`MAX_VALUE_BYTES`, `MAX_NESTED_BYTES`). Invariant: memory is one key or one value. What is not an object, or not JSON, yields what was found until then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

MAX_VALUE_BYTES: Final = 512
MAX_NESTED_BYTES: Final = 8192
MAX_DEPTH: Final = 512

_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_DEEP = re.compile(rb'["{}\[\]]')
_SHALLOW = re.compile(rb'["{}\[\],:]')
_SPACE = b" \t\r\n"


class Peek:
    """`feed` the body; `values` holds what of `wanted` (and, as dicts, of the objects `nested`) was found so far."""

    __slots__ = (
        "_depth",
        "_escaped",
        "_in_string",
        "_is_dead",
        "_is_key",
        "_key",
        "_nested",
        "_text",
        "_wanted",
        "values",
    )

    def __init__(self, wanted: Iterable[str], nested: Iterable[str] = ()) -> None:
        self.values: dict[str, Any] = {}
        self._nested = frozenset(nested)
        self._wanted = self._nested | frozenset(wanted)
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_key = False
        self._key: str | None = None
        self._text: bytearray | None = None
        self._is_dead = False

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        at, end = 0, len(data)
        while at < end and not self._is_dead:
            if self._in_string:
                at = self._string(data, at)
            elif self._depth == 0:
                at = self._outside(data, at)
            elif self._depth == 1:
                at = self._top(data, at)
            else:
                match = _DEEP.search(data, at)
                stop = end if match is None else match.end()
                if self._text is not None:
                    self._note(data[at:stop])
                at = stop
                if match is not None:
                    self._deep(match[0])

    def _outside(self, data: bytes, at: int) -> int:
        char = data[at : at + 1]
        if char == b"{" and self._key is None and not self.values:
            self._depth, self._is_key = 1, True
        elif char not in _SPACE:
            self._is_dead = True
        return at + 1

    def _string(self, data: bytes, at: int) -> int:
        """Up to the closing quote, or to the end of what is there."""
        begin = at
        if self._escaped:
            self._escaped = False
            at += 1
        match = _IN_STRING.match(data, at)
        assert match is not None
        at = match.end()
        if at == len(data):
            self._note(data[begin:at])
            return at
        if data[at : at + 1] == b"\\":  # the last byte there is: what it escapes comes next
            self._escaped = True
            self._note(data[begin : at + 1])
            return at + 1
        self._note(data[begin : at + 1])
        self._in_string = False
        if self._is_key and self._depth == 1:
            self._key = self._decoded(str)
            self._text = None
        return at + 1

    def _top(self, data: bytes, at: int) -> int:
        """Between the tokens of the outermost object."""
        match = _SHALLOW.search(data, at)
        stop = len(data) if match is None else match.start()
        if not self._is_key:
            self._note(data[at:stop])
        elif data[at:stop].strip(_SPACE):
            self._is_dead = True
        if match is None:
            return stop
        char = match[0]
        if char == b'"':
            self._in_string = True
            if self._is_key:
                self._text = bytearray()
            self._note(char)
        elif char == b":":
            self._is_key = False
            self._text = bytearray() if self._key in self._wanted else None
        elif char in b"{[":
            if char == b"[" or self._key not in self._nested:
                self._text = None
            self._note(char)
            self._depth += 1
        else:  # , } ]
            self._finish_value()
            self._is_key = True
            if char != b",":
                self._depth -= 1
                self._is_dead = True
        return stop + 1

    def _deep(self, char: bytes) -> None:
        if char == b'"':
            self._in_string = True
        elif char in b"{[":
            self._depth += 1
            self._is_dead = self._depth > MAX_DEPTH
        else:
            self._depth -= 1

    def _note(self, part: bytes) -> None:
        if self._text is not None:
            self._text += part
            is_nested = not self._is_key and self._key in self._nested
            if len(self._text) > (MAX_NESTED_BYTES if is_nested else MAX_VALUE_BYTES):
                self._text = None
                if self._is_key:
                    self._key = None

    def _finish_value(self) -> None:
        if self._key in self._wanted and self._key is not None and self._text is not None:
            value = self._decoded(object)
            if isinstance(value, str | int | float | dict):
                self.values.setdefault(self._key, value)
        self._key, self._text = None, None

    def _decoded(self, kind: type) -> Any:
        if not self._text:
            return None
        try:
            value = msgspec.json.decode(bytes(self._text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return value if isinstance(value, kind) else None
