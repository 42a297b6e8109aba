"""`POST /v1/metrics` of a real collector: OTLP over HTTP, each point once, under canonical names."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from collector.api.ingest import EXAMPLE_OTLP_METRICS
from tests.integration.collector_harness import JSON, NOW_NS, Collector, running

PROTOBUF = {"content-type": "application/x-protobuf"}
DELTA, CUMULATIVE = 1, 2


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with running(tmp_path_factory.mktemp("metrics") / "kvscope.duckdb") as made:
        yield made


def histogram(
    service: str, name: str, *points: tuple[int, list[int]], temporality: int = CUMULATIVE, sums: float = 1.0
) -> bytes:
    """A request with points (second, counts of the buckets up to 0.25, 0.5 and beyond)."""
    request = ExportMetricsServiceRequest()
    of_resource = request.resource_metrics.add()
    pair = of_resource.resource.attributes.add()
    pair.key, pair.value.string_value = "service.name", service
    metric = of_resource.scope_metrics.add().metrics.add()
    metric.name, metric.unit = name, "s"
    metric.histogram.aggregation_temporality = temporality
    for second, counts in points:
        point = metric.histogram.data_points.add()
        point.time_unix_nano = NOW_NS + second * 1_000_000_000
        point.count, point.sum = sum(counts), sums
        point.explicit_bounds.extend([0.25, 0.5])
        point.bucket_counts.extend(counts)
    body: bytes = request.SerializeToString()
    return body


def send(collector: Collector, body: bytes, headers: dict[str, str] = PROTOBUF) -> httpx.Response:
    return collector.client.post("/v1/metrics", content=body, headers=headers)


def stored(collector: Collector, worker: str) -> list[tuple[str, str | None, int, float]]:
    """(name, le, seconds after NOW_NS, value) of a worker's samples, in order."""
    rows: list[dict[str, Any]] = collector.store.query(
        "SELECT name, labels['le'] AS le, at_ns, value FROM sample WHERE worker = ? ORDER BY at_ns, name, le", [worker]
    ).to_pylist()
    return [(row["name"], row["le"], (row["at_ns"] - NOW_NS) // 1_000_000_000, row["value"]) for row in rows]


def test_a_histogram_of_the_genai_conventions_takes_the_canonical_names(collector: Collector) -> None:
    """gen_ai.server.time_to_first_token in s: cumulative buckets 1, 3 and 4 in all, as a scraped page would have them."""
    answer = send(collector, histogram("w-names", "gen_ai.server.time_to_first_token", (0, [1, 2, 1]), sums=1.75))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert stored(collector, "w-names") == [
        ("time_to_first_token_seconds_bucket", "+Inf", 0, 4.0),
        ("time_to_first_token_seconds_bucket", "0.25", 0, 1.0),
        ("time_to_first_token_seconds_bucket", "0.5", 0, 3.0),
        ("time_to_first_token_seconds_count", None, 0, 4.0),
        ("time_to_first_token_seconds_sum", None, 0, 1.75),
    ]


def test_deltas_are_added_up_and_a_repeated_export_counts_once(collector: Collector) -> None:
    """Two deltas of 4 and 2 become the totals 4 and 6; the second one sent again changes nothing."""
    first = histogram("w-delta", "gen_ai.server.request.duration", (0, [1, 2, 1]), temporality=DELTA, sums=2.0)
    second = histogram("w-delta", "gen_ai.server.request.duration", (60, [0, 0, 2]), temporality=DELTA, sums=3.0)
    for body in (first, second, second):
        assert send(collector, body).status_code == 200
    counts = [
        row
        for row in stored(collector, "w-delta")
        if row[0] in ("request_latency_seconds_count", "request_latency_seconds_sum")
    ]
    assert counts == [
        ("request_latency_seconds_count", None, 0, 4.0),
        ("request_latency_seconds_sum", None, 0, 2.0),
        ("request_latency_seconds_count", None, 60, 6.0),
        ("request_latency_seconds_sum", None, 60, 5.0),
    ]
    assert collector.metric("kvscope_ingest_points_total", result="duplicate") == 1.0


def test_the_example_of_the_openapi_page_is_accepted(collector: Collector) -> None:
    """JSON, gzip or not; an empty object says that nothing was left out."""
    assert (send(collector, b"{}", JSON).status_code, send(collector, b"{}", JSON).json()) == (200, {})
    assert send(collector, b"").status_code == 200  # an empty protobuf message is an export of nothing
    body = msgspec.json.encode(EXAMPLE_OTLP_METRICS)
    answer = send(collector, gzip.compress(body), JSON | {"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()) == (200, {})
    assert any(row[0] == "time_to_first_token_seconds_count" and row[3] == 3.0 for row in stored(collector, "worker-0"))


def test_a_point_that_cannot_be_a_row_does_not_cost_its_neighbours(collector: Collector) -> None:
    """An instant of 1970 is left out and told in partialSuccess; the other point of the body is stored."""
    request = ExportMetricsServiceRequest()
    request.ParseFromString(histogram("w-bad", "gen_ai.server.request.duration", (0, [1, 0, 0]), (1, [2, 0, 0])))
    request.resource_metrics[0].scope_metrics[0].metrics[0].histogram.data_points[1].time_unix_nano = 17
    answer = send(collector, request.SerializeToString())
    told = ExportMetricsServiceResponse()
    told.ParseFromString(answer.content)
    assert answer.status_code == 200
    assert told.partial_success.rejected_data_points == 1
    assert "17 ns" in told.partial_success.error_message
    assert {row[2] for row in stored(collector, "w-bad")} == {0}


def test_what_applications_saw_is_no_workers(collector: Collector) -> None:
    """gen_ai.client.* keeps its own names, has no worker, and names the service in a label."""
    send(collector, histogram("shop", "gen_ai.client.operation.duration", (0, [3, 0, 0])))
    rows = collector.store.query(
        "SELECT worker, labels['service'] AS service, value FROM sample WHERE name = 'client_request_latency_seconds_count'"
    ).to_pylist()
    assert rows == [{"worker": None, "service": "shop", "value": 3.0}]


@pytest.mark.parametrize(
    ("body", "headers", "status", "title"),
    [
        (b"\xff\xff\xff", PROTOBUF, 415, "Format not known"),
        (b"<html>", JSON, 415, "Format not known"),
        (b'{"resourceMetrics": 3}', JSON, 415, "Format not known"),
        (b"{}", {"content-type": "text/plain"}, 415, "Format not known"),
        (b'{"resourceSpans": []}', JSON, 415, "Format not known"),
        (b"", JSON, 415, "Format not known"),
    ],
)
def test_what_is_no_metrics_is_refused_in_a_sentence(
    collector: Collector, body: bytes, headers: dict[str, str], status: int, title: str
) -> None:
    """problem+json with what was expected."""
    answer = send(collector, body, headers)
    assert (answer.status_code, answer.json()["title"]) == (status, title)
