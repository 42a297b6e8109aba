"""OTLP points become cumulative samples: deltas added up, repetitions once, exponential buckets on one grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from engine_probe.adapters.genai_names import TABLES
from engine_probe.adapters.otlp_points import Exponential, Metrics, Point, decode_points
from engine_probe.adapters.otlp_series import SeriesBook, prometheus_name
from engine_probe.adapters.vllm import NAMES
from engine_probe.errors import UnknownFormat

AT = 1_764_403_200_000_000_000
S = 1_000_000_000


def point(**told: Any) -> Point:
    base = Point("x", "", "counter", is_delta=False, at_ns=AT, labels=())
    return replace(base, **told)


def samples(book: SeriesBook, *points: Point, **resource: str) -> list[tuple[str, str | None, int, float]]:
    """(name, le, seconds, value) of what these points store; the book remembers them."""
    prepared = book.prepare([Metrics({key.replace("_", "."): text for key, text in resource.items()}, points)])
    book.apply(prepared)
    return [(name, labels.get("le"), (at - AT) // S, value) for _, at, name, labels, value in prepared.rows]


@pytest.fixture
def book() -> SeriesBook:
    return SeriesBook((*TABLES, NAMES))


@pytest.mark.parametrize(
    ("name", "unit", "kind", "expected"),
    [
        ("gen_ai.server.request.duration", "s", "histogram", "gen_ai_server_request_duration_seconds"),
        ("gen_ai.client.token.usage", "{token}", "histogram", "gen_ai_client_token_usage"),
        ("requests", "1", "counter", "requests_total"),
        ("requests_total", "", "counter", "requests_total"),
        ("process.memory", "By", "gauge", "process_memory_bytes"),
        ("vllm:prompt_tokens_total", "", "counter", "vllm:prompt_tokens_total"),
        ("vllm:e2e_request_latency_seconds", "s", "histogram", "vllm:e2e_request_latency_seconds"),
        ("8ball", "", "gauge", "_8ball"),
    ],
)
def test_names_are_spelled_as_prometheus_spells_them(name: str, unit: str, kind: str, expected: str) -> None:
    """Dots, units and `_total`."""
    assert prometheus_name(point(name=name, unit=unit, kind=kind)) == expected


def test_deltas_are_added_up_series_by_series(book: SeriesBook) -> None:
    """3 and 4 of one series are 7; another label is another series."""
    one, other = (("a", "1"),), (("a", "2"),)
    told = [(0, 3.0, one), (1, 4.0, one), (1, 5.0, other)]
    found = [samples(book, point(is_delta=True, at_ns=AT + t * S, value=v, labels=labels)) for t, v, labels in told]
    assert found == [[("x_total", None, 0, 3.0)], [("x_total", None, 1, 7.0)], [("x_total", None, 1, 5.0)]]


def test_a_repeated_or_older_point_counts_once(book: SeriesBook) -> None:
    """Exporters send again what was not acknowledged."""
    first = point(is_delta=True, value=3.0)
    assert len(samples(book, first)) == 1
    prepared = book.prepare([Metrics({}, [first, point(is_delta=True, value=1.0, at_ns=AT - S)])])
    assert (prepared.rows, prepared.num_repeated) == ([], 2)


def test_nothing_is_remembered_before_it_was_stored(book: SeriesBook) -> None:
    """A batch that could not be committed is prepared anew, with the same rows."""
    batch = [Metrics({}, [point(is_delta=True, value=3.0)])]
    first, second = book.prepare(batch), book.prepare(batch)
    assert first.rows == second.rows
    book.apply(second)
    assert samples(book, point(is_delta=True, value=4.0, at_ns=AT + S)) == [("x_total", None, 1, 7.0)]


def test_gauges_are_as_they_came(book: SeriesBook) -> None:
    """A gauge has no sum, whatever temporality is said; NaN is no number and is left out."""
    gauge = point(kind="gauge", is_delta=True, value=5.0)
    assert samples(book, gauge, replace(gauge, at_ns=AT + S, value=2.0)) == [("x", None, 0, 5.0), ("x", None, 1, 2.0)]
    assert samples(book, replace(gauge, at_ns=AT + 2 * S, value=float("nan"))) == []


def test_an_exponential_histogram_is_stored_between_its_bounds(book: SeriesBook) -> None:
    """Scale 0: (512, 1024] holds 2, (1024, 2048] holds 1, one is zero; in ms, so the bounds are seconds."""
    shape = Exponential(0, 1.0, 0.0, 9, [2.0, 1.0], 0.0, factor=1e-3)
    told = point(kind="exponential", name="h", unit="s", count=4.0, total=3.5, exponential=shape)
    buckets = {le: value for name, le, _, value in samples(book, told) if name == "h_seconds_bucket"}
    assert buckets == {"0": 1.0, "0.512": 1.0, "1.024": 3.0, "2.048": 4.0, "+Inf": 4.0}


def test_finer_buckets_are_merged_and_bounds_go_on(book: SeriesBook) -> None:
    """Scale 4 buckets 0..3 lie in (1, 2^(4/16)]: on the grid of 2^(1/8) they are two. A bound that was stored is stored again."""
    first = point(kind="exponential", name="h", count=4.0, exponential=Exponential(4, 0.0, 0.0, 0, [1.0] * 4, 0.0))
    later = replace(first, at_ns=AT + S, count=6.0, exponential=Exponential(3, 0.0, 0.0, 8, [6.0], 0.0))
    one = {le: value for name, le, _, value in samples(book, first) if name == "h_bucket"}
    assert one == {"1": 0.0, "1.09050773267": 2.0, "1.189207115": 4.0, "+Inf": 4.0}
    two = {le: value for name, le, _, value in samples(book, later) if name == "h_bucket"}
    assert two == {"1": 0.0, "1.09050773267": 0.0, "1.189207115": 0.0, "2": 0.0, "2.18101546533": 6.0, "+Inf": 6.0}


def test_exponential_deltas_are_added_up(book: SeriesBook) -> None:
    """Two deltas with different buckets: cumulative counts at every bound of both."""
    first = point(
        kind="exponential",
        name="h",
        is_delta=True,
        count=2.0,
        total=3.0,
        exponential=Exponential(0, 0.0, 0.0, 0, [2.0], 0.0),
    )
    second = replace(first, at_ns=AT + S, count=1.0, total=5.0, exponential=Exponential(0, 0.0, 0.0, 2, [1.0], 0.0))
    samples(book, first)
    assert samples(book, second) == [
        ("h_sum", None, 1, 8.0),
        ("h_count", None, 1, 3.0),
        ("h_bucket", "1", 1, 0.0),
        ("h_bucket", "2", 1, 2.0),
        ("h_bucket", "4", 1, 2.0),
        ("h_bucket", "8", 1, 3.0),
        ("h_bucket", "+Inf", 1, 3.0),
    ]


def test_series_are_bounded(book: SeriesBook) -> None:
    """More series than remembered are refused with what to do; those that are known go on."""
    small = SeriesBook(TABLES, max_series=2)
    points = [point(labels=(("request", str(n)),), value=1.0) for n in range(3)]
    prepared = small.prepare([Metrics({}, points)])
    small.apply(prepared)
    assert len(prepared.rows) == 2
    assert "drop attributes that identify requests" in prepared.refused[0]
    assert len(small.prepare([Metrics({}, [replace(points[0], at_ns=AT + S)])]).rows) == 1


def test_engines_pages_that_a_collector_forwards_are_known(book: SeriesBook) -> None:
    """vLLM's names take their canonical ones; the scraped address names the worker."""
    told = point(name="vllm:num_requests_running", kind="gauge", value=3.0)
    resource = {"service.name": "vllm", "service.instance.id": "10.0.0.1:8000"}
    (row,) = book.prepare([Metrics(resource, [told])]).rows
    assert (row[0], row[2], row[3]["instance"]) == ("10.0.0.1:8000", "requests_running", "10.0.0.1:8000")


