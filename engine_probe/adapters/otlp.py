"""OpenTelemetry traces (OTLP/HTTP protobuf and JSON) -> `request` rows at the engine's vantage.

vLLM sends one span `llm_request` a request, with `--otlp-traces-endpoint`. Its durations are placed on one axis that
starts at the span's start (arrival at the front end):

    arrival ... frontend_s ... queue_s ... prefill_s = first token ... decode_s = last token ... end

time_to_first_token is measured by the front end, queue and prefill by the engine core, so `frontend_s` = ttft - queue
- prefill is what lies before QUEUED: HTTP, tokenisation, hand-over to the core (and the hand-over of the first token
back). A span does not tell cached tokens or preemptions: they stay null. Absent attributes stay null too. Invariant:
hostile bytes raise UnknownFormat, never anything else. Source: reference 4.9; vLLM 0.32 `output_processor.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engine_probe.adapters.vllm import ENGINE, normalise_request_id
from engine_probe.errors import UnknownFormat

if TYPE_CHECKING:
    import pyarrow as pa

SPAN_NAME: Final = "llm_request"
MAX_NESTING: Final = 64
_INT64_MAX = (1 << 63) - 1

_TTFT = "gen_ai.latency.time_to_first_token"
_QUEUE = "gen_ai.latency.time_in_queue"
_PREFILL = "gen_ai.latency.time_in_model_prefill"
_DECODE = "gen_ai.latency.time_in_model_decode"
_FIELDS: Final = frozenset(
    (
        _TTFT,
        _QUEUE,
        _PREFILL,
        _DECODE,
        "gen_ai.request.id",
        "gen_ai.usage.prompt_tokens",
        "gen_ai.usage.completion_tokens",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "gen_ai.response.model",
        "gen_ai.request.model",
    )
)


@dataclass(frozen=True, slots=True)
class OtlpResult:
    """What a body held.

    rows         kind -> rows (missing keys are null)
    num_spans    all spans; num_ignored: those of them that are not requests
    span_ids     trace_id + span_id (bytes) of every row of `request`, in their order, for deduplication
    """

    rows: dict[str, list[dict[str, Any]]]
    num_spans: int
    num_ignored: int
    span_ids: list[bytes] = field(default_factory=list)

    def tables(self) -> dict[str, pa.Table]:
        """The rows as tables of the full schema, kind -> table; kinds without rows are absent."""
        return {kind: _table(kind, rows) for kind, rows in self.rows.items() if rows}


@dataclass(frozen=True, slots=True)
class _Span:
    trace_id: bytes
    span_id: bytes
    start_ns: int
    end_ns: int
    failed: str | None
    attributes: dict[str, Any]


def decode_traces(body: bytes, content_type: str, received_ns: int, *, worker: str | None = None) -> OtlpResult:
    """Decode one ExportTraceServiceRequest (already decompressed).

    worker  name to use in place of the resource's service.name
    Raises UnknownFormat where the body is not what `content_type` says.
    """
    rows: list[dict[str, Any]] = []
    span_ids: list[bytes] = []
    num_spans = 0
    kind = content_type.split(";")[0].strip().lower()
    if kind == "application/json":
        source = _json_spans(body)
    elif kind in ("application/x-protobuf", "application/protobuf", "application/octet-stream"):
        source = _protobuf_spans(body)
    else:
        raise UnknownFormat(
            f"Traces came as {content_type!r}; send application/x-protobuf or application/json (OTLP/HTTP).",
            content_type=content_type,
        )
    for service, span in source:
        num_spans += 1
        if span is not None:
            rows.append(_row(worker or service, span, received_ns))
            span_ids.append(span.trace_id + span.span_id)
    return OtlpResult({"request": rows}, num_spans, num_spans - len(rows), span_ids)


def _row(worker: str | None, span: _Span, received_ns: int) -> dict[str, Any]:
    got = span.attributes
    arrival_ns = span.start_ns
    ttft, queue, prefill = _seconds(got.get(_TTFT)), _seconds(got.get(_QUEUE)), _seconds(got.get(_PREFILL))
    decode = _seconds(got.get(_DECODE))
    row: dict[str, Any] = {
        "worker": worker,
        "at_ns": span.end_ns or received_ns,
        "vantage": "engine",
        "state": "failed" if span.failed is not None else "finished",
        "engine": ENGINE,
        "trace_id": span.trace_id.hex() or None,
        "arrival_ns": arrival_ns or span.end_ns or received_ns,
        "end_ns": span.end_ns or None,
        "queue_s": queue,
        "prefill_s": prefill,
        "decode_s": decode,
        "prompt_tokens": _count(got.get("gen_ai.usage.prompt_tokens", got.get("gen_ai.usage.input_tokens"))),
        "output_tokens": _count(got.get("gen_ai.usage.completion_tokens", got.get("gen_ai.usage.output_tokens"))),
        "model": _text(got.get("gen_ai.response.model", got.get("gen_ai.request.model"))),
        "error": span.failed or None,
    }
    engine_id = _text(got.get("gen_ai.request.id"))
    labels = {"span_id": span.span_id.hex()}  # with trace_id the identity of the span: a resent one is found by it
    row["request_id"] = normalise_request_id(engine_id) if engine_id else span.span_id.hex()
    if engine_id:
        row["generation_id"] = engine_id
        labels["engine_request_id"] = engine_id
    row["labels"] = labels
    if ttft is not None and arrival_ns:
        first_token_ns = arrival_ns + round(ttft * 1e9)
        row["first_token_ns"] = first_token_ns
        if prefill is not None:
            row["first_scheduled_ns"] = first_token_ns - round(prefill * 1e9)
            if queue is not None:
                # Two clocks of one process: a residue below zero is rounding or the engine's clock, and no time at all.
                row["frontend_s"] = max(ttft - queue - prefill, 0.0)
        if decode is not None:
            row["last_token_ns"] = first_token_ns + round(decode * 1e9)
    return row


def _protobuf_spans(body: bytes) -> Iterator[tuple[str | None, _Span | None]]:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(body)
    except (DecodeError, RecursionError, ValueError) as error:
        raise UnknownFormat(f"The trace body ({len(body)} bytes) is not an OTLP protobuf message: {error}") from error
    wanted = _FIELDS
    for resource_spans in request.resource_spans:
        service = None
        for pair in resource_spans.resource.attributes:
            if pair.key == "service.name":
                service = pair.value.string_value
        service = _service(service)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                if span.name != SPAN_NAME:
                    yield service, None
                    continue
                attributes: dict[str, Any] = {}
                for pair in span.attributes:
                    key = pair.key
                    if key in wanted:
                        value = pair.value
                        which = value.WhichOneof("value")
                        attributes[key] = None if which is None else getattr(value, which)
                status = span.status
                failed = (status.message or "error") if status.code == 2 else None
                start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
                yield service, _Span(span.trace_id, span.span_id, _ns(start_ns), _ns(end_ns), failed, attributes)


def _json_spans(body: bytes) -> Iterator[tuple[str | None, _Span | None]]:
    try:
        request = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnknownFormat(f"The trace body ({len(body)} bytes) is not OTLP JSON: {error}") from error
    try:
        for resource_spans in _list(request, "resourceSpans", required=True):
            attributes = _attributes(_dict(resource_spans.get("resource")).get("attributes"))
            service = _service(attributes.get("service.name"))
            for scope_spans in _list(resource_spans, "scopeSpans"):
                for span in _list(scope_spans, "spans"):
                    yield service, (_json_span(span) if span.get("name") == SPAN_NAME else None)
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise UnknownFormat(f"The trace body is JSON, but not an OTLP ExportTraceServiceRequest: {error}") from error


def _json_span(span: dict[str, Any]) -> _Span:
    status = _dict(span.get("status"))
    is_failed = status.get("code") in (2, "STATUS_CODE_ERROR")
    return _Span(
        bytes.fromhex(span.get("traceId") or ""),
        bytes.fromhex(span.get("spanId") or ""),
        _ns(int(span.get("startTimeUnixNano") or 0)),
        _ns(int(span.get("endTimeUnixNano") or 0)),
        (str(status.get("message") or "error")) if is_failed else None,
        _attributes(span.get("attributes")),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs or ():
        value = _dict(pair.get("value"))
        if "doubleValue" in value:
            found[pair["key"]] = float(value["doubleValue"])
        elif "intValue" in value:
            found[pair["key"]] = int(value["intValue"])
        elif "stringValue" in value:
            found[pair["key"]] = value["stringValue"]
    return found


def _list(parent: Any, key: str, *, required: bool = False) -> list[dict[str, Any]]:
    if not isinstance(parent, dict) or (required and key not in parent):
        raise TypeError(f"{key} is missing")
    value = parent.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TypeError(f"{key} is not a list of objects")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError("an object was expected")
    return value


def _service(name: Any) -> str | None:
    """The resource's service name; the SDK's own default says nothing about who it was."""
    return name if isinstance(name, str) and name and not name.startswith("unknown_service") else None


def _ns(value: int) -> int:
    """An instant that fits the contract; 0 where it does not."""
    return value if 0 <= value <= _INT64_MAX else 0


def _seconds(value: Any) -> float | None:
    """A duration, or None where it is absent, negative, not finite, or longer than a month."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value < 2_678_400 else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _INT64_MAX else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _table(kind: str, rows: list[dict[str, Any]]) -> pa.Table:
    """Rows -> full schema, converting only the columns that occur."""
    import pyarrow as pa

    from engine_probe.schema import arrow_schema

    schema = arrow_schema(kind)
    used: set[str] = set().union(*rows)
    columns = [
        pa.array([row.get(name) for row in rows], schema.field(name).type)
        if name in used
        else pa.nulls(len(rows), schema.field(name).type)
        for name in schema.names
    ]
    return pa.table(columns, schema=schema)
