"""Samples under an engine's own names, sent to a real collector, are stored under the contract's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine_probe.schema import table_from_rows
from engine_probe.wire.codec import encode_arrow
from tests.integration.collector_harness import ARROW, JSON, NOW_NS, Collector, running

SCRAPE = [
    ("vllm:num_requests_running", {"engine": "0"}, 3.0),
    ("vllm:prefix_cache_hits_total", {"engine": "0"}, 40.0),
    ("vllm:e2e_request_latency_seconds_bucket", {"engine": "0", "le": "0.5"}, 2.0),
    ("sglang:prefill_effective_tokens_total", {"mode": "device_hit"}, 30.0),
    ("sglang:prefill_effective_tokens_total", {"mode": "input"}, 70.0),
    ("my_own_number", {}, 7.0),
]
STORED = {
    ("requests_running", "vllm:num_requests_running", 3.0),
    ("prefix_hits_tokens_total", "vllm:prefix_cache_hits_total", 40.0),
    ("request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket", 2.0),
    ("prefix_hits_tokens_total", "sglang:prefill_effective_tokens_total", 30.0),
    ("prefix_queries_tokens_total", "sglang:prefill_effective_tokens_total", 30.0),
    ("prompt_tokens_computed_total", "sglang:prefill_effective_tokens_total", 70.0),
    ("prefix_queries_tokens_total", "sglang:prefill_effective_tokens_total", 70.0),
    ("my_own_number", None, 7.0),
}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with running(tmp_path_factory.mktemp("wire") / "kvscope.duckdb") as made:
        yield made


def scrape() -> list[dict[str, Any]]:
    return [
        {"worker": "w", "at_ns": NOW_NS, "name": name, "labels": labels, "value": value}
        for name, labels, value in SCRAPE
    ]


@pytest.mark.parametrize("form", ["json", "arrow"])
def test_wire_names_are_stored_under_the_contracts_names(collector: Collector, form: str) -> None:
    """In either form; the wire's name stays in the labels, and the answer counts the rows that were stored."""
    if form == "json":
        body = msgspec.json.encode({"source": form, "events": {"sample": scrape()}})
        answer = collector.client.post("/v1/events", content=body, headers=JSON)
    else:
        headers = ARROW | {"kvscope-source": form, "kvscope-epoch": "e", "kvscope-seq": "0"}
        tables = {"sample": table_from_rows("sample", scrape())}
        answer = collector.client.post("/v1/events", content=encode_arrow(tables), headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["accepted"] == {"sample": len(STORED)}
    rows = collector.store.query("SELECT * FROM sample WHERE source = ?", [form]).to_pylist(maps_as_pydicts="strict")
    assert {(row["name"], row["labels"].get("wire"), row["value"]) for row in rows} == STORED
    assert len(rows) == len(STORED)


def test_what_is_wrong_is_named_as_it_was_sent(collector: Collector) -> None:
    """A bad row of a wire name is refused by the name and place that its sender knows."""
    rows = [*scrape(), {"worker": "w", "at_ns": -1, "name": "vllm:num_requests_running", "value": 1.0}]
    body = msgspec.json.encode({"source": "bad", "events": {"sample": rows}})
    answer = collector.client.post("/v1/events", content=body, headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["row"] == len(SCRAPE)
    assert collector.count("sample", "source = 'bad'") == 0
