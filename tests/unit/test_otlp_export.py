"""Requests leave as spans that mean the same where they arrive."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from collector.otlp_export.page import span_page
from collector.otlp_export.sending import Backend, traces_url
from collector.reading.request_queries import RequestFilter
from engine_probe.adapters.otlp import decode_traces
from engine_probe.errors import BackendRefused, BackendUnreachable, UsageError
from store.interface import Window
from store.open import open_store
from tests.store_rows import START_NS, batch, request

MS = 1_000_000


def served(request_id: str = "a", **facts: Any) -> dict[str, Any]:
    """An engine's request: 2 ms of queue, 18 of prefill, 30 of decode, from START on."""
    row = request(
        request_id, vantage="engine", worker="w0", model="m", prompt_tokens=100, cached_tokens=64, output_tokens=3
    )
    row |= {"first_token_ns": START_NS + 20 * MS, "last_token_ns": START_NS + 50 * MS, "end_ns": START_NS + 50 * MS}
    row["spans"] = [
        {"phase": "queue", "start_ns": START_NS, "end_ns": START_NS + 2 * MS, "tokens": None},
        {"phase": "prefill", "start_ns": START_NS + 2 * MS, "end_ns": START_NS + 20 * MS, "tokens": 36},
        {"phase": "decode", "start_ns": START_NS + 20 * MS, "end_ns": START_NS + 50 * MS, "tokens": 2},
    ]
    return row | facts


def exported(tmp_path: Path, *rows: dict[str, Any]) -> ExportTraceServiceRequest:
    with open_store(str(tmp_path / "s.duckdb")) as store:
        store.append(batch({"request": list(rows)}))
        page = span_page(store, RequestFilter(Window(), {}, {}))
    assert page.num_rows == len(rows)
    return ExportTraceServiceRequest.FromString(page.body)


def spans(request: ExportTraceServiceRequest) -> list[Any]:
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_request_is_a_span_with_its_phases_below_it(tmp_path: Path) -> None:
    """Names, times, parents; unknown columns have no attribute."""
    whole, *phases = spans(exported(tmp_path, served(tenant="t", queue_s=0.002)))
    assert (whole.name, whole.kind) == ("request m", 2)
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (START_NS, START_NS + 50 * MS)
    assert [(one.name, one.start_time_unix_nano - START_NS) for one in phases] == [
        ("queue", 0),
        ("prefill", 2 * MS),
        ("decode", 20 * MS),
    ]
    assert all(one.parent_span_id == whole.span_id and one.trace_id == whole.trace_id for one in phases)
    assert attributes(phases[1]) == {"kvscope.tokens": 36}
    told = attributes(whole)
    assert told["gen_ai.usage.input_tokens"] == 100
    assert told["gen_ai.usage.cache_read.input_tokens"] == 64
    assert told["gen_ai.server.time_to_first_token"] == pytest.approx(0.020)
    assert (told["kvscope.tenant"], told["kvscope.queue_s"]) == ("t", 0.002)
    assert "kvscope.prefill_s" not in told
    assert [event.name for event in whole.events] == ["first token", "last token"]
    assert len({span.span_id for span in (whole, *phases)}) == 4


def test_what_leaves_comes_back_as_it_was(tmp_path: Path) -> None:
    """kvscope's own /v1/traces reads the same request from its spans, and takes no phase for one."""
    request = exported(tmp_path, served())
    found = decode_traces(request.SerializeToString(), "application/x-protobuf", START_NS)
    (row,) = found.rows["request"]
    assert (found.num_spans, found.num_ignored) == (4, 3)
    kept = ("request_id", "vantage", "worker", "model", "arrival_ns", "prompt_tokens", "cached_tokens", "output_tokens")
    assert {name: row[name] for name in kept} == {name: served()[name] for name in kept}
    assert abs(row["first_token_ns"] - (START_NS + 20 * MS)) < 1000
    assert row["end_ns"] == START_NS + 50 * MS


