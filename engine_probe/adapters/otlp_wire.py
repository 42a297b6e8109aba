"""Protobuf spans with a few of their attributes, by column: the library checks the body, shapes read it.

Idea: the protobuf library parses a span in about 1 us, but reading a dozen attributes through it costs 30 us. So it
parses the body, which refuses whatever is none, and says which spans are ours; their bytes are then cut out of the body
and read by `otlp_shapes`, all spans of one structure at once. Invariant: both ways give the same. What is unusual (a
structure that has no shape, one of too many, a body that cannot be cut) goes through the library span by span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine_probe.adapters.otlp_shapes import Shape
from engine_probe.errors import UnknownFormat

MAX_SHAPES: Final = 32
"""Shapes tried in one body. Each is compared with all spans that are left, so new ones without end would be dear."""
_FEW: Final = 4
"""So few spans are read through the library before a shape of theirs is learned."""
_ERROR: Final = 2  # STATUS_CODE_ERROR
_RESOURCE_SPANS: Final = 0x0A
_SCOPE_SPANS = _SPANS = 0x12

Row = dict[str, Any]
"""One span: service, trace_id, span_id, start_ns, end_ns, failed (the message of an error, or "error"), attributes."""
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans by column: what a `Row` has, each a list of `count` values, None where a span lacks it."""

    count: int
    columns: dict[str, list[Any]]

    def get(self, name: str) -> list[Any]:
        """A column; all None where no span has it."""
        return self.columns.get(name) or [None] * self.count

    def row(self, position: int) -> Row:
        """One of the spans."""
        return {name: column[position] for name, column in self.columns.items()}

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Spans:
        """Spans that were read one by one."""
        names = dict.fromkeys(name for row in rows for name in row)
        return cls(len(rows), {name: [row.get(name) for row in rows] for name in names})

    @classmethod
    def join(cls, parts: Sequence[tuple[Sequence[int], Spans]]) -> Spans:
        """Parts of a body in its order; each says at which places its spans stood."""
        places = [place for where, _ in parts for place in where]
        names = dict.fromkeys(name for _, part in parts for name in part.columns)
        columns = {name: [value for _, part in parts for value in part.get(name)] for name in names}
        if len(parts) > 1:
            in_order = itemgetter(*np.argsort(np.array(places, dtype=np.int64)).tolist())
            columns = {name: list(in_order(column)) for name, column in columns.items()}
        return cls(len(places), columns)


def hex_id(text: str) -> bytes:
    """A trace or span id of the JSON form; empty where it is no hexadecimal, so that one bad span costs no other."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def read_spans(body: bytes, name: str, wanted: frozenset[str]) -> tuple[Spans, int]:
    """The spans called `name` with those attributes that are `wanted`, in order, and how many others there are.

    Raises UnknownFormat for bytes that are no ExportTraceServiceRequest.
    """
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(body)
    except (DecodeError, RecursionError, ValueError) as error:
        raise UnknownFormat(f"The trace body ({len(body)} bytes) is not an OTLP protobuf message: {error}") from error
    messages: list[Any] = []
    services: list[str | None] = []
    for resource_spans in request.resource_spans:
        service = None
        for pair in resource_spans.resource.attributes:
            if pair.key == "service.name" and pair.value.HasField("string_value"):
                service = pair.value.string_value
        for scope_spans in resource_spans.scope_spans:
            messages += scope_spans.spans
        services += [service] * (len(messages) - len(services))
    ours = [place for place, message in enumerate(messages) if message.name == name]
    parts: list[tuple[Sequence[int], Spans]] = []
    left: Sequence[int] = ours
    if len(ours) > _FEW and len(cuts := _cut(body)) == len(messages):
        parts, left = _by_shape(body, np.array(cuts, dtype=np.int64), messages, ours, wanted)
    if left:
        parts.append((left, Spans.of([read_span(messages[place], wanted) for place in left])))
    spans = Spans.join(parts)
    spans.columns["service"] = [services[place] for place in ours]
    return spans, len(messages) - len(ours)


def read_span(span: Any, wanted: frozenset[str]) -> Row:
    """One span through the protobuf library: the slow, certain way."""
    row: Row = {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "failed": (span.status.message or "error") if span.status.code == _ERROR else None,
    }
    for pair in span.attributes:
        if pair.key in wanted:
            which = pair.value.WhichOneof("value")
            row[pair.key] = None if which is None else getattr(pair.value, which)
    return row


def _by_shape(
    body: bytes, cuts: Places, messages: Sequence[Any], ours: Sequence[int], wanted: frozenset[str]
) -> tuple[list[tuple[Sequence[int], Spans]], list[int]]:
    """What shapes read of `ours`, and the places of the spans that they do not read.

    cuts   [len(messages), 2] where in the body each span begins and ends
    """
    data = np.frombuffer(body, dtype=np.uint8)
    starts, sizes = cuts[:, 0], cuts[:, 1] - cuts[:, 0]
    parts: list[tuple[Sequence[int], Spans]] = []
    unusual: list[int] = []
    rest = np.array(ours, dtype=np.int64)
    for _ in range(MAX_SHAPES):
        if len(rest) <= _FEW:
            break
        first = rest[0]
        shape = Shape.learn(body[starts[first] : starts[first] + sizes[first]], wanted)
        if shape is not None:
            alike = np.flatnonzero(sizes[rest] == sizes[first])
            cells = np.lib.stride_tricks.sliding_window_view(data, sizes[first])[starts[rest[alike]]]
            fitting = shape.fits(cells)
            part = Spans(int(fitting.sum()), shape.read(cells[fitting]))
            expected = read_span(messages[first], wanted)
            if part.row(0) | {"failed": None} == expected:
                parts.append((rest[alike[fitting]].tolist(), part))
                rest = np.delete(rest, alike[fitting])
                continue
        unusual.append(int(first))
        rest = rest[1:]
    return parts, unusual + rest.tolist()


def _cut(body: bytes) -> list[tuple[int, int]]:
    """Where each span of a body that the library has parsed begins and ends; empty where its encoding is unusual."""
    try:
        return [
            span
            for resource_spans in _fields(body, 0, len(body), _RESOURCE_SPANS)
            for scope_spans in _fields(body, *resource_spans, _SCOPE_SPANS)
            for span in _fields(body, *scope_spans, _SPANS)
        ]
    except (LookupError, _Unusual):
        return []


class _Unusual(Exception):
    """A form of the wire that no OTLP sender uses: the protobuf library reads such a body."""


def _fields(body: bytes, place: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Where the contents of the fields with this tag, which tell their length, begin and end in a message.

    Raises _Unusual for tags and lengths of more bytes than OTLP has, and for groups.
    """
    while place < end:
        tag, place = body[place], place + 1
        kind = tag & 0x07
        if tag >= 0x80 or kind in (3, 4):
            raise _Unusual
        if kind == 0:
            while body[place] >= 0x80:
                place += 1
            place += 1
        elif kind == 2:
            size, shift = body[place], 7
            place += 1
            if size >= 0x80:
                size &= 0x7F
                while (more := body[place]) >= 0x80:
                    size, shift, place = size | (more & 0x7F) << shift, shift + 7, place + 1
                size, place = size | more << shift, place + 1
            if tag == wanted:
                yield place, place + size
            place += size
        else:
            place += 8 if kind == 1 else 4
