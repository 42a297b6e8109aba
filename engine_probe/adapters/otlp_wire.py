"""Protobuf spans with a few of their attributes, fast: what the library reads once becomes a pattern for the next.

Idea: the protobuf library parses a span in 1 us, but reading its attributes through it costs 15 us. Spans of one
exporter differ only in their numbers and ids. So the first span of a shape is read through the library, and a pattern
of its canonical bytes (`SerializeToString`: field order, lengths and numbers in their one form) is learned, which
then reads spans of that shape in one match. Invariant: both ways give the same. A string, whose length a pattern
cannot check, is checked after the match; whatever does not fit goes through the library. Source: OTLP 1.x
`trace.proto`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

from engine_probe.errors import UnknownFormat

MAX_SHAPES: Final = 8
"""Shapes learned; spans of further ones are read through the library."""

_DOUBLE: Final = Struct("<d").unpack
_FIXED64: Final = Struct("<Q").unpack
_ERROR: Final = 2  # STATUS_CODE_ERROR

# Canonical field order: trace id, span id, parent, name, kind, start, end, attributes, status, flags.
_HEAD: Final = rb"\n\x10(.{16})\x12\x08(.{8})(?:\x22\x08.{8})?\x2a%b%b(?:\x30[\x00-\x7f])?\x39(.{8})\x41(.{8})"
_TAIL: Final = rb"(?:\x7a\x00)?(?:\x85\x01.{4})?"
_VARINT: Final = rb"\x18([\x80-\xff]{0,9}[\x00-\x7f])"
_STRING: Final = rb"\x0a([\x00-\x7f])(.{0,127}?)"


@dataclass(frozen=True, slots=True)
class Span:
    """What is used of a span: `failed` is the status message of an error (or "error"), None where it is none."""

    trace_id: bytes
    span_id: bytes
    start_ns: int
    end_ns: int
    failed: str | None
    attributes: Mapping[str, Any]


Found = tuple[str | None, Span | None]
"""(service.name, the span); a span of another name is None: it is only counted."""


def hex_id(text: str) -> bytes:
    """A trace or span id of the JSON form; empty where it is no hexadecimal, so that one bad span costs no other."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


class SpanReader:
    """Reads spans called `name` with those attributes that are `wanted`; keeps the shapes it has learned."""

    def __init__(self, name: str, wanted: frozenset[str]) -> None:
        self._name = name
        self._wanted = wanted
        self._shapes: list[_Shape] = []

    def read(self, body: bytes) -> Iterator[Found]:
        """Spans of an ExportTraceServiceRequest, in order. Raises UnknownFormat for bytes that are none."""
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest()
        try:
            request.ParseFromString(body)
        except (DecodeError, RecursionError, ValueError) as error:
            raise UnknownFormat(
                f"The trace body ({len(body)} bytes) is not an OTLP protobuf message: {error}"
            ) from error
        for resource_spans in request.resource_spans:
            service = None
            for pair in resource_spans.resource.attributes:
                if pair.key == "service.name" and pair.value.HasField("string_value"):
                    service = pair.value.string_value
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    yield service, self._span(span)

    def _span(self, span: Any) -> Span | None:
        if span.name != self._name:
            return None
        data = span.SerializeToString()
        for shape in self._shapes:
            read = shape.read(data)
            if read is not None:
                return read
        if len(self._shapes) < MAX_SHAPES:
            learned = _Shape.learn(span, self._name, self._wanted)
            if learned is not None and learned.read(data) is not None:
                self._shapes.append(learned)
        return read_span(span, self._wanted)


def read_span(span: Any, wanted: frozenset[str]) -> Span:
    """One span through the protobuf library: the slow, certain way."""
    attributes: dict[str, Any] = {}
    for pair in span.attributes:
        if pair.key in wanted:
            which = pair.value.WhichOneof("value")
            attributes[pair.key] = None if which is None else getattr(pair.value, which)
    failed = (span.status.message or "error") if span.status.code == _ERROR else None
    start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
    return Span(span.trace_id, span.span_id, start_ns, end_ns, failed, attributes)


class _Shape:
    """Attributes of a span in their order, with their types, as one pattern."""

    def __init__(
        self, pattern: re.Pattern[bytes], doubles: dict[str, int], ints: dict[str, int], texts: dict[str, int]
    ):
        self._pattern = pattern
        self._doubles, self._ints = list(doubles.items()), list(ints.items())
        self._texts = list(texts.items())

    @staticmethod
    def learn(span: Any, name: str, wanted: frozenset[str]) -> _Shape | None:
        """The shape of this span; None where a type or a size occurs that a pattern does not read."""
        keys = [pair.key for pair in span.attributes]
        types = [pair.value.WhichOneof("value") for pair in span.attributes]
        if len(set(keys)) < len(keys) or len(keys) > 32 or len(name) > 127:
            return None
        text = _HEAD % (re.escape(bytes([len(name)])), re.escape(name.encode()))
        groups = 4
        doubles: dict[str, int] = {}
        ints: dict[str, int] = {}
        texts: dict[str, int] = {}
        for key, kind in zip(keys, types, strict=True):
            field = key.encode()
            if len(field) > 100:
                return None
            field = bytes([0x0A, len(field)]) + field
            if kind == "double_value":
                text += re.escape(bytes([0x4A, len(field) + 11]) + field + b"\x12\x09\x21")
                if key not in wanted:
                    text += b".{8}"
                    continue
                text, place = text + b"(.{8})", doubles
            elif kind in ("int_value", "string_value"):
                value, place = (_VARINT, ints) if kind == "int_value" else (_STRING, texts)
                text += rb"\x4a[\x00-\x7f]" + re.escape(field) + rb"\x12[\x00-\x7f]" + value
            else:
                return None
            groups += 1
            place[key] = groups
            groups += place is texts
        pattern = re.compile(text + _TAIL, re.DOTALL)
        ints = {key: group for key, group in ints.items() if key in wanted}
        return _Shape(pattern, doubles, ints, texts)

    def read(self, data: bytes) -> Span | None:
        """The span in these canonical bytes; None where they are of another shape."""
        match = self._pattern.fullmatch(data)
        if match is None:
            return None
        group = match.groups()
        attributes: dict[str, Any] = {}
        for key, at in self._texts:
            if group[at - 1][0] != len(group[at]):
                return None
            attributes[key] = group[at].decode()
        for key, at in self._doubles:
            attributes[key] = _DOUBLE(group[at - 1])[0]
        for key, at in self._ints:
            attributes[key] = _integer(group[at - 1])
        return Span(group[0], group[1], _FIXED64(group[2])[0], _FIXED64(group[3])[0], None, attributes)


def _integer(varint: bytes) -> int:
    """An int64 in base-128 groups of 7 bits, lowest first."""
    value = 0
    for place, byte in enumerate(varint):
        value |= (byte & 0x7F) << 7 * place
    return value - (1 << 64) if value >> 63 else value
