"""Request spans: placed on one axis, both encodings alike, hostile bytes refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from engine_probe.adapters import otlp_wire
from engine_probe.adapters.otlp import decode_traces
from engine_probe.adapters.otlp_shapes import Shape
from engine_probe.adapters.otlp_wire import MAX_SHAPES, read_span, read_spans
from engine_probe.errors import UnknownFormat
from engine_probe.wire.validate import validate

PROTOBUF = "application/x-protobuf"
START = 1_795_958_453_000_000_000
LATENCY = "gen_ai.latency."
VLLM: dict[str, Any] = {
    LATENCY + "time_to_first_token": 0.5,
    LATENCY + "e2e": 2.5,
    LATENCY + "time_in_queue": 0.125,
    "gen_ai.usage.prompt_tokens": 448,
    "gen_ai.usage.completion_tokens": 16,
    LATENCY + "time_in_model_prefill": 0.25,
    LATENCY + "time_in_model_decode": 1.5,
    LATENCY + "time_in_model_inference": 1.75,
    "gen_ai.request.id": "cmpl-req-7-0",
    "gen_ai.request.top_p": 1.0,
    "gen_ai.request.max_tokens": 16,
    "gen_ai.request.n": 1,
}


def span(attributes: dict[str, Any], name: str = "llm_request", number: int = 1, **more: Any) -> dict[str, Any]:
    """One span in OTLP/JSON."""
    pairs = []
    for key, value in attributes.items():
        kind = {float: "doubleValue", int: "intValue", str: "stringValue", bool: "boolValue"}[type(value)]
        pairs.append({"key": key, "value": {kind: str(value) if kind == "intValue" else value}})
    return {
        "traceId": f"{number:032x}",
        "spanId": f"{number:016x}",
        "name": name,
        "kind": 2,
        "startTimeUnixNano": str(START),
        "endTimeUnixNano": str(START + 2_500_000_000),
        "attributes": pairs,
    } | more


def document(*spans: dict[str, Any], service: str | None = "worker-0") -> dict[str, Any]:
    attributes = [] if service is None else [{"key": "service.name", "value": {"stringValue": service}}]
    return {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [{"spans": list(spans)}]}]}


def protobuf(json_form: dict[str, Any]) -> bytes:
    """The same request in protobuf, built field by field."""
    request = ExportTraceServiceRequest()
    for resource in json_form["resourceSpans"]:
        out = request.resource_spans.add()
        for pair in resource["resource"]["attributes"]:
            out.resource.attributes.add(key=pair["key"]).value.string_value = pair["value"]["stringValue"]
        for scope in resource["scopeSpans"]:
            spans = out.scope_spans.add().spans
            for one in scope["spans"]:
                made = spans.add(name=one["name"], kind=one["kind"])
                made.trace_id, made.span_id = bytes.fromhex(one["traceId"]), bytes.fromhex(one["spanId"])
                made.start_time_unix_nano = int(one["startTimeUnixNano"])
                made.end_time_unix_nano = int(one["endTimeUnixNano"])
                if "parentSpanId" in one:
                    made.parent_span_id = bytes.fromhex(one["parentSpanId"])
                if "status" in one:
                    made.status.code, made.status.message = one["status"]["code"], one["status"].get("message", "")
                for pair in one["attributes"]:
                    value = made.attributes.add(key=pair["key"]).value
                    for kind, content in pair["value"].items():
                        field = {"doubleValue": "double_value", "intValue": "int_value"}.get(kind, "string_value")
                        field = "bool_value" if kind == "boolValue" else field
                        setattr(value, field, int(content) if kind == "intValue" else content)
    return request.SerializeToString()  # type: ignore[no-any-return]


def decode(json_form: dict[str, Any]) -> dict[str, Any]:
    """The one row of a document, which both encodings give alike."""
    result = decode_traces(protobuf(json_form), PROTOBUF, START)
    twin = decode_traces(json.dumps(json_form).encode(), "application/json; charset=utf-8", START)
    assert (result.rows, result.span_ids, result.num_spans) == (twin.rows, twin.span_ids, twin.num_spans)
    (row,) = result.rows["request"]
    return row


def test_a_request_span_is_placed_on_one_axis() -> None:
    """ttft 0.5 = front end 0.125 + queue 0.125 + prefill 0.25; the last token came 2.25 s after the arrival by the front end's clock."""
    row = decode(document(span(VLLM | {LATENCY + "e2e": 2.25})))
    assert row == {
        "worker": "worker-0",
        "at_ns": START + 2_500_000_000,
        "request_id": "req-7",
        "vantage": "engine",
        "state": "finished",
        "engine": "vllm",
        "trace_id": f"{1:032x}",
        "generation_id": "cmpl-req-7-0",
        "labels": {"span_id": f"{1:016x}", "engine_request_id": "cmpl-req-7-0"},
        "arrival_ns": START,
        "first_scheduled_ns": START + 250_000_000,
        "first_token_ns": START + 500_000_000,
        "last_token_ns": START + 2_250_000_000,
        "end_ns": START + 2_500_000_000,
        "frontend_s": 0.125,
        "queue_s": 0.125,
        "prefill_s": 0.25,
        "decode_s": 1.5,
        "prompt_tokens": 448,
        "output_tokens": 16,
    }


