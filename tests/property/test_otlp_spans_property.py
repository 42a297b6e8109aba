"""OTLP protobuf: spans read by shape are those that the protobuf library reads, whatever exporters do to their bytes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from engine_probe.adapters.otlp_wire import read_span, read_spans

NAME = "llm_request"
WANTED = frozenset(("ttft", "tokens", "id", "odd"))

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "double_value": st.sampled_from([0.0, -0.0, 0.25, float("nan"), float("inf")]) | st.floats(),
    "int_value": st.sampled_from([0, 1, 127, 128, 300, 16_383, 16_384, -1, 2**62]),
    "string_value": st.sampled_from(["", "a", "bc", "é", "def", "x" * 130, "y" * 131]),
    "bool_value": st.booleans(),
    "bytes_value": st.binary(max_size=3),
}
"""Few values of neighbouring lengths: spans of one size whose inner lengths differ are what a shape could confuse."""
USUAL = ["double_value", "int_value", "string_value"]
KEYS = st.sampled_from(["ttft", "tokens", "id", "odd", "other", "é", "k" * 140])
STRUCTURES = st.one_of(
    st.lists(st.tuples(KEYS, st.sampled_from(USUAL)), min_size=2, max_size=5, unique_by=lambda pair: pair[0]),
    st.lists(st.tuples(KEYS, st.sampled_from(sorted(VALUES))), max_size=5),
)
"""Keys and types in the order of a span's attributes: many spans share one."""


@st.composite
def parts_of(draw: st.DrawFn, structure: list[tuple[str, str]]) -> list[bytes]:
    """One span as the encoded fields that together make it."""
    fields: list[dict[str, Any]] = [
        {"trace_id": draw(st.binary(min_size=16, max_size=16))},
        {"span_id": draw(st.binary(min_size=8, max_size=8))},
        {"name": NAME},
        {"kind": 3},
        {"start_time_unix_nano": draw(st.integers(1, 2**64 - 1))},
        {"end_time_unix_nano": draw(st.integers(1, 2**64 - 1))},
    ]
    parts = [Span(**field).SerializeToString() for field in fields]
    for key, kind in structure:
        one = Span()
        setattr(one.attributes.add(key=key).value, kind, draw(VALUES[kind]))
        parts.append(one.SerializeToString())
    return parts


@st.composite
def span(draw: st.DrawFn, structures: list[list[tuple[str, str]]]) -> bytes:
    """One span, mostly plain; at times with what other exporters add, or in an order of their own."""
    parts = draw(parts_of(draw(st.sampled_from(structures))))
    extra = draw(st.integers(0, 40))
    if extra == 0:
        parts.append(Span(status={"code": 2, "message": draw(st.text(max_size=3))}).SerializeToString())  # type: ignore[arg-type]
    elif extra == 1:
        parts.insert(2, Span(parent_span_id=draw(st.binary(max_size=8)), trace_state="a=b").SerializeToString())
    elif extra == 2:
        parts.append(b"\xba\x3e\x02hi")  # field 999, which nobody knows
    elif extra == 3:
        parts = draw(st.permutations(parts))
    elif extra == 4:
        parts.append(draw(st.sampled_from(parts)))
    elif extra == 5:
        parts[2] = Span(name="another").SerializeToString()
    elif extra == 6:
        parts.append(Span(flags=draw(st.integers(0, 2**32 - 1))).SerializeToString() + b"\x7a\x00")
    elif extra == 7:
        del parts[draw(st.integers(0, len(parts) - 1))]
    elif extra == 8:
        parts.append(b"J\x09\n\x02id\x12\x82\x00\x10\x01")  # an attribute whose lengths take a byte too many
    elif extra == 9:
        parts.append(b"J\x04\n\x02id")  # an attribute without a value
    return b"".join(parts)


def field(number: int, content: bytes) -> bytes:
    """A field that tells its length."""
    size = len(content)
    varint = b""
    while size >= 0x80:
        varint += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + varint + bytes([size]) + content


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """An export whose spans share a few structures, in one or two scopes and resources."""
    structures = draw(st.lists(STRUCTURES, min_size=1, max_size=2))
    body = b""
    for number in range(draw(st.integers(1, 2))):
        resource = field(1, field(1, b"\n\x0cservice.name\x12\x04\n\x02w" + str(number).encode()))
        for _ in range(draw(st.integers(1, 2))):
            spans = draw(st.lists(span(structures), min_size=6, max_size=20))
            resource += field(2, b"".join(field(2, one) for one in spans))
        resource += draw(st.sampled_from([b"", b"\x1a\x01s", b"\xba\x3e\x02hi", b"\x25abcd"]))
        body += field(1, resource)
    return body


def comparable(row: dict[str, Any]) -> dict[str, str]:
    """What is known of a row, such that NaN equals itself and 0.0 is not -0.0."""
    return {name: repr(value) for name, value in row.items() if value is not None}


@settings(max_examples=40)
@given(bodies())
def test_spans_by_shape_are_those_of_the_library(body: bytes) -> None:
    """Same spans, same order, same values of the wanted attributes, same number of others."""
    request = ExportTraceServiceRequest.FromString(body)
    rows, num_others = [], 0
    for number, resource_spans in enumerate(request.resource_spans):
        for scope_spans in resource_spans.scope_spans:
            ours = [one for one in scope_spans.spans if one.name == NAME]
            num_others += len(scope_spans.spans) - len(ours)
            rows += [read_span(one, WANTED) | {"service": f"w{number}"} for one in ours]
    found, others = read_spans(body, NAME, WANTED)
    assert (found.count, others) == (len(rows), num_others)
    assert [comparable(found.row(place)) for place in range(found.count)] == [comparable(row) for row in rows]
