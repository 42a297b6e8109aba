"""`/metrics` and upkeep of a real collector: what it counts is what was sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from store.metric_catalogue import family_of
from tests.integration.collector_harness import NOW_NS, Collector, request_row, running, step_row

MS = 1_000_000


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with running(tmp_path_factory.mktemp("metrics") / "kvscope.duckdb", metrics={"max_sources": 3}) as made:
        requests = [
            request_row(
                f"r{i}",
                vantage="engine",
                worker="w0",
                model="m",
                queue_s=0.05,
                prompt_tokens=100,
                cached_tokens=64,
                num_preemptions=i,
                token_ns=[NOW_NS, NOW_NS + 20 * MS],
            )
            for i in range(4)
        ]
        rows = {
            "request": [*requests, request_row("other", vantage="client", model="m")],
            "step": [step_row(1, num_running=3, blocks_total=100, blocks_used=60, blocks_evicted=5)],
            "mark": [{"mark": "gap", "at_ns": NOW_NS, "subject": "s", "attrs": [("dropped_rows", "7")]}],
        }
        for _ in range(2):
            made.post(rows, source="plugin", epoch="e", seq="0").raise_for_status()
        yield made


def test_page_is_sound_prometheus_text(collector: Collector) -> None:
    """It parses; every name is ours or the process's, has help, and ends in its unit or `_total`."""
    answer = collector.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    names = set()
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation, family.name
        assert family.name.startswith(("kvscope_", "process_")), family.name
        assert family.name not in names
        names.add(family.name)
        for sample in family.samples:
            assert sample.value == sample.value, sample
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_tokens", "_requests"))
        if family.name.startswith("kvscope_"):
            told = family_of(
                family.name + ("_total" if family.type == "counter" else "_sum" * (family.type == "histogram"))
            )
            assert told.type == family.type
            assert {label for sample in family.samples for label in sample.labels} - {"le"} <= set(told.labels)
    assert {"kvscope_time_to_first_token_seconds", "kvscope_store_bytes", "kvscope_ingest_commit_seconds"} <= names


def test_open_metrics_name_a_request_of_each_bucket(collector: Collector) -> None:
    """Who accepts OpenMetrics gets it, sound, with the newest request of a bucket of TTFT as its exemplar."""
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"}
    answer = collector.client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(answer.text)}
    named = {
        sample.labels["le"]: sample.exemplar
        for sample in families["kvscope_time_to_first_token_seconds"].samples
        if sample.exemplar
    }
    assert set(named) == {"0.1"}
    assert named["0.1"].labels == {"request_id": "r3"}
    assert named["0.1"].value == pytest.approx(0.1)
    plain = collector.client.get("/metrics").text
    assert "request_id" not in plain, "the older format has no exemplars"


def test_latencies_are_those_of_the_engine_and_counted_once(collector: Collector) -> None:
    """Four requests at the engine; the client's view of the same model and the duplicate batch are not added."""
    labels = {"vantage": "engine", "worker": "w0", "model": "m"}
    ttft = "kvscope_time_to_first_token_seconds"
    assert collector.metric(f"{ttft}_count", **labels) == 4
    assert collector.metric(f"{ttft}_sum", **labels) == pytest.approx(0.4)
    assert collector.metric(f"{ttft}_bucket", **labels, le="0.1") == 4
    assert collector.metric(f"{ttft}_bucket", **labels, le="0.075") == 0
    assert collector.metric(f"{ttft}_bucket", **labels, le="600.0") == 4
    assert collector.metric(f"{ttft}_count", vantage="client") is None
    assert collector.metric("kvscope_inter_token_latency_seconds_sum", **labels) == pytest.approx(0.08)
    assert collector.metric("kvscope_queue_seconds_sum", **labels) == pytest.approx(0.2)
    assert collector.metric("kvscope_prefill_seconds_count", **labels) is None, "unknown is absent, never zero"
    assert collector.metric("kvscope_prompt_tokens_total", **labels) == 400
    assert collector.metric("kvscope_prefix_hit_tokens_total", **labels) == 256
    assert collector.metric("kvscope_preemptions_total", **labels) == 6
    assert collector.metric("kvscope_requests_total", **labels, state="finished") == 4


def test_workers_blocks_and_evictions_are_shown(collector: Collector) -> None:
    """From the newest step."""
    assert collector.metric("kvscope_requests_running", worker="worker-0") == 3
    assert collector.metric("kvscope_requests_waiting", worker="worker-0") is None
    assert collector.metric("kvscope_kv_blocks", worker="worker-0", state="used") == 60
    assert collector.metric("kvscope_block_evictions_total", worker="worker-0", kind="step") == 5


def test_collector_counts_itself(collector: Collector) -> None:
    """Rows, batches, the duplicate, the gap its sender told, the size of the store."""
    assert collector.metric("kvscope_ingest_rows_total", kind="request") == 5
    assert collector.metric("kvscope_ingest_batches_total", result="accepted") == 1
    assert collector.metric("kvscope_ingest_batches_total", result="duplicate") == 1
    assert collector.metric("kvscope_gap_marks_total", source="plugin") == 1
    assert collector.metric("kvscope_ingest_commit_seconds_count") == 1
    assert collector.metric("kvscope_ingest_queue_batches") == 0
    assert collector.metric("kvscope_ingest_memory_bytes") == 0
    assert collector.metric("kvscope_store_rows", kind="request") == 5
    assert (collector.metric("kvscope_store_bytes") or 0) > 0
    assert (collector.metric("kvscope_store_free_bytes") or 0) > 0


def test_invented_senders_share_one_series(collector: Collector) -> None:
    """Beyond the limit they are `other`; the page does not grow with what is sent."""
    for number in range(8):
        collector.post({"step": [step_row(1)]}, source=f"invented-{number}").raise_for_status()
    text = collector.client.get("/metrics").text
    assert "invented-7" not in text
    assert 'source="other"' in text


def test_old_rows_are_sealed_and_sql_still_sees_every_row(tmp_path: Path) -> None:
    """Upkeep runs beside ingest: Parquet appears, and the answer over both parts is complete."""
    retention = {"interval_s": 0.2, "seal_after_s": 0.1, "seal_min_rows": 1}
    with running(tmp_path / "kvscope.duckdb", retention=retention) as collector:
        for number in range(5):
            collector.post({"step": [step_row(number)]}).raise_for_status()
        deadline = time.monotonic() + 20
        while not list((tmp_path / "kvscope.parquet").glob("kind=step/**/*.parquet")):
            assert time.monotonic() < deadline, "nothing was sealed"
            time.sleep(0.05)
        collector.post({"step": [step_row(99)]}).raise_for_status()
        answer = collector.client.post("/api/v1/sql", json={"sql": "SELECT step FROM step ORDER BY step"})
        assert answer.json()["rows"] == [[0], [1], [2], [3], [4], [99]]