@pytest.mark.parametrize(("decode_s", "last_s"), [(1.5, 2.0), (9.0, 2.5)])
def test_without_e2e_the_last_token_follows_from_decode_and_not_beyond_the_end(decode_s: float, last_s: float) -> None:
    """First token at 0.5 s, end at 2.5 s: 1.5 s of decode end at 2.0 s, 9 s of it cannot lie after the end."""
    told = {key: value for key, value in VLLM.items() if key != LATENCY + "e2e"} | {
        LATENCY + "time_in_model_decode": decode_s
    }
    assert decode(document(span(told)))["last_token_ns"] == START + round(last_s * 1e9)


def test_a_span_without_a_first_token_has_no_last_one() -> None:
    """Its end-to-end time is then no time to a last token."""
    told = {key: value for key, value in VLLM.items() if key != LATENCY + "time_to_first_token"}
    assert "last_token_ns" not in decode(document(span(told)))


def test_rows_and_tables_say_the_same_and_keep_the_contract() -> None:
    """tables() has the full schema and passes the rules of ingest."""
    result = decode_traces(protobuf(document(span(VLLM), span({}, number=2))), PROTOBUF, START)
    table = result.tables()["request"]
    validate("request", table, START + 10**10)
    told = [{key: value for key, value in row.items() if value is not None} for row in table.to_pylist()]
    for row in told:
        row["labels"] = dict(row["labels"])
    assert told == result.rows["request"]


def test_absent_attributes_are_null() -> None:
    """A span with nothing but its times tells arrival and end."""
    row = decode(document(span({}), service=None))
    assert set(row) == {
        *("at_ns", "request_id", "vantage", "state", "engine", "trace_id", "labels", "arrival_ns", "end_ns"),
    }
    assert row["request_id"] == f"{1:016x}"


@pytest.mark.parametrize("bad", [-1.0, 1e12, float("nan"), float("inf"), "0.5", True])
def test_a_duration_that_is_none_is_null(bad: Any) -> None:
    """Negative, endless, not a number or another type: unknown, and nothing that would follow from it."""
    attributes = VLLM | {LATENCY + "time_to_first_token": bad}
    if isinstance(bad, float) and (bad != bad or bad == float("inf")):
        rows = decode_traces(protobuf(document(span(attributes))), PROTOBUF, START).rows["request"]
        row = rows[0]
    else:
        row = decode(document(span(attributes)))
    assert not {"first_token_ns", "first_scheduled_ns", "last_token_ns", "frontend_s"} & set(row)
    assert row["queue_s"] == 0.125


