"""OpenTelemetry traces (OTLP/HTTP protobuf and JSON) -> `request` rows.

vLLM sends one span `llm_request` a request, with `--otlp-traces-endpoint`. Its durations are placed on one axis that
starts at the span's start (arrival at the front end):

    arrival ... frontend_s ... queue_s ... prefill_s = first token ... last token ... end

time_to_first_token and e2e are measured by the front end, queue, prefill and decode by the engine core, so `frontend_s` =
ttft - queue - prefill is what lies before QUEUED: HTTP, tokenisation, hand-over to the core (and the hand-over of the first
token back), and the last token is arrival + e2e: first token + decode misses it by both tokens' hand-overs (39 ms on a busy
front end), and is taken, up to the end, where a span tells no e2e. A span does not tell cached tokens or preemptions: they stay null. Absent attributes stay null too. Spans of
other names are looked at by `genai_spans`. Invariant: hostile bytes raise UnknownFormat, never anything else.
Source: reference 4.9; vLLM 0.32 `output_processor.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from engine_probe.adapters.genai_spans import genai_rows
from engine_probe.adapters.otlp_wire import Row, Spans, hex_id, read_spans
from engine_probe.adapters.vllm import ENGINE, normalise_request_id
from engine_probe.errors import UnknownFormat

if TYPE_CHECKING:
    import pyarrow as pa

SPAN_NAME: Final = "llm_request"
_INT64_MAX = (1 << 63) - 1
_NUMBERS = (float, int)
_LONGEST_S = 2_678_400.0  # a month: no request takes longer
_LATEST_NS = _INT64_MAX - 3 * round(_LONGEST_S * 1e9)

_TTFT = "gen_ai.latency.time_to_first_token"
_QUEUE = "gen_ai.latency.time_in_queue"
_PREFILL = "gen_ai.latency.time_in_model_prefill"
_DECODE = "gen_ai.latency.time_in_model_decode"
_E2E = "gen_ai.latency.e2e"
_ID = "gen_ai.request.id"
_PROMPT = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
_OUTPUT = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
_MODEL = ("gen_ai.response.model", "gen_ai.request.model")
_BOTH: Final = ("span_id", "engine_request_id")
_SERVICE: Final = frozenset(("service.name",))
_WANTED: Final = frozenset((_TTFT, _QUEUE, _PREFILL, _DECODE, _E2E, _ID, *_PROMPT, *_OUTPUT, *_MODEL))

Floats = npt.NDArray[np.float64]
Instants = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OtlpResult:
    """What a body held.

    told         column of `request` -> array, the requests that an engine told; a column that no span tells is absent
    num_spans    all spans; num_ignored: those of them that are not requests
    span_ids     trace_id + span_id (bytes) of every request, in the order of the rows, for deduplication
    others       requests told by the GenAI conventions, after those of `told`
    """

    told: dict[str, pa.Array]
    num_spans: int
    num_ignored: int
    span_ids: list[bytes]
    others: Sequence[dict[str, Any]] = ()

    @cached_property
    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """kind -> rows; a column that is not known is absent."""
        columns = {name: array.to_pylist() for name, array in self.told.items()}
        if "labels" in columns:
            columns["labels"] = [dict(labels) for labels in columns["labels"]]
        told = (zip(columns, values, strict=True) for values in zip(*columns.values(), strict=True))
        return {
            "request": [*({name: item for name, item in pairs if item is not None} for pairs in told), *self.others]
        }

    def tables(self) -> dict[str, pa.Table]:
        """kind -> table of the full schema; a kind without rows is absent."""
        import pyarrow as pa

        from engine_probe.schema import arrow_schema, table_from_rows

        others = table_from_rows("request", self.others) if self.others else None
        size = self.num_spans - self.num_ignored - len(self.others)
        if not size:
            return {} if others is None else {"request": others}
        schema = arrow_schema("request")
        arrays = [self.told[f.name] if f.name in self.told else pa.nulls(size, f.type) for f in schema]
        table = pa.table(arrays, schema=schema)
        return {"request": table if others is None else pa.concat_tables([table, others])}


def decode_traces(body: bytes, content_type: str, received_ns: int, *, worker: str | None = None) -> OtlpResult:
    """Decode one ExportTraceServiceRequest (already decompressed).

    received_ns  stands in where a span has no usable end
    worker       name to use in place of the resource's service.name
    Raises UnknownFormat where the body is not what `content_type` says.
    """
    kind = content_type.split(";")[0].strip().lower()
    if kind == "application/json":
        spans, num_others = _json_spans(body)
    elif kind in ("application/x-protobuf", "application/protobuf", "application/octet-stream"):
        spans, num_others = read_spans(body, SPAN_NAME, _WANTED)
    else:
        raise UnknownFormat(
            f"Traces came as {content_type!r}; send application/x-protobuf or application/json (OTLP/HTTP).",
            content_type=content_type,
        )
    span_ids = [trace + span for trace, span in zip(spans.get("trace_id"), spans.get("span_id"), strict=True)]
    told = _told(spans, received_ns, worker) if spans.count else {}
    others: Sequence[dict[str, Any]] = ()
    if num_others:
        # Spans that are not this engine's own: those of any SDK that follows the GenAI conventions are requests too.
        found = genai_rows(body, kind == "application/json", received_ns, claimed=span_ids, worker=worker)
        others, span_ids = [one.row for one in found], span_ids + [one.span_id for one in found]
    num_spans = spans.count + num_others
    return OtlpResult(told, num_spans, num_spans - len(span_ids), span_ids, others)


def _told(spans: Spans, received_ns: int, worker: str | None) -> dict[str, pa.Array]:
    """Columns of `request`, one row a span. While it computes, an instant that is not known is 0, a duration NaN."""
    import pyarrow as pa

    def texts(values: Sequence[str | None]) -> pa.Array:
        return pa.array(values, pa.string())

    def instants(values: Instants) -> pa.Array:
        return pa.array(values, pa.int64(), mask=values == 0)

    def durations(values: Floats) -> pa.Array:
        return pa.array(values, pa.float64(), mask=np.isnan(values))

    start_ns, end_ns = _instants(spans.get("start_ns")), _instants(spans.get("end_ns"))
    end_ns[end_ns < start_ns] = 0
    at_ns = np.where(end_ns > 0, end_ns, received_ns)
    ttft, queue, prefill, decode = (_seconds(spans.get(name)) for name in (_TTFT, _QUEUE, _PREFILL, _DECODE))
    first_token_ns = _after(start_ns, ttft)
    by_core = _after(first_token_ns, decode)
    by_core = np.where(end_ns > 0, np.minimum(by_core, end_ns), by_core)
    by_frontend = np.where(first_token_ns > 0, _after(start_ns, _seconds(spans.get(_E2E))), 0)
    engine_ids = _texts(spans.get(_ID))
    span_ids = [span_id.hex() for span_id in spans.get("span_id")]
    services = {service: worker or _service(service) for service in set(spans.get("service"))}
    return {
        "worker": texts([services[service] for service in spans.get("service")]),
        "at_ns": pa.array(at_ns),
        "request_id": texts(
            [
                span_id if engine_id is None else normalise_request_id(engine_id)
                for span_id, engine_id in zip(span_ids, engine_ids, strict=True)
            ]
        ),
        "vantage": pa.repeat("engine", spans.count),
        "state": texts(["finished" if failed is None else "failed" for failed in spans.get("failed")]),
        "engine": pa.repeat(ENGINE, spans.count),
        "model": texts(_texts(_first(spans, _MODEL))),
        "trace_id": texts([trace_id.hex() or None for trace_id in spans.get("trace_id")]),
        "generation_id": texts(engine_ids),
        "labels": _labels(span_ids, engine_ids),
        "arrival_ns": pa.array(np.where(start_ns > 0, start_ns, at_ns)),
        "first_scheduled_ns": instants(_after(first_token_ns, -prefill)),
        "first_token_ns": instants(first_token_ns),
        "last_token_ns": instants(np.where(by_frontend > 0, by_frontend, by_core)),
        "end_ns": instants(end_ns),
        # Two clocks of one process: a residue below zero is their rounding, and no time at all.
        "frontend_s": durations(np.maximum(ttft - queue - prefill, 0.0)),
        "queue_s": durations(queue),
        "prefill_s": durations(prefill),
        "decode_s": durations(decode),
        "prompt_tokens": pa.array(_counts(_first(spans, _PROMPT)), pa.int64()),
        "output_tokens": pa.array(_counts(_first(spans, _OUTPUT)), pa.int64()),
        "error": texts(spans.get("failed")),
    }


def _labels(span_ids: list[str], engine_ids: list[str | None]) -> pa.MapArray:
    import pyarrow as pa

    known = np.array([engine_id is not None for engine_id in engine_ids])
    offsets = np.concatenate(([0], np.cumsum(1 + known))).astype(np.int32)
    keys = [key for named in known.tolist() for key in (_BOTH if named else _BOTH[:1])]
    items = [item for pair in zip(span_ids, engine_ids, strict=True) for item in pair if item is not None]
    return pa.MapArray.from_arrays(pa.array(offsets), pa.array(keys, pa.string()), pa.array(items, pa.string()))


def _instants(values: list[int]) -> Instants:
    return np.array([value if 0 < value <= _INT64_MAX else 0 for value in values], dtype=np.int64)


def _after(instants: Instants, seconds: Floats) -> Instants:
    """The instants so much later; 0 where either is not known."""
    known = (instants > 0) & (instants <= _LATEST_NS) & ~np.isnan(seconds)
    return np.where(known, instants + np.rint(np.where(known, seconds, 0.0) * 1e9).astype(np.int64), 0)


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


def _json_spans(body: bytes) -> tuple[Spans, int]:
    """The request spans of a body, and how many others there are."""
    rows: list[Row] = []
    num_others = 0
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
                ours = [_json_span(span, service) for span in scope.spans if span.name == SPAN_NAME]
                num_others += len(scope.spans) - len(ours)
                rows += ours
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UnknownFormat(
            f"The trace body ({len(body)} bytes) is not an ExportTraceServiceRequest in OTLP JSON: {error}"
        ) from error
    return Spans.of(rows), num_others


def _json_span(span: _JsonSpan, service: Any) -> Row:
    failed = None
    if span.status is not None and span.status.code in (2, "STATUS_CODE_ERROR"):
        failed = span.status.message or "error"
    return {
        "service": service,
        "trace_id": hex_id(span.trace_id),
        "span_id": hex_id(span.span_id),
        "start_ns": int(span.start_time_unix_nano),
        "end_ns": int(span.end_time_unix_nano),
        "failed": failed,
        **_attributes(span.attributes, _WANTED),
    }


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


def _first(spans: Spans, names: tuple[str, str]) -> list[Any]:
    """The attribute under its older or its newer name."""
    older, newer = (spans.get(name) for name in names)
    if names[1] not in spans.columns:
        return older
    return [other if value is None else value for value, other in zip(older, newer, strict=True)]


def _seconds(values: list[Any]) -> Floats:
    """Durations; NaN where absent, negative, not finite, or longer than a month."""
    known = [value if type(value) in _NUMBERS and 0 <= value < _LONGEST_S else np.nan for value in values]
    return np.array(known, dtype=np.float64)


def _counts(values: list[Any]) -> list[int | None]:
    return [value if type(value) is int and 0 <= value <= _INT64_MAX else None for value in values]


def _texts(values: list[Any]) -> list[str | None]:
    return [value if type(value) is str and value else None for value in values]
