"""Samples under an engine's own names become the contract's, whoever sends them; others are not touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.adapters import wire_names
from engine_probe.adapters.metric_names import SampleMapper
from engine_probe.adapters.prometheus import parse_page
from engine_probe.adapters.registry import tables_for
from engine_probe.adapters.wire_names import canonical_samples
from engine_probe.schema import table_from_rows

AT_NS = 1_790_000_000_000_000_000


def sample(name: str, value: float = 1.0, worker: str | None = "w", **labels: str) -> dict[str, Any]:
    return {"worker": worker, "at_ns": AT_NS, "name": name, "labels": labels, "value": value}


def mapped(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    table = canonical_samples({"sample": table_from_rows("sample", rows)})["sample"]
    found = table.to_pylist(maps_as_pydicts="strict")
    return [{key: row[key] for key in ("worker", "at_ns", "name", "labels", "value")} for row in found]


def test_a_wire_name_becomes_the_contracts() -> None:
    """The value, the labels and the instant stay; the wire's name is kept beside them."""
    (row,) = mapped(sample("vllm:num_requests_running", 3.0, engine="0", model_name="m"))
    assert row == sample("requests_running", 3.0, engine="0", model_name="m", wire="vllm:num_requests_running")


def test_ranks_and_labels_mean_what_they_mean_to_attach() -> None:
    """vLLM's rank 1, SGLang's dp_rank 2, a router's server; a failed request is not a finished one."""
    rows = mapped(
        sample("vllm:num_requests_running", engine="1"),
        sample("vllm:request_success_total", engine="0", finished_reason="abort"),
        sample("sglang:num_running_reqs", worker="s", dp_rank="2"),
        sample("vllm:num_requests_running", worker="r", server="http://a"),
    )
    assert [(row["worker"], row["name"]) for row in rows] == [
        ("w/dp1", "requests_running"),
        ("w", "requests_failed_total"),
        ("s/dp2", "requests_running"),
        ("a", "router_load"),
    ]


def test_a_series_that_counts_twice_becomes_two_rows() -> None:
    """SGLang's hits are lookups too; both keep the wire's name, in the place of the one."""
    rows = mapped(
        sample("mine", 5.0),
        sample("sglang:prefill_effective_tokens_total", 30.0, mode="device_hit"),
        sample("sglang:prefill_effective_tokens_total", 70.0, mode="input"),
    )
    assert [(row["name"], row["value"]) for row in rows] == [
        ("mine", 5.0),
        ("prefix_hits_tokens_total", 30.0),
        ("prefix_queries_tokens_total", 30.0),
        ("prompt_tokens_computed_total", 70.0),
        ("prefix_queries_tokens_total", 70.0),
    ]


def test_of_two_names_of_one_thing_the_newer_counts_and_each_worker_is_a_page_of_its_own() -> None:
    """Worker a shows both, worker b only the old one."""
    rows = mapped(
        sample("vllm:gpu_cache_usage_perc", 0.5, "a", engine="0"),
        sample("vllm:kv_cache_usage_perc", 0.5, "a", engine="0"),
        sample("vllm:gpu_cache_usage_perc", 0.25, "b", engine="0"),
    )
    assert [(row["worker"], row["name"]) for row in rows] == [
        ("a", "vllm:gpu_cache_usage_perc"),
        ("a", "kv_usage_ratio"),
        ("b", "kv_usage_ratio"),
    ]


def test_no_row_is_lost() -> None:
    """What `attach` leaves out of a page (a copy of a rank, a gauge that depends on the reader) is somebody's row here."""
    rows = mapped(
        sample("sglang:num_running_reqs", tp_rank="0"),
        sample("sglang:num_running_reqs", tp_rank="1"),
        sample("llamacpp:requests_processing", worker="l"),
        sample("llamacpp:prompt_tokens_seconds", worker="l"),
        sample("python_info"),
    )
    assert [row["name"] for row in rows] == [
        "requests_running",
        "sglang:num_running_reqs",
        "requests_running",
        "llamacpp:prompt_tokens_seconds",
        "python_info",
    ]


