"""OpenTelemetry traces (OTLP/HTTP protobuf and JSON) -> `request` rows.

vLLM sends one span `llm_request` a request, with `--otlp-traces-endpoint`. Its durations are placed on one axis that
starts at the span's start (arrival at the front end):

    arrival ... frontend_s ... queue_s ... prefill_s = first token ... decode_s = last token ... end

time_to_first_token is measured by the front end, queue and prefill by the engine core, so `frontend_s` = ttft - queue
- prefill is what lies before QUEUED: HTTP, tokenisation, hand-over to the core (and the hand-over of the first token
back). A span does not tell cached tokens or preemptions: they stay null. Absent attributes stay null too. Spans of
other names are looked at by `genai_spans`. Invariant: hostile bytes raise UnknownFormat, never anything else.
Source: reference 4.9; vLLM 0.32 `output_processor.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engine_probe.adapters.genai_spans import genai_rows
from engine_probe.adapters.otlp_wire import Found, Span, SpanReader, hex_id
from engine_probe.adapters.vllm import ENGINE, normalise_request_id
from engine_probe.errors import UnknownFormat

if TYPE_CHECKING:
    import pyarrow as pa

SPAN_NAME: Final = "llm_request"
_INT64_MAX = (1 << 63) - 1
_NUMBERS = (float, int)
_LONGEST_S = 2_678_400.0  # a month: no request takes longer

_TTFT = "gen_ai.latency.time_to_first_token"
_QUEUE = "gen_ai.latency.time_in_queue"
_PREFILL = "gen_ai.latency.time_in_model_prefill"
_DECODE = "gen_ai.latency.time_in_model_decode"
_ID = "gen_ai.request.id"
_PROMPT = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
_OUTPUT = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
_MODEL = ("gen_ai.response.model", "gen_ai.request.model")
_SERVICE: Final = frozenset(("service.name",))
_WANTED: Final = frozenset((_TTFT, _QUEUE, _PREFILL, _DECODE, _ID, *_PROMPT, *_OUTPUT, *_MODEL))

_READER: Final = SpanReader(SPAN_NAME, _WANTED)

COLUMNS: Final = (
    "worker",
    "at_ns",
    "request_id",
    "vantage",
    "state",
    "engine",
    "model",
    "trace_id",
    "generation_id",
    "labels",
    "arrival_ns",
    "first_scheduled_ns",
    "first_token_ns",
    "last_token_ns",
    "end_ns",
    "frontend_s",
    "queue_s",
    "prefill_s",
    "decode_s",
    "prompt_tokens",
    "output_tokens",
    "error",
)
"""Columns of `request` that a span tells."""


@dataclass(frozen=True)
class OtlpResult:
    """What a body held.

    values       one tuple a request that an engine told, parallel to COLUMNS
    num_spans    all spans; num_ignored: those of them that are not requests
    span_ids     trace_id + span_id (bytes) of every request, in the order of the rows, for deduplication
    others       requests told by the GenAI conventions, after those of `values`
    """

    values: list[tuple[Any, ...]]
    num_spans: int
    num_ignored: int
    span_ids: list[bytes]
    others: Sequence[dict[str, Any]] = ()

    @cached_property
    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """kind -> rows; a column that is not known is absent."""
        told = [zip(COLUMNS, value, strict=True) for value in self.values]
        return {
            "request": [*({name: item for name, item in pairs if item is not None} for pairs in told), *self.others]
        }

    def tables(self) -> dict[str, pa.Table]:
        """kind -> table of the full schema; a kind without rows is absent."""
        import pyarrow as pa

        from engine_probe.schema import arrow_schema, table_from_rows

        others = table_from_rows("request", self.others) if self.others else None
        if not self.values:
            return {} if others is None else {"request": others}
        schema = arrow_schema("request")
        columns = dict(zip(COLUMNS, zip(*self.values, strict=True), strict=True))
        arrays = {
            name: _map_array(column) if name == "labels" else pa.array(column, schema.field(name).type)
            for name, column in columns.items()
        }
        size = len(self.values)
        full = [arrays[field.name] if field.name in arrays else pa.nulls(size, field.type) for field in schema]
        table = pa.table(full, schema=schema)
        return {"request": table if others is None else pa.concat_tables([table, others])}


def decode_traces(body: bytes, content_type: str, received_ns: int, *, worker: str | None = None) -> OtlpResult:
    """Decode one ExportTraceServiceRequest (already decompressed).

    received_ns  stands in where a span has no usable end
    worker       name to use in place of the resource's service.name
    Raises UnknownFormat where the body is not what `content_type` says.
    """
    kind = content_type.split(";")[0].strip().lower()
    spans: Iterable[Found]
    if kind == "application/json":
        spans = _json_spans(body)
    elif kind in ("application/x-protobuf", "application/protobuf", "application/octet-stream"):
        spans = _READER.read(body)
    else:
        raise UnknownFormat(
            f"Traces came as {content_type!r}; send application/x-protobuf or application/json (OTLP/HTTP).",
            content_type=content_type,
        )
    values: list[tuple[Any, ...]] = []
    span_ids: list[bytes] = []
    others: Sequence[dict[str, Any]] = ()
    num_spans = 0
    for service, span in spans:
        num_spans += 1
        if span is not None:
            values.append(_values(worker or _service(service), span, received_ns))
            span_ids.append(span.trace_id + span.span_id)
    if num_spans > len(values):
        # Spans that are not this engine's own: those of any SDK that follows the GenAI conventions are requests too.
        found = genai_rows(body, kind == "application/json", received_ns, claimed=span_ids, worker=worker)
        others, span_ids = [one.row for one in found], span_ids + [one.span_id for one in found]
    return OtlpResult(values, num_spans, num_spans - len(span_ids), span_ids, others)


def _values(worker: str | None, span: Span, received_ns: int) -> tuple[Any, ...]:
    """One request, parallel to COLUMNS."""
    get = span.attributes.get
    end_ns = span.end_ns if 0 < span.end_ns <= _INT64_MAX else None
    start_ns = span.start_ns if 0 < span.start_ns <= _INT64_MAX else None
    if end_ns is not None and start_ns is not None and end_ns < start_ns:
        end_ns = None
    ttft, queue, prefill, decode = map(_seconds, map(get, (_TTFT, _QUEUE, _PREFILL, _DECODE)))
    frontend = first_scheduled_ns = first_token_ns = last_token_ns = None
    if ttft is not None:
        if queue is not None and prefill is not None:
            # Two clocks of one process: a residue below zero is their rounding, and no time at all.
            frontend = max(ttft - queue - prefill, 0.0)
        if start_ns is not None:
            first_token_ns = start_ns + round(ttft * 1e9)
            if prefill is not None:
                first_scheduled_ns = first_token_ns - round(prefill * 1e9)
            if decode is not None:
                last_token_ns = first_token_ns + round(decode * 1e9)
    at_ns = end_ns or received_ns
    engine_id = _text(get(_ID))
    span_id = span.span_id.hex()
    labels = {"span_id": span_id} if engine_id is None else {"span_id": span_id, "engine_request_id": engine_id}
    return (
        worker,
        at_ns,
        span_id if engine_id is None else normalise_request_id(engine_id),
        "engine",
        "finished" if span.failed is None else "failed",
        ENGINE,
        _first(get, _MODEL, _text),
        span.trace_id.hex() or None,
        engine_id,
        labels,
        start_ns or at_ns,
        first_scheduled_ns,
        first_token_ns,
        last_token_ns,
        end_ns,
        frontend,
        queue,
        prefill,
        decode,
        _first(get, _PROMPT, _count),
        _first(get, _OUTPUT, _count),
        span.failed,
    )


def _map_array(maps: Iterable[dict[str, str]]) -> pa.MapArray:
    import pyarrow as pa

    maps = list(maps)
    offsets = pa.array(accumulate(map(len, maps), initial=0), pa.int32())
    keys = pa.array([key for labels in maps for key in labels], pa.string())
    items = pa.array([item for labels in maps for item in labels.values()], pa.string())
    return pa.MapArray.from_arrays(offsets, keys, items)


class _Json(msgspec.Struct, rename="camel"):
    """Base of the OTLP/JSON messages: lowerCamelCase keys, unknown ones ignored, 64-bit integers as text or number."""


class _AnyValue(_Json):
    string_value: str | None = None
    double_value: float | str | None = None
    int_value: int | str | None = None


class _Pair(_Json):
    key: str = ""
    value: _AnyValue | None = None


class _Status(_Json):
    code: int | str = 0
    message: str = ""


class _JsonSpan(_Json):
    trace_id: str = ""
    span_id: str = ""
    name: str = ""
    start_time_unix_nano: int | str = 0
    end_time_unix_nano: int | str = 0
    attributes: list[_Pair] = []
    status: _Status | None = None


class _Scope(_Json):
    spans: list[_JsonSpan] = []


class _Resource(_Json):
    attributes: list[_Pair] = []


class _ResourceSpans(_Json):
    resource: _Resource | None = None
    scope_spans: list[_Scope] = []


class _Request(_Json):
    resource_spans: list[_ResourceSpans] | msgspec.UnsetType | None = msgspec.UNSET


_JSON: Final = msgspec.json.Decoder(_Request)


def _json_spans(body: bytes) -> Iterator[Found]:
    try:
        told = _JSON.decode(body).resource_spans
        if told is msgspec.UNSET and msgspec.json.decode(body, type=dict[str, msgspec.Raw]):
            raise ValueError(
                "it has no `resourceSpans`"
            )  # an empty message is an export of nothing, other names are none
        for resource_spans in told or ():
            pairs = resource_spans.resource.attributes if resource_spans.resource is not None else []
            service = _attributes(pairs, _SERVICE).get("service.name")
            for scope in resource_spans.scope_spans:
                for span in scope.spans:
                    yield service, _json_span(span) if span.name == SPAN_NAME else None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnknownFormat(
            f"The trace body ({len(body)} bytes) is not an ExportTraceServiceRequest in OTLP JSON: {error}"
        ) from error


def _json_span(span: _JsonSpan) -> Span:
    failed = None
    if span.status is not None and span.status.code in (2, "STATUS_CODE_ERROR"):
        failed = span.status.message or "error"
    return Span(
        hex_id(span.trace_id),
        hex_id(span.span_id),
        int(span.start_time_unix_nano),
        int(span.end_time_unix_nano),
        failed,
        _attributes(span.attributes, _WANTED),
    )


def _attributes(pairs: list[_Pair], wanted: frozenset[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        if pair.key in wanted:
            value = pair.value
            if value is None:
                found[pair.key] = None
            elif value.double_value is not None:
                found[pair.key] = float(value.double_value)
            elif value.int_value is not None:
                found[pair.key] = int(value.int_value)
            else:
                found[pair.key] = value.string_value
    return found


def _service(name: Any) -> str | None:
    """The resource's service name; the SDK's own default says nothing about who it was."""
    return name if isinstance(name, str) and name and not name.startswith("unknown_service") else None


def _first(get: Any, keys: tuple[str, str], read: Any) -> Any:
    """The attribute under its older or its newer name."""
    value = get(keys[0])
    return read(get(keys[1]) if value is None else value)


def _seconds(value: Any) -> float | None:
    """A duration, or None where it is absent, negative, not finite, or longer than a month."""
    return float(value) if type(value) in _NUMBERS and 0 <= value < _LONGEST_S else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _INT64_MAX else None


def _text(value: Any) -> str | None:
    return value if type(value) is str and value else None
