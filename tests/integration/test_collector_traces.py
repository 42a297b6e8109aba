"""`POST /v1/traces` of a real collector: OTLP over HTTP, each span once."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.integration.collector_harness import JSON, NOW_NS, Collector, request_row, running

PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with running(tmp_path_factory.mktemp("traces") / "kvscope.duckdb") as made:
        yield made


def export(
    *spans: tuple[int, int], name: str = "llm_request", start_ns: int = NOW_NS, end_ns: int | None = None
) -> bytes:
    """A request with these (trace, span) numbers."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    service = resource.resource.attributes.add()
    service.key, service.value.string_value = "service.name", "worker-7"
    for trace, number in spans:
        span = resource.scope_spans.add().spans.add()
        span.name = name
        span.trace_id, span.span_id = trace.to_bytes(16, "big"), number.to_bytes(8, "big")
        span.start_time_unix_nano = start_ns
        span.end_time_unix_nano = start_ns + 2_000_000_000 if end_ns is None else end_ns
        for key, value in (("time_to_first_token", 0.25), ("time_in_queue", 0.05), ("time_in_model_prefill", 0.15)):
            pair = span.attributes.add()
            pair.key, pair.value.double_value = f"gen_ai.latency.{key}", value
        pair = span.attributes.add()
        pair.key, pair.value.string_value = "gen_ai.request.id", f"cmpl-{trace}-{number}-0"
    body: bytes = request.SerializeToString()
    return body


def send(collector: Collector, body: bytes, headers: dict[str, str] = PROTOBUF) -> httpx.Response:
    return collector.client.post("/v1/traces", content=body, headers=headers)


def stored(collector: Collector, *traces: int) -> list[dict[str, Any]]:
    ids = [trace.to_bytes(16, "big").hex() for trace in traces]
    rows: list[dict[str, Any]] = collector.store.query(
        f"SELECT * FROM request WHERE trace_id IN ({', '.join('?' * len(ids))}) ORDER BY request_id", ids
    ).to_pylist()
    return rows


def test_span_becomes_a_row_at_the_engine(collector: Collector) -> None:
    """Its durations and ids are those of the span; 200 carries an empty ExportTraceServiceResponse."""
    answer = send(collector, export((1, 1)))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert ExportTraceServiceResponse.FromString(answer.content) == ExportTraceServiceResponse()
    (row,) = stored(collector, 1)
    assert (row["worker"], row["vantage"], row["state"], row["source"]) == ("worker-7", "engine", "finished", "otlp")
    assert (row["queue_s"], row["prefill_s"]) == (0.05, 0.15)
    assert row["first_token_ns"] == NOW_NS + 250_000_000


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_compressed_export_is_read(collector: Collector, encoding: str) -> None:
    """Exporters compress with gzip by default in many set-ups."""
    import pyarrow as pa

    trace = 20 + len(encoding)
    body = export((trace, 1))
    packed = gzip.compress(body) if encoding == "gzip" else pa.compress(body, "zstd", asbytes=True)
    assert send(collector, packed, PROTOBUF | {"content-encoding": encoding}).status_code == 200
    assert len(stored(collector, trace)) == 1