def test_vantages_share_a_trace_and_an_applications_trace_is_kept(tmp_path: Path) -> None:
    """Ids depend on the row alone, so that a second export overwrites the first."""
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    known = served("b", trace_id=trace, labels={"span_id": parent, "product": "chat"})
    first, again = (
        {
            span.span_id: span
            for span in spans(exported(tmp_path / name, served(), request("a", end_ns=START_NS), known))
        }
        for name in ("1", "2")
        if not (tmp_path / name).mkdir()
    )
    assert set(first) == set(again)
    roots = [span for span in first.values() if span.name.startswith("request")]
    engine, client, told = sorted(roots, key=lambda span: (span.trace_id.hex() == trace, span.kind))
    assert engine.trace_id == client.trace_id
    assert (told.trace_id.hex(), told.parent_span_id.hex()) == (trace, parent)
    assert attributes(told)["kvscope.label.product"] == "chat"


def test_failed_request_is_an_error_span(tmp_path: Path) -> None:
    """With what the engine said."""
    (span,) = spans(exported(tmp_path, request("x", state="failed", error="out of memory", http_status=500)))
    assert (span.status.code, span.status.message) == (2, "out of memory")
    assert attributes(span)["http.response.status_code"] == 500


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("https://h/", "https://h/v1/traces"),
        ("https://h/otlp/v1/traces", "https://h/otlp/v1/traces"),
    ],
)
def test_path_is_added_where_there_is_none(given: str, used: str) -> None:
    """A backend with a path of its own is called there."""
    assert traces_url(given) == used


@pytest.mark.parametrize("given", ["h:4318", "grpc://h:4317", "http://", "http://h:99999", ""])
def test_address_that_is_none_is_said(given: str) -> None:
    """Before anything is read."""
    with pytest.raises(UsageError, match="no address of an OTLP/HTTP backend"):
        traces_url(given)


class Answers:
    """A backend that gives these answers one after another."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.answers, self.bodies, self.waits, self.told = list(answers), [], [], []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(gzip.decompress(request.content))
        return self.answers.pop(0)

    def backend(self) -> Backend:
        transport = httpx.MockTransport(self)
        return Backend("http://h", {}, sleep=self.waits.append, transport=transport, on_wait=self.told.append)


def test_busy_backend_is_asked_again_after_as_long_as_it_says() -> None:
    """429 and 503 are for later; the body is the same; the number of spans it leaves out is told, and why."""
    partial = ExportTraceServiceResponse()
    partial.partial_success.rejected_spans = 3
    partial.partial_success.error_message = "too\nold"
    protobuf = {"content-type": "application/x-protobuf"}
    done = httpx.Response(200, content=partial.SerializeToString(), headers=protobuf)
    answers = Answers(httpx.Response(429, headers={"Retry-After": "7"}), httpx.Response(503), done)
    assert answers.backend().send(b"spans") == (3, "too old")
    assert answers.bodies == [b"spans"] * 3
    assert ["HTTP 429" in answers.told[0], "HTTP 503" in answers.told[1]] == [True, True]
    assert answers.waits[0] >= 7
    assert 0 < answers.waits[1] < 7


def test_partial_success_in_json_is_read_and_what_cannot_be_read_was_taken() -> None:
    """A backend that answers protobuf with JSON counts in text, as OTLP's JSON does."""
    json = {"content-type": "application/json"}
    for body, told in (
        (b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "no"}}', (2, "no")),
        (b'{"partialSuccess": null}', (0, "")),
        (b"[1", (0, "")),
        (b"[]", (0, "")),
        (b'{"partialSuccess": {"rejectedSpans": "many"}}', (0, "")),
    ):
        assert Answers(httpx.Response(200, content=body, headers=json)).backend().send(b"spans") == told


def test_page_for_people_is_no_backend() -> None:
    """A login page answers 200 to everything; nothing was taken there."""
    page = httpx.Response(200, text="<p>log in", headers={"content-type": "text/html; charset=utf-8"})
    with pytest.raises(BackendRefused, match="page for people"):
        Answers(page).backend().send(b"spans")


def test_refusal_is_told_with_the_backends_words_and_not_repeated() -> None:
    """401 stays 401."""
    answers = Answers(httpx.Response(401, text="no token"))
    with pytest.raises(BackendRefused, match="HTTP 401 no token"):
        answers.backend().send(b"spans")
    assert answers.waits == []


def test_backend_that_never_answers_is_given_up() -> None:
    """Six tries, five waits."""
    answers = Answers(*[httpx.Response(503) for _ in range(6)])
    with pytest.raises(BackendUnreachable, match="tried 6 times"):
        answers.backend().send(b"spans")
    assert len(answers.waits) == 5