def test_a_residue_below_zero_is_no_time() -> None:
    """Queue and prefill of another clock may exceed ttft by their rounding."""
    row = decode(document(span(VLLM | {LATENCY + "time_to_first_token": 0.374})))
    assert row["frontend_s"] == 0.0


def test_an_error_status_is_a_failed_request() -> None:
    """Status code 2 with its message, or the word error."""
    row = decode(document(span(VLLM, status={"code": 2, "message": "out of memory"})))
    assert (row["state"], row["error"]) == ("failed", "out of memory")
    assert decode(document(span(VLLM, status={"code": 2})))["error"] == "error"
    assert "error" not in decode(document(span(VLLM, status={"code": 1})))


def test_other_spans_are_counted_only() -> None:
    """Start-up spans carry file paths: nothing of them is kept."""
    result = decode_traces(
        protobuf(document(span({"code.filepath": "x.py"}, name="Load model"), span(VLLM))), PROTOBUF, START
    )
    assert (result.num_spans, result.num_ignored, len(result.rows["request"])) == (2, 1, 1)


def test_span_ids_are_parallel_to_the_rows() -> None:
    """24 bytes a request, for deduplication by (trace id, span id)."""
    result = decode_traces(protobuf(document(span(VLLM, number=3), span(VLLM, number=4))), PROTOBUF, START)
    assert result.span_ids == [bytes(15) + b"\x03" + bytes(7) + b"\x03", bytes(15) + b"\x04" + bytes(7) + b"\x04"]


def test_the_worker_may_be_named_by_the_receiver() -> None:
    """A receiver that knows who posts overrides service.name; the SDK's default name is nobody."""
    body = protobuf(document(span(VLLM), service="unknown_service:python"))
    assert "worker" not in decode_traces(body, PROTOBUF, START).rows["request"][0]
    assert decode_traces(body, PROTOBUF, START, worker="w").rows["request"][0]["worker"] == "w"


def test_newer_names_of_the_conventions_are_read() -> None:
    """gen_ai.usage.input_tokens and output_tokens stand in where the older names are absent."""
    attributes = {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 6, "gen_ai.request.model": "m"}
    row = decode(document(span(attributes)))
    assert (row["prompt_tokens"], row["output_tokens"], row["model"]) == (5, 6, "m")


def test_a_learned_shape_reads_as_the_library_does() -> None:
    """Different ids, numbers, lengths, parents and one-off shapes: the fast way gives what the slow one gives."""
    shapes = [
        VLLM,
        VLLM | {"gen_ai.request.id": "chatcmpl-" + "x" * 90},
        VLLM | {"gen_ai.request.id": "x" * 127 + "y"},
        VLLM | {"gen_ai.usage.prompt_tokens": -1, "gen_ai.usage.completion_tokens": 1 << 62},
        VLLM | {"gen_ai.request.id": "J\x13\n\x11gen_ai.request.idJ"},
        {key: VLLM[key] for key in reversed(VLLM)},
        VLLM | {"flag": True},
        {},
    ]
    spans = [span(shape, number=number) for number, shape in enumerate(shapes * 3, 1)]
    spans += [span(VLLM, number=99, parentSpanId="00000000000000aa"), span(VLLM, number=98, status={"code": 2})]
    body = protobuf(document(*spans))
    wanted = frozenset(VLLM)
    request = ExportTraceServiceRequest.FromString(body)
    slow = [read_span(one, wanted) for one in request.resource_spans[0].scope_spans[0].spans]
    fast, num_others = read_spans(body, "llm_request", wanted)
    told = [{name: value for name, value in fast.row(place).items() if value is not None} for place in range(26)]
    assert told == [
        {name: value for name, value in row.items() if value is not None} | {"service": "worker-0"} for row in slow
    ]
    assert num_others == 0


