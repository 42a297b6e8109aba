"""`request` rows -> OTLP spans: one span for each row, and one below it for every stretch of a phase.

Rows of one request share a trace: that of the application where its trace id was told, else one made of run and request id,
so that a second export gives the same ids. Attributes are those of the GenAI conventions where they have a name, the
others `kvscope.COLUMN`; what is unknown is absent. Source: OTLP 1.x; OpenTelemetry semantic conventions for generative AI.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

Row = Mapping[str, Any]

CONVENTION: Final = {
    "request_id": "gen_ai.response.id",
    "model": "gen_ai.request.model",
    "engine": "gen_ai.provider.name",
    "session_id": "gen_ai.conversation.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "http_status": "http.response.status_code",
}
"""Column -> its name in the conventions."""
_NO_ATTRIBUTE: Final = frozenset(
    {"at_ns", "received_ns", "arrival_ns", "end_ns", "spans", "token_ns", "token_counts", "prompt_blocks", "trace_id"}
    | {"prompt_parts", "labels", "finish_reason", "error", *CONVENTION}
)
_HEX: Final = frozenset(string.hexdigits)


def export_request(rows: Iterable[Row]) -> ExportTraceServiceRequest:
    """The rows' spans, in one resource for each worker (`service.name`)."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    by_service: dict[str, list[Row]] = {}
    for row in rows:
        by_service.setdefault(row["worker"] or row["vantage"], []).append(row)
    for service, served in by_service.items():
        resource = request.resource_spans.add()
        resource.resource.attributes.append(_attribute("service.name", service))
        scope = resource.scope_spans.add()
        scope.scope.name = "kvscope"
        for row in served:
            scope.spans.extend(spans_of(row))
    return request


def spans_of(row: Row) -> list[Span]:
    """The span of a row, and below it one for each stretch of a phase that was told."""
    whole = _whole(row)
    return [whole, *(_phase(row, whole, position, span) for position, span in enumerate(row["spans"] or ()))]


def _whole(row: Row) -> Span:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    span = Span(
        trace_id=trace_of(row),
        span_id=_id(8, *_identity(row)),
        name=f"request {row['model']}" if row["model"] else "request",
        kind=Span.SPAN_KIND_CLIENT if row["vantage"] == "client" else Span.SPAN_KIND_SERVER,
        start_time_unix_nano=row["arrival_ns"],
        end_time_unix_nano=max(
            instant for instant in (row["arrival_ns"], row["last_token_ns"], row["end_ns"]) if instant
        ),
    )
    parent = (row["labels"] or {}).get("span_id")
    if row["trace_id"] and parent and len(parent) == 16 and set(parent) <= _HEX:
        span.parent_span_id = bytes.fromhex(parent)
    span.attributes.extend(_attributes(row))
    for name, column in (
        ("first scheduled", "first_scheduled_ns"),
        ("first token", "first_token_ns"),
        ("last token", "last_token_ns"),
    ):
        if row[column] is not None:
            span.events.add(name=name, time_unix_nano=row[column])
    if row["state"] in ("failed", "rejected"):
        span.status.code = Status.STATUS_CODE_ERROR
        span.status.message = row["error"] or row["state"]
    return span


def _phase(row: Row, whole: Span, position: int, stretch: Mapping[str, Any]) -> Span:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    span = Span(
        trace_id=whole.trace_id,
        span_id=_id(8, *_identity(row), "phase", position),
        parent_span_id=whole.span_id,
        name=stretch["phase"],
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=stretch["start_ns"],
        end_time_unix_nano=max(stretch["start_ns"], stretch["end_ns"]),
    )
    if stretch["tokens"] is not None:
        span.attributes.append(_attribute("kvscope.tokens", stretch["tokens"]))
    return span


def trace_of(row: Row) -> bytes:
    """The trace that a row belongs to: 16 bytes."""
    told = row["trace_id"]
    if told and len(told) == 32 and set(told) <= _HEX and int(told, 16):
        return bytes.fromhex(told)
    return _id(16, row["run_id"], row["request_id"])


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("run_id", "request_id", "vantage", "attempt", "worker", "arrival_ns"))


def _id(size: int, *parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=size).digest()


def _attributes(row: Row) -> list[KeyValue]:
    found = [_attribute(name, row[column]) for column, name in CONVENTION.items() if row[column] is not None]
    if row["finish_reason"] is not None:
        found.append(_attribute("gen_ai.response.finish_reasons", [row["finish_reason"]]))
    if row["vantage"] == "engine" and row["ttft_s"] is not None:
        found.append(_attribute("gen_ai.server.time_to_first_token", row["ttft_s"]))
    for column, value in row.items():
        if column not in _NO_ATTRIBUTE and isinstance(value, str | int | float):
            found.append(_attribute(f"kvscope.{column}", value))
    found += [_attribute(f"kvscope.label.{name}", value) for name, value in sorted((row["labels"] or {}).items())]
    return found


def _attribute(name: str, value: str | int | float | bool | Sequence[str]) -> KeyValue:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

    match value:
        case bool():
            told = AnyValue(bool_value=value)
        case int():
            told = AnyValue(int_value=value)
        case float():
            told = AnyValue(double_value=value)
        case str():
            told = AnyValue(string_value=value)
        case _:
            told = AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=text) for text in value]))
    return KeyValue(key=name, value=told)