def test_a_sender_that_maps_is_left_alone() -> None:
    """An old name beside the contract's own name is a name of its own: mapped once more it would count twice."""
    table = table_from_rows(
        "sample",
        [
            sample("kv_usage_ratio", 0.5, wire="vllm:kv_cache_usage_perc"),
            sample("vllm:gpu_cache_usage_perc", 0.5, engine="0"),
        ],
    )
    assert canonical_samples({"sample": table})["sample"] is table


def test_tables_without_wire_names_are_the_same_objects() -> None:
    """Other kinds too, and an empty batch."""
    tables = {
        "sample": table_from_rows("sample", [sample("requests_running"), sample("vllm:something_else")]),
        "mark": table_from_rows("mark", [{"at_ns": AT_NS, "mark": "fault"}]),
    }
    assert all(found is tables[kind] for kind, found in canonical_samples(tables).items())
    assert canonical_samples({}) == {}
    empty = table_from_rows("sample", [])
    assert canonical_samples({"sample": empty})["sample"] is empty


def test_many_rows_are_mapped_in_slices_and_too_many_series_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order and presence hold over slices: the old name in the first slice sees the new one in the last."""
    monkeypatch.setattr(wire_names, "SLICE_ROWS", 2)
    told = [sample("vllm:gpu_cache_usage_perc", k, "a", engine="0") for k in (1.0, 2.0, 3.0)]
    told.append(sample("vllm:kv_cache_usage_perc", 4.0, "a", engine="0"))
    rows = mapped(*told)
    assert [row["value"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    assert [row["name"] for row in rows] == ["vllm:gpu_cache_usage_perc"] * 3 + ["kv_usage_ratio"]
    monkeypatch.setattr(wire_names, "MAX_SERIES", 1)
    assert {row["name"] for row in mapped(*told)} == {"vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"}


def test_a_histogram_is_renamed_with_its_buckets() -> None:
    """`le` stays a label."""
    rows = mapped(
        sample("vllm:e2e_request_latency_seconds_bucket", 4.0, engine="0", le="0.5"),
        sample("vllm:e2e_request_latency_seconds_sum", 9.0, engine="0"),
    )
    assert [row["name"] for row in rows] == ["request_latency_seconds_bucket", "request_latency_seconds_sum"]
    assert rows[0]["labels"]["le"] == "0.5"


@pytest.mark.parametrize("page", ["vllm", "sglang", "llamacpp", "trtllm", "tgi", "triton_trtllm"])
def test_a_page_sent_row_by_row_gives_what_attach_makes_of_it(page: str) -> None:
    """Every sample page: the same canonical rows, with the same workers, labels and values."""
    from tests.unit.test_engines_attach import SAMPLES

    found = parse_page((SAMPLES / f"{page}_metrics.synthetic.prom").read_text())
    attach = {
        (worker, name, tuple(sorted(labels.items())), value)
        for worker, _, name, labels, value in SampleMapper("w", tables_for(found)).rows(found, AT_NS)
        if ":" not in name and "wire" in labels
    }
    sent = mapped(*[sample(series.name, value, **series.labels) for series, value, _ in found.samples])
    ingest = {
        (row["worker"], row["name"], tuple(sorted(row["labels"].items())), row["value"])
        for row in sent
        if "wire" in row["labels"] and ":" not in row["name"]
    }
    assert attach == ingest
    assert attach


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["vllm:num_requests_running", "sglang:num_queue_reqs", "requests_running", "x", "llamacpp:a"]
            ),
            st.sampled_from([None, "a", "b"]),
            st.dictionaries(st.sampled_from(["engine", "priority", "x"]), st.sampled_from(["", "0", "1"]), max_size=2),
            st.floats(-1e300, 1e300),
        ),
        max_size=12,
    )
)
def test_rows_stay_in_their_order_with_their_values(rows: list[Any]) -> None:
    """One row each for names that count once."""
    told = [sample(name, value, worker, **labels) for name, worker, labels, value in rows]
    assert [row["value"] for row in mapped(*told)] == [row["value"] for row in told]
