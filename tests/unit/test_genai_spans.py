"""Spans by the GenAI conventions: current and deprecated names, both wire forms, client and server, errors, ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from engine_probe.adapters.genai import WANTED, is_request, request_row
from engine_probe.adapters.otlp import SPAN_NAME, OtlpResult, decode_traces

DATA = Path(__file__).parents[1] / "data" / "benchmarks"
AT = 1_764_403_200_000_000_000


def row(attributes: dict[str, Any], **span: Any) -> dict[str, Any]:
    """The row of a client span that lasted one second."""
    told: dict[str, Any] = {
        "trace_id": "1" * 32,
        "span_id": "a" * 16,
        "start_ns": AT,
        "end_ns": AT + 1_000_000_000,
        "kind": 3,
        "failed": None,
        "service": "shop",
        "received_ns": AT + 9,
    }
    return request_row({"gen_ai.operation.name": "chat"} | attributes, **(told | span))


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "genai-spans.jsonl").read_text().splitlines()]


def decoded() -> list[OtlpResult]:
    return [decode_traces(json.dumps(line).encode(), "application/json", AT) for line in lines()]


def as_protobuf(line: dict[str, Any]) -> bytes:
    """The same request in the other wire form, field by field."""
    request = ExportTraceServiceRequest()
    for of_resource in line["resourceSpans"]:
        made = request.resource_spans.add()
        _fill(made.resource.attributes, of_resource["resource"]["attributes"])
        for scope in of_resource["scopeSpans"]:
            spans = made.scope_spans.add().spans
            for told in scope["spans"]:
                span = spans.add()
                span.trace_id, span.span_id = bytes.fromhex(told["traceId"]), bytes.fromhex(told["spanId"])
                span.name = told["name"]
                span.kind = {"SPAN_KIND_CLIENT": 3}.get(told["kind"], told["kind"])
                span.start_time_unix_nano = int(told["startTimeUnixNano"])
                span.end_time_unix_nano = int(told["endTimeUnixNano"])
                span.status.code = told.get("status", {}).get("code", 0)
                span.status.message = told.get("status", {}).get("message", "")
                for event in told.get("events", []):
                    made_event = span.events.add()
                    made_event.name, made_event.time_unix_nano = event["name"], int(event["timeUnixNano"])
                _fill(span.attributes, told["attributes"])
    body: bytes = request.SerializeToString()
    return body


def _fill(attributes: Any, pairs: list[dict[str, Any]]) -> None:
    for pair in pairs:
        made = attributes.add()
        made.key = pair["key"]
        for kind, value in pair["value"].items():
            if kind == "stringValue":
                made.value.string_value = value
            elif kind == "boolValue":
                made.value.bool_value = value
            elif kind == "intValue":
                made.value.int_value = int(value)
            elif kind == "doubleValue":
                made.value.double_value = value
            elif kind == "arrayValue":
                for item in value["values"]:
                    made.value.array_value.values.add().string_value = item["stringValue"]


def test_a_streamed_chat_of_an_application() -> None:
    """Vantage client, no worker; TTFT is the time to the first chunk; the id of the answer joins the engine."""
    (found,) = decoded()[0].rows["request"]
    assert (found["vantage"], found.get("worker"), found["request_id"]) == ("client", None, "r1")
    assert (found["first_token_ns"] - AT, found["end_ns"] - AT) == (250_000_000, 1_500_000_000)
    assert "last_token_ns" not in found  # of a stream the end of the span says nothing about its last token
    assert (found["prompt_tokens"], found["cached_tokens"], found["computed_tokens"]) == (120, 96, 24)
    assert (found["engine"], found["session_id"], found["finish_reason"]) == ("vllm", "conv-1", "stop")
    assert found["labels"]["prompt_template"] == "summarise"


def test_deprecated_names_and_chunk_events() -> None:
    """gen_ai.system, prompt_tokens, completion_tokens; events of single chunks are token times."""
    found = decoded()[1].rows["request"][0]
    assert (found["prompt_tokens"], found["output_tokens"], found["finish_reason"]) == (50, 3, "length")
    assert [at - AT for at in found["token_ns"]] == [2_300_000_000, 2_400_000_000, 2_500_000_000]
    assert (found["token_counts"], found["last_token_ns"] - AT) == ([1, 1, 1], 2_500_000_000)
    assert ("engine" in found, found["labels"]["provider"]) == (False, "OpenAI")


def test_agents_and_tools_are_no_requests() -> None:
    """The agent's span is counted and left out; the rejected call keeps its status and words."""
    result = decoded()[1]
    assert (result.num_spans, result.num_ignored) == (3, 1)
    rejected = result.rows["request"][1]
    assert (rejected["state"], rejected["http_status"], rejected["error"]) == (
        "rejected",
        429,
        "429: Rate limit reached",
    )
    assert "last_token_ns" not in rejected


def test_a_server_speaks_of_itself() -> None:
    """Vantage engine, the service is the worker; 39 tokens at 30 ms after the first are 1.17 s of decoding."""
    served, failed = decoded()[2].rows["request"]
    assert (served["vantage"], served["worker"], served["request_id"]) == ("engine", "engine-0", "r1")
    assert served["decode_s"] == pytest.approx(1.17)
    assert served["last_token_ns"] - served["first_token_ns"] == 1_170_000_000
    assert (failed["state"], failed["http_status"], failed["error"]) == ("failed", 500, "500: out of memory")


