"""SGLang's spans: the root of a request is the engine's own row; its stages are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_probe.adapters.otlp import OtlpResult, decode_traces
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate

START = 1_790_000_000_000_000_000
ROOT: dict[str, Any] = {
    "rid": "0123abcd",
    "module": "sglang::request",
    "gen_ai.usage.completion_tokens": 8,
    "gen_ai.usage.prompt_tokens": 100,
    "gen_ai.usage.cached_tokens": 64,
    "gen_ai.request.id": "0123abcd",
    "gen_ai.response.model": "tiny",
    "gen_ai.response.finish_reasons": '["length"]',
    "gen_ai.latency.time_to_first_token": 0.5,
    "gen_ai.latency.e2e": 2.0,
    "gen_ai.latency.time_in_model_decode": 1.5,
    "gen_ai.latency.time_in_model_inference": 1.75,
    "gen_ai.latency.time_in_model_prefill": 0.25,
}


def value(item: Any) -> dict[str, Any]:
    kind = {int: "intValue", float: "doubleValue", str: "stringValue"}[type(item)]
    return {kind: str(item) if isinstance(item, int) else item}


def span(name: str, attributes: dict[str, Any], number: int = 1) -> dict[str, Any]:
    return {
        "traceId": "00" * 8 + "ab" * 8,
        "spanId": f"{number:016x}",
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(START),
        "endTimeUnixNano": str(START + 2_000_000_000),
        "attributes": [{"key": key, "value": value(item)} for key, item in attributes.items()],
    }


def told(*spans: dict[str, Any], worker: str | None = None, service: str = "sglang-0") -> OtlpResult:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    body = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]}
    return decode_traces(json.dumps(body).encode(), "application/json", START, worker=worker)


def row(attributes: dict[str, Any], **more: Any) -> dict[str, Any]:
    (found,) = told(span("unified Req 0123abcd", attributes), **more).rows["request"]
    validate("request", table_from_rows("request", [found]), START)
    return dict(found)


def test_the_root_is_the_engines_row() -> None:
    """0.25 s before the hand-over, then queue and prefill together, first token at 0.5 s, last at 2 s."""
    found = row(ROOT)
    assert (found["vantage"], found["engine"], found["worker"], found["model"]) == (
        "engine",
        "sglang",
        "sglang-0",
        "tiny",
    )
    assert (found["request_id"], found["finish_reason"], found["state"]) == ("0123abcd", "length", "finished")
    assert (found["frontend_s"], found["decode_s"]) == (0.25, 1.5)
    assert "queue_s" not in found
    assert "prefill_s" not in found
    assert found["first_token_ns"] == START + 500_000_000
    assert found["last_token_ns"] == START + 2_000_000_000
    assert (found["prompt_tokens"], found["cached_tokens"], found["computed_tokens"], found["output_tokens"]) == (
        100,
        64,
        36,
        8,
    )


def test_stages_and_threads_are_no_requests() -> None:
    """Only the root carries usage and model."""
    stages = [span("prefill_forward", {}, 2), span("Scheduler [TP 0] (host:ab | pid:1)", {"pid": 1}, 3)]
    result = told(span("unified Req 0123abcd", ROOT), *stages)
    assert len(result.rows["request"]) == 1
    assert result.num_ignored == 2


def test_the_receivers_name_goes_before_the_services() -> None:
    """SGLang's default service name is the same for all instances."""
    assert row(ROOT, worker="w", service="sglang")["worker"] == "w"


@pytest.mark.parametrize("reasons", ["not json", "[1]", "{}", "[]"])
def test_a_strange_finish_reason_is_no_error(reasons: str) -> None:
    """Unknown, and the request finished."""
    assert row({**ROOT, "gen_ai.response.finish_reasons": reasons})["state"] == "finished"


def test_an_abort_is_an_abort() -> None:
    """SGLang ends the span of an aborted request too."""
    assert row({**ROOT, "gen_ai.response.finish_reasons": '["abort"]'})["state"] == "aborted"


def test_strange_durations_are_unknown() -> None:
    """Negative, absent: null, and the rest stays."""
    few = {
        key: ROOT[key] for key in ("module", "gen_ai.request.id", "gen_ai.response.model", "gen_ai.usage.prompt_tokens")
    }
    found = row({**few, "gen_ai.latency.time_in_model_decode": -1.0})
    assert "decode_s" not in found
    assert found["vantage"] == "engine"


def test_an_applications_span_stays_a_client_row() -> None:
    """The same attributes without SGLang's module."""
    found = row({key: item for key, item in ROOT.items() if key != "module"})
    assert found["vantage"] == "client"