def test_alike_spans_cost_one_look_at_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred spans of one structure one is read through the library; the others are compared with it."""
    read = []

    def looked_at(message: Any, wanted: frozenset[str]) -> dict[str, Any]:
        read.append(message)
        return read_span(message, wanted)

    monkeypatch.setattr(otlp_wire, "read_span", looked_at)
    spans = [span(VLLM | {"gen_ai.usage.prompt_tokens": 100 + number}, number=number) for number in range(1, 21)]
    found, _ = read_spans(protobuf(document(*spans)), "llm_request", frozenset(VLLM))
    assert found.columns["gen_ai.usage.prompt_tokens"] == list(range(101, 121))
    assert len(read) == 1


def test_shapes_that_never_end_are_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that makes up an attribute a span costs a bounded number of comparisons."""
    learned: list[Any] = []
    monkeypatch.setattr(Shape, "learn", lambda *args: learned.append(args))
    spans = [span(VLLM | {f"x{number}": 1.0}, number=number) for number in range(1, 101)]
    found, _ = read_spans(protobuf(document(*spans)), "llm_request", frozenset(VLLM))
    assert (found.count, len(learned)) == (100, MAX_SHAPES)


@pytest.mark.parametrize("cut", [0, 1, 30, 60, -1])
def test_a_span_that_ends_too_soon_has_no_shape(cut: int) -> None:
    """Bytes that are no whole span are unusual, never an error."""
    body = protobuf(document(span(VLLM)))
    whole = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans[0].SerializeToString()
    assert Shape.learn(whole, frozenset(VLLM)) is not None
    assert Shape.learn(whole[:cut], frozenset(VLLM)) is None


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"\xff\xff", PROTOBUF),
        (b"\x0a\x05", PROTOBUF),
        (b"hello", PROTOBUF),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"", "application/json"),
        (b'{"spans": []}', "application/json"),
        (b'{"resource_spans": []}', "application/json"),
        (b'{"resourceSpans": 3}', "application/json"),
        (b'{"resourceSpans": [' * 2000, "application/json"),
        (b"", "text/plain"),
    ],
)
def test_other_bytes_are_refused(body: bytes, content_type: str) -> None:
    """One error for whatever is not what the content type says."""
    with pytest.raises(UnknownFormat):
        decode_traces(body, content_type, START)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", PROTOBUF),
        (b"{}", "application/json"),
        (b'{"resourceSpans": null}', "application/json"),
        (b'{"resourceSpans": []}', "application/json"),
    ],
)
def test_an_empty_export_has_no_rows(body: bytes, content_type: str) -> None:
    """Zero bytes are a valid, empty protobuf message, and an empty object is its JSON form."""
    result = decode_traces(body, content_type, START)
    assert (result.num_spans, result.rows, result.tables()) == (0, {"request": []}, {})


@pytest.mark.parametrize("name", ["llm_request", "chat m"])
def test_a_span_with_an_id_that_is_no_hexadecimal_is_a_span_without_one(name: str) -> None:
    """Ids in base64 (another JSON form of protobuf) or cut short cost their own span, not the whole export."""
    attributes = VLLM | {"gen_ai.operation.name": "chat"}
    good = span(attributes, name=name, number=2)
    bad = [span(attributes, name=name, traceId=text) for text in ("CvdlGRbNQ92ESOshHIAxnA==", "abc", "")]
    result = decode_traces(json.dumps(document(*bad, good)).encode(), "application/json", START)
    assert [len(key) for key in result.span_ids] == [8, 8, 8, 24]


def test_a_span_that_ends_before_it_starts_has_no_end() -> None:
    """Its instant is when it came, as where it tells no end; a request does not take less than no time."""
    row = decode(document(span(VLLM, endTimeUnixNano=str(START - 1))))
    assert (row["at_ns"], row["arrival_ns"]) == (START, START)
    assert "end_ns" not in row


def test_instants_that_cannot_be_are_not_stored() -> None:
    """A span without times has the instant at which it came; a first token is not made up."""
    row = decode(document(span(VLLM, startTimeUnixNano="0", endTimeUnixNano="0")))
    assert (row["at_ns"], row["arrival_ns"]) == (START, START)
    assert "first_token_ns" not in row
    assert "end_ns" not in row
