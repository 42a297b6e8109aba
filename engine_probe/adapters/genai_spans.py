"""Spans by the GenAI conventions out of an OTLP body: both wire forms, read for the attributes that `genai` wants.

This is the slow, general way, taken where a body holds spans that no engine's own reader claimed. Invariants: a span
that was claimed is not read again; hostile bytes raise UnknownFormat, never anything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from engine_probe.adapters import genai
from engine_probe.adapters.otlp_wire import hex_id
from engine_probe.errors import UnknownFormat

_ERROR: Final = (2, "STATUS_CODE_ERROR")
_KINDS: Final = {"SPAN_KIND_INTERNAL": 1, "SPAN_KIND_SERVER": 2, "SPAN_KIND_CLIENT": 3}


@dataclass(frozen=True, slots=True)
class GenAiRow:
    """One request: its span's trace id + span id, and its `request` row."""

    span_id: bytes
    row: dict[str, Any]


def genai_rows(
    body: bytes, is_json: bool, received_ns: int, *, claimed: Collection[bytes] = (), worker: str | None = None
) -> list[GenAiRow]:
    """Requests told by spans that are not among `claimed` (trace id + span id).

    worker  names engine rows in place of the resource's service.name
    Raises UnknownFormat where the body is no ExportTraceServiceRequest.
    """
    taken = frozenset(claimed)
    spans = _json(body) if is_json else _protobuf(body)
    found = []
    for service, trace_id, span_id, told in spans:
        key = trace_id + span_id
        if key in taken or not genai.is_request(told["attributes"]):
            continue
        attributes = told.pop("attributes")
        row = genai.request_row(
            attributes,
            trace_id=trace_id.hex(),
            span_id=span_id.hex(),
            service=service,
            received_ns=received_ns,
            **told,
        )
        if worker is not None and row["vantage"] == "engine":
            row["worker"] = worker
        found.append(GenAiRow(key, row))
    return found


_Span = tuple[str | None, bytes, bytes, dict[str, Any]]
"""(service.name, trace id, span id, the rest as `request_row` takes it)"""


def _protobuf(body: bytes) -> Iterator[_Span]:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(body)
    except (DecodeError, RecursionError, ValueError) as error:
        raise UnknownFormat(f"The trace body ({len(body)} bytes) is not an OTLP protobuf message: {error}") from error
    for of_resource in request.resource_spans:
        service = None
        for pair in of_resource.resource.attributes:
            if pair.key == "service.name" and pair.value.HasField("string_value"):
                service = pair.value.string_value
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                attributes = {
                    pair.key: _protobuf_value(pair.value) for pair in span.attributes if pair.key in genai.WANTED
                }
                failed = (span.status.message or "error") if span.status.code == _ERROR[0] else None
                chunks = [event.time_unix_nano for event in span.events if event.name in genai.CHUNK_EVENTS]
                told = _told(span.start_time_unix_nano, span.end_time_unix_nano, span.kind, failed, chunks, attributes)
                yield _service(service), span.trace_id, span.span_id, told


def _protobuf_value(value: Any) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_protobuf_value(item) for item in value.array_value.values]
    return None if which in (None, "kvlist_value", "bytes_value") else getattr(value, which)


def _told(
    start_ns: int, end_ns: int, kind: int, failed: str | None, chunks: list[int], attributes: dict[str, Any]
) -> dict[str, Any]:
    return {
        "start_ns": start_ns,
        "end_ns": end_ns,
        "kind": kind,
        "failed": failed,
        "chunk_ns": chunks,
        "attributes": attributes,
    }


class _Json(msgspec.Struct, rename="camel"):
    """lowerCamelCase keys, unknown ones ignored; 64-bit integers as text or number."""


class _Array(_Json):
    values: list[_Value] = []


class _Value(_Json):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | str | None = None
    double_value: float | str | None = None
    array_value: _Array | None = None


class _Pair(_Json):
    key: str = ""
    value: _Value | None = None


class _Status(_Json):
    code: int | str = 0
    message: str = ""


class _Event(_Json):
    name: str = ""
    time_unix_nano: int | str = 0


class _JsonSpan(_Json):
    trace_id: str = ""
    span_id: str = ""
    kind: int | str = 0
    start_time_unix_nano: int | str = 0
    end_time_unix_nano: int | str = 0
    attributes: list[_Pair] = []
    events: list[_Event] = []
    status: _Status | None = None


class _Scope(_Json):
    spans: list[_JsonSpan] = []


class _Resource(_Json):
    attributes: list[_Pair] = []


class _ResourceSpans(_Json):
    resource: _Resource | None = None
    scope_spans: list[_Scope] = []


class _Request(_Json):
    resource_spans: list[_ResourceSpans] | None = None


_DECODER: Final = msgspec.json.Decoder(_Request)


def _json(body: bytes) -> Iterator[_Span]:
    try:
        for of_resource in _DECODER.decode(body).resource_spans or ():
            pairs = of_resource.resource.attributes if of_resource.resource is not None else []
            service = dict(_json_pairs(pairs, ("service.name",))).get("service.name")
            for scope in of_resource.scope_spans:
                for span in scope.spans:
                    status = span.status
                    failed = None
                    if status is not None and status.code in _ERROR:
                        failed = status.message or "error"
                    chunks = [int(event.time_unix_nano) for event in span.events if event.name in genai.CHUNK_EVENTS]
                    kind = span.kind if isinstance(span.kind, int) else _KINDS.get(span.kind, 0)
                    told = _told(
                        int(span.start_time_unix_nano),
                        int(span.end_time_unix_nano),
                        kind,
                        failed,
                        chunks,
                        dict(_json_pairs(span.attributes, genai.WANTED)),
                    )
                    yield _service(service), hex_id(span.trace_id), hex_id(span.span_id), told
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise UnknownFormat(
            f"The trace body ({len(body)} bytes) is not an ExportTraceServiceRequest in OTLP JSON: {error}"
        ) from error


def _json_pairs(pairs: Iterable[_Pair], wanted: Collection[str]) -> Iterator[tuple[str, Any]]:
    for pair in pairs:
        if pair.key in wanted and pair.value is not None:
            yield pair.key, _json_value(pair.value)


def _json_value(value: _Value) -> Any:
    if value.array_value is not None:
        return [_json_value(item) for item in value.array_value.values]
    if value.string_value is not None:
        return value.string_value
    if value.bool_value is not None:
        return value.bool_value
    if value.int_value is not None:
        return int(value.int_value)
    return None if value.double_value is None else float(value.double_value)


def _service(name: Any) -> str | None:
    """The resource's service name; the SDK's own default says nothing about who it was."""
    return name if isinstance(name, str) and name and not name.startswith("unknown_service") else None