def test_both_wire_forms_say_the_same() -> None:
    """Protobuf and JSON of the same spans: the same rows and the same ids."""
    for line in lines():
        told = decode_traces(json.dumps(line).encode(), "application/json", AT)
        same = decode_traces(as_protobuf(line), "application/x-protobuf", AT)
        assert (same.rows, same.span_ids, same.num_ignored) == (told.rows, told.span_ids, told.num_ignored)
        assert same.tables()["request"].equals(told.tables()["request"])


def test_an_engines_own_span_is_not_read_twice() -> None:
    """vLLM's `llm_request` and an SDK's span in one body: one row each, the engine's first, ids in the rows' order."""
    line = lines()[0]
    own = {
        "traceId": "9" * 32,
        "spanId": "9" * 16,
        "name": SPAN_NAME,
        "startTimeUnixNano": str(AT),
        "endTimeUnixNano": str(AT + 5),
        "attributes": [
            {"key": "gen_ai.request.id", "value": {"stringValue": "cmpl-x-0"}},
            {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
        ],
    }
    line["resourceSpans"][0]["scopeSpans"][0]["spans"].append(own)
    result = decode_traces(json.dumps(line).encode(), "application/json", AT)
    assert [found["request_id"] for found in result.rows["request"]] == ["x", "r1"]
    assert [key.hex()[-16:] for key in result.span_ids] == ["9" * 16, "a000000000000001"]
    assert result.tables()["request"].column("request_id").to_pylist() == ["x", "r1"]
    assert result.num_ignored == 0


def test_a_worker_name_is_given_to_engines_alone() -> None:
    """A receiver that names its engine does not name applications so."""
    client = decode_traces(json.dumps(lines()[0]).encode(), "application/json", AT, worker="w-1").rows["request"][0]
    server = decode_traces(json.dumps(lines()[2]).encode(), "application/json", AT, worker="w-1").rows["request"][0]
    assert ("worker" in client, server["worker"]) == (False, "w-1")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"gen_ai.operation.name": "chat"}, True),
        ({"gen_ai.operation.name": "text_completion"}, True),
        ({"gen_ai.operation.name": "execute_tool", "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 3}, False),
        ({"gen_ai.operation.name": "invoke_agent"}, False),
        ({"openinference.span.kind": "LLM", "llm.model_name": "m"}, True),
        ({"openinference.span.kind": "CHAIN", "llm.model_name": "m"}, False),
        ({"gen_ai.system": "openai", "gen_ai.request.model": "m"}, True),
        ({"gen_ai.request.model": "m"}, False),
        ({"http.method": "POST"}, False),
        ({}, False),
    ],
)
def test_what_is_a_request(attributes: dict[str, Any], expected: bool) -> None:
    """By the operation; before there was one, by a model with a usage or a provider."""
    assert is_request(attributes) is expected


def test_an_answer_that_came_whole_ends_with_its_span() -> None:
    """Not streamed: the last token is the end; a stream's last token is not known; a first token is made up in neither."""
    assert row({"gen_ai.request.stream": False})["last_token_ns"] == AT + 1_000_000_000
    assert row({})["last_token_ns"] == AT + 1_000_000_000
    assert "last_token_ns" not in row({"gen_ai.request.stream": True})
    assert "first_token_ns" not in row({"gen_ai.request.stream": False})
    assert "last_token_ns" not in row({}, failed="boom")


@pytest.mark.parametrize(
    ("attributes", "column"),
    [
        ({"gen_ai.usage.input_tokens": "many"}, "prompt_tokens"),
        ({"gen_ai.usage.input_tokens": -1}, "prompt_tokens"),
        ({"gen_ai.usage.input_tokens": True}, "prompt_tokens"),
        ({"gen_ai.response.time_to_first_chunk": float("nan"), "gen_ai.request.stream": True}, "first_token_ns"),
        ({"gen_ai.response.time_to_first_chunk": -0.5, "gen_ai.request.stream": True}, "first_token_ns"),
        ({"gen_ai.response.finish_reasons": [3]}, "finish_reason"),
        ({"gen_ai.response.finish_reasons": []}, "finish_reason"),
        ({"http.response.status_code": 7}, "http_status"),
        ({"gen_ai.request.model": 5}, "model"),
    ],
)
def test_an_attribute_of_another_type_is_unknown(attributes: dict[str, Any], column: str) -> None:
    """Never an error, never a zero."""
    assert column not in row(attributes)


def test_cached_tokens_that_lie_beside_the_prompt_make_no_difference_up() -> None:
    """Where a provider counts cached tokens apart from the prompt, what was computed is unknown."""
    found = row({"gen_ai.usage.input_tokens": 10, "gen_ai.usage.cache_read.input_tokens": 90})
    assert (found["cached_tokens"], "computed_tokens" in found) == (90, False)


def test_no_content_is_wanted() -> None:
    """No attribute that may hold a prompt or an answer is looked at."""
    assert not [
        name
        for name in WANTED
        if "message" in name or "content" in name or name in ("gen_ai.prompt", "gen_ai.completion")
    ]
    told = row({"gen_ai.input.messages": "secret", "gen_ai.prompt.0.content": "secret"})
    assert "secret" not in json.dumps(told)
