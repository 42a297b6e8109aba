"""Spans of one structure, read by column: the first is walked byte by byte, the others only compared with it.

Idea: spans of one exporter differ in ids, numbers and instants and in little else. A shape is the bytes of one span with
a mask: tags, lengths and keys must be equal, of a varint the continuation bits, anything may stand in a value. What fits
the mask is parsed as the first span was, so its values lie at the same places and are cut out of all spans at once.
Invariant: a shape reads what the protobuf library reads. It is learned only of spans whose every field is known here and
occurs once; its reader checks it against the library before it is used. Source: OTLP 1.x `trace.proto`, protobuf encoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Slot = tuple[str, int, int]
"""(how to read it, place, size) of a value in the span's bytes."""

_SAME, _VARINT, _ANY = 0xFF, 0x80, 0x00
_TRACE_ID, _SPAN_ID, _PARENT, _NAME, _KIND, _START, _END = 0x0A, 0x12, 0x22, 0x2A, 0x30, 0x39, 0x41
_ATTRIBUTE, _STATUS, _FLAGS = 0x4A, 0x7A, b"\x85\x01"
_FIELDS: Final = frozenset(("trace_id", "span_id", "start_ns", "end_ns"))
_IDS: Final = {_TRACE_ID: 16, _SPAN_ID: 8}
_KEY, _VALUE = 0x0A, 0x12
_STRING, _INT, _DOUBLE = 0x0A, 0x18, 0x21


class _Unusual(Exception):
    """Something occurs that a shape does not read."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the values of a span of this structure lie.

    mask    which bits of each byte are structure, [size]
    fixed   what these bits are, [size]
    slots   "trace_id", "span_id", "start_ns", "end_ns" or a wanted attribute -> where its value is
    """

    mask: Bytes
    fixed: Bytes
    slots: dict[str, Slot]

    @staticmethod
    def learn(span: bytes, wanted: frozenset[str]) -> Shape | None:
        """The shape of a span that the protobuf library has parsed; None where it is unusual."""
        try:
            return _Walk(span, wanted).shape()
        except (_Unusual, IndexError, UnicodeDecodeError):
            return None

    def fits(self, spans: Bytes) -> npt.NDArray[np.bool_]:
        """Which of these spans, [count, size], have the structure."""
        return np.asarray(((spans & self.mask) == self.fixed).all(axis=1))

    def read(self, spans: Bytes) -> dict[str, list[Any]]:
        """The values of spans that fit, [count, size]: field or attribute -> one a span."""
        return {
            name: _READERS[how](np.ascontiguousarray(spans[:, place : place + size]))
            for name, (how, place, size) in self.slots.items()
        }


class _Walk:
    """One way through the bytes of a span, which fills the mask and the slots."""

    def __init__(self, span: bytes, wanted: frozenset[str]) -> None:
        self._span, self._wanted = span, wanted
        self._mask = np.full(len(span), _SAME, dtype=np.uint8)
        self._slots: dict[str, Slot] = {}
        self._seen: set[int | bytes] = set()

    def shape(self) -> Shape:
        """Raises _Unusual, or IndexError where the bytes end too soon."""
        place = 0
        while place < len(self._span):
            place = self._field(place)
        if place != len(self._span) or not self._slots.keys() >= _FIELDS:
            raise _Unusual
        fixed = np.frombuffer(self._span, dtype=np.uint8) & self._mask
        return Shape(self._mask, fixed, self._slots)

    def _field(self, place: int) -> int:
        """One field of the span from `place` on; the place after it."""
        tag: int | bytes = self._span[place]
        if self._span[place : place + 2] == _FLAGS:
            tag, place = _FLAGS, place + 1
        if tag in self._seen and tag != _ATTRIBUTE:
            raise _Unusual
        self._seen.add(tag)
        place += 1
        if tag in (_START, _END):
            return self._value("start_ns" if tag == _START else "end_ns", "fixed64", place, 8)
        if tag == _FLAGS:
            return self._free(place, 4)
        if tag == _KIND:
            return self._varint(place)
        size = self._span[place]
        end = place + 1 + size
        if tag == _ATTRIBUTE:
            start, end = self._length(place)
            self._attribute(start, end)
        elif tag in _IDS and size == _IDS[tag]:
            self._value("trace_id" if tag == _TRACE_ID else "span_id", "bytes", place + 1, size)
        elif tag == _PARENT and size < 0x80:
            self._free(place + 1, size)
        elif not (tag == _NAME and size < 0x80) and not (tag == _STATUS and size == 0):
            raise _Unusual
        return end

    def _attribute(self, place: int, end: int) -> None:
        if self._span[place] != _KEY:
            raise _Unusual
        start, after = self._length(place + 1)
        key = self._span[start:after].decode()
        if self._span[after] != _VALUE:
            raise _Unusual
        start, stop = self._length(after + 1)
        if stop != end:
            raise _Unusual
        kind, start = self._span[start], start + 1
        if kind == _DOUBLE:
            slot, after = ("double", start, 8), self._free(start, 8)
        elif kind == _INT:
            after = self._varint(start)
            slot = ("varint", start, after - start)
        elif kind == _STRING:
            start, after = self._length(start)
            slot = ("text", start, after - start)
            self._free(start, after - start)
        else:
            raise _Unusual
        if after != end or key in self._slots:
            raise _Unusual
        if key in self._wanted:
            self._slots[key] = slot

    def _length(self, place: int) -> tuple[int, int]:
        """Where a field that tells its length begins and ends; the length itself is part of the structure."""
        size = self._span[place]
        if size < 0x80:
            return place + 1, place + 1 + size
        if self._span[place + 1] >= 0x80:
            raise _Unusual
        return place + 2, place + 2 + (size & 0x7F) + (self._span[place + 1] << 7)

    def _value(self, name: str, how: str, place: int, size: int) -> int:
        self._slots[name] = (how, place, size)
        return self._free(place, size)

    def _varint(self, place: int) -> int:
        start = place
        while self._span[place] >= 0x80:
            place += 1
        if place - start > 9:
            raise _Unusual
        self._mask[start : place + 1] = _VARINT
        return place + 1

    def _free(self, place: int, size: int) -> int:
        if place + size > len(self._span):
            raise _Unusual
        self._mask[place : place + size] = _ANY
        return place + size


def _bytes(cells: Bytes) -> list[Any]:
    packed, size = cells.tobytes(), cells.shape[1]
    return [packed[start : start + size] for start in range(0, len(packed), size)]


def _texts(cells: Bytes) -> list[Any]:
    packed, size = cells.tobytes(), cells.shape[1]
    if size == 0:
        return [""] * len(cells)
    if not packed.isascii():
        return [text.decode() for text in _bytes(cells)]
    text = packed.decode("ascii")
    return [text[start : start + size] for start in range(0, len(text), size)]


def _varints(cells: Bytes) -> list[Any]:
    """int64 in base-128 groups of 7 bits, lowest first; what lies above 64 bits falls away, as in the library."""
    numbers = np.zeros(len(cells), dtype=np.uint64)
    for place in range(cells.shape[1]):
        numbers |= (cells[:, place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return numbers.view(np.int64).tolist()


_READERS: Final[dict[str, Callable[[Bytes], list[Any]]]] = {
    "bytes": _bytes,
    "text": _texts,
    "varint": _varints,
    "fixed64": lambda cells: cells.view("<u8")[:, 0].tolist(),
    "double": lambda cells: cells.view("<f8")[:, 0].tolist(),
}