def test_tokens_are_split_by_their_type(book: SeriesBook) -> None:
    """gen_ai.client.token.usage: what went in and what came out are two families, and no worker's."""
    told = point(
        name="gen_ai.client.token.usage",
        unit="{token}",
        kind="histogram",
        count=2.0,
        total=240.0,
        bounds=[100.0],
        counts=[1.0, 1.0],
    )
    rows = book.prepare(
        [
            Metrics(
                {"service.name": "shop"},
                [replace(told, labels=(("gen_ai.token.type", t),)) for t in ("input", "output")],
            )
        ]
    ).rows
    assert {row[2] for row in rows if row[2].endswith("_sum")} == {
        "client_request_prompt_tokens_sum",
        "client_request_output_tokens_sum",
    }
    assert {row[0] for row in rows} == {None}


# --- points


def request(**histogram: Any) -> bytes:
    made = ExportMetricsServiceRequest()
    metric = made.resource_metrics.add().scope_metrics.add().metrics.add()
    metric.name = "h"
    told = metric.histogram.data_points.add()
    told.time_unix_nano = histogram.pop("at_ns", AT)
    told.count = 1
    told.explicit_bounds.extend(histogram.pop("bounds", [1.0]))
    told.bucket_counts.extend(histogram.pop("counts", [1, 0]))
    told.flags = histogram.pop("flags", 0)
    body: bytes = made.SerializeToString()
    return body


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"counts": [1, 0, 0]}, "3 buckets for 1 bounds"),
        ({"bounds": [2.0, 1.0], "counts": [1, 0, 0]}, "do not ascend"),
        ({"at_ns": 5}, "5 ns, expected ns since 1970"),
        ({"at_ns": AT + 3 * 86_400 * S}, "not in the future"),
    ],
)
def test_a_point_that_makes_no_sense_is_refused_alone(change: dict[str, Any], reason: str) -> None:
    """With its name and the reason; no exception, so its neighbours are kept."""
    (metrics,) = decode_points(request(**change), "application/x-protobuf", AT)
    assert metrics.points == []
    assert reason in metrics.refused[0]
    assert metrics.refused[0].startswith("h: ")


def test_a_point_without_a_value_is_none(book: SeriesBook) -> None:
    """The flag `no recorded value`: nothing was measured."""
    assert decode_points(request(flags=1), "application/x-protobuf", AT)[0].points == []


def test_a_media_type_that_is_not_otlp_is_refused() -> None:
    """What may be sent is said."""
    with pytest.raises(UnknownFormat, match="send application/x-protobuf or application/json"):
        decode_points(b"{}", "text/html", AT)