def test_json_export_is_read_and_answered_as_json(collector: Collector) -> None:
    """OTLP/HTTP JSON: ids in hex, 64-bit numbers as text."""
    span = {
        "traceId": (30).to_bytes(16, "big").hex(),
        "spanId": "00000000000000aa",
        "name": "llm_request",
        "startTimeUnixNano": str(NOW_NS),
        "endTimeUnixNano": str(NOW_NS + 1_000_000_000),
        "attributes": [{"key": "gen_ai.latency.time_in_queue", "value": {"doubleValue": 0.5}}],
    }
    body = msgspec.json.encode({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    answer = send(collector, body, JSON)
    assert (answer.status_code, answer.json()) == (200, {})
    (row,) = stored(collector, 30)
    assert row["queue_s"] == 0.5


def test_resent_and_regrouped_spans_are_stored_once(collector: Collector) -> None:
    """The same export again, and its spans among others in another export: each span is one row."""
    before = collector.metric("kvscope_ingest_spans_total", result="duplicate") or 0
    for body in (export((40, 1), (40, 2)), export((40, 1), (40, 2)), export((40, 2), (40, 3), (40, 3))):
        assert send(collector, body).status_code == 200
    assert len(stored(collector, 40)) == 3
    assert collector.metric("kvscope_ingest_spans_total", result="duplicate") == before + 4


def test_the_same_spans_at_once_are_stored_once(collector: Collector) -> None:
    """Eight exporters that share spans: no row twice."""
    bodies = [export(*((50, n) for n in range(start, start + 6))) for start in range(1, 9)] * 2
    with ThreadPoolExecutor(8) as pool:
        assert {answer.status_code for answer in pool.map(lambda body: send(collector, body), bodies)} == {200}
    rows = stored(collector, 50)
    assert len(rows) == len({row["request_id"] for row in rows}) == 13


def test_span_stored_by_an_earlier_process_is_recognised(tmp_path: Path) -> None:
    """A collector that was restarted answers a resent span without storing it again, and stores new ones."""
    for _ in range(2):
        with running(tmp_path / "kvscope.duckdb") as collector:
            assert send(collector, export((60, 1))).status_code == 200
            assert send(collector, export((60, 2), start_ns=NOW_NS - 3_600_000_000_000)).status_code == 200
            assert len(stored(collector, 60)) == 2


def test_other_spans_are_counted_and_left_out(collector: Collector) -> None:
    """A trace of a whole service holds much that is no request."""
    before = collector.metric("kvscope_ingest_spans_total", result="ignored") or 0
    assert send(collector, export((70, 1), (70, 2), name="GET /health")).status_code == 200
    assert stored(collector, 70) == []
    assert collector.metric("kvscope_ingest_spans_total", result="ignored") == before + 2


def test_bad_span_costs_its_neighbours_nothing(collector: Collector) -> None:
    """A span from the far future is told in partial_success; the others are stored."""
    future = time.time_ns() + 10 * 86_400_000_000_000
    good, bad = ExportTraceServiceRequest(), ExportTraceServiceRequest()
    good.ParseFromString(export((80, 1)))
    bad.ParseFromString(export((80, 2), start_ns=future))
    good.MergeFrom(bad)
    answer = send(collector, good.SerializeToString())
    assert answer.status_code == 200
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_spans == 1
    assert "future" in partial.error_message
    assert len(stored(collector, 80)) == 1


def test_span_without_ids_is_rejected(collector: Collector) -> None:
    """Without trace and span id nothing could tell a resent span; the OTLP specification forbids such spans."""
    span = {"name": "llm_request", "startTimeUnixNano": str(NOW_NS), "endTimeUnixNano": str(NOW_NS + 1)}
    zeros = span | {"traceId": "0" * 32, "spanId": "1" * 16}
    base64 = span | {"traceId": "CvdlGRbNQ92ESOshHIAxnA==", "spanId": "t61rcWkgMzE="}
    body = msgspec.json.encode({"resourceSpans": [{"scopeSpans": [{"spans": [span, span, zeros, base64]}]}]})
    answer = send(collector, body, JSON).json()
    assert answer["partialSuccess"]["rejectedSpans"] == "4"


@pytest.mark.parametrize(
    ("body", "headers"),
    [(b"", PROTOBUF), (b"", {"content-type": "application/protobuf"}), (b"{}", JSON), (b'{"resourceSpans": []}', JSON)],
)
def test_export_of_nothing_succeeds(collector: Collector, body: bytes, headers: dict[str, str]) -> None:
    """An exporter that has nothing to say is no error (OTLP specification): it must not drop or repeat anything."""
    answer = send(collector, body, headers)
    assert (answer.status_code, answer.content) == (200, b"{}" if headers is JSON else b"")


def test_request_that_the_plugin_told_too_counts_once(collector: Collector) -> None:
    """Plugin rows and spans of the same 2 requests: both kinds of row are stored, /metrics counts 2 and not 4."""

    def counted(name: str) -> float:
        shown = {worker: collector.metric(name, worker=worker) or 0.0 for worker in ("w9", "worker-7")}
        return sum(shown.values())

    names = ("kvscope_time_to_first_token_seconds_count", "kvscope_queue_seconds_count")
    before = [counted(name) for name in names]
    plugin = [
        request_row(
            f"90-{n}", vantage="engine", worker="w9", queue_s=0.05, labels={"engine_request_id": f"cmpl-90-{n}-0"}
        )
        for n in (1, 2)
    ]
    collector.post({"request": plugin[:1]}).raise_for_status()
    assert send(collector, export((90, 1), (90, 2))).status_code == 200
    collector.post({"request": plugin[1:]}).raise_for_status()
    assert collector.count("request", "request_id IN ('90-1', '90-2')") == 4
    assert [counted(name) for name in names] == [count + 2 for count in before]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xff\xff\xff", PROTOBUF, 415),
        (b"{", JSON, 415),
        (b'{"spans": []}', JSON, 415),
        (b"", JSON, 415),
        (b"x", {"content-type": "text/plain"}, 415),
    ],
)
def test_body_that_is_no_export_is_refused(
    collector: Collector, body: bytes, headers: dict[str, str], status: int
) -> None:
    """With a problem document, not a traceback."""
    answer = send(collector, body, headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
