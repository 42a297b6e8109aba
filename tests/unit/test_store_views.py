"""What the views join, on a few rows worked by hand."""

from __future__ import annotations

import pytest

from engine_probe.schema import table_from_rows
from store.interface import Batch
from store.open import open_store

S = 1_000_000_000


def rows_of(view, order="ALL", **kinds):
    """Rows of a view over a store that holds the given rows by kind."""
    with open_store(":memory:") as store:
        store.append(Batch({kind: table_from_rows(kind, rows) for kind, rows in kinds.items()}))
        return store.query(f"SELECT * FROM {view} ORDER BY {order}").to_pylist()


def request(**facts):
    """A finished request at the engine's vantage on worker w."""
    base = {"request_id": "r", "vantage": "engine", "state": "finished", "worker": "w", "arrival_ns": S, "at_ns": 9 * S}
    return base | facts


def step(at_s, **facts):
    """A step of worker w that ended at `at_s`."""
    return {"worker": "w", "step": at_s, "at_ns": at_s * S} | facts


def test_phase_span_keeps_every_occurrence_in_order():
    """Two prefill chunks are two rows with their own length; a request without spans gives none."""
    spans = [
        {"phase": "prefill", "start_ns": 0, "end_ns": S, "tokens": 8},
        {"phase": "prefill", "start_ns": 2 * S, "end_ns": 2 * S + S // 2, "tokens": 4},
    ]
    found = rows_of(
        "phase_span", "ordinal", request=[request(spans=spans), request(request_id="bare"), request(spans=[])]
    )
    assert [(row["ordinal"], row["phase"], row["duration_s"], row["tokens"]) for row in found] == [
        (0, "prefill", 1.0, 8),
        (1, "prefill", 0.5, 4),
    ]


def test_token_gap_splits_chunks_of_several_tokens():
    """Gaps 3 s with 3 tokens and 1 s with 1: ITL 1 s each, the first one flagged."""
    found = rows_of("token_gap", "ordinal", request=[request(token_ns=[0, 3 * S, 4 * S], token_counts=[1, 3, 1])])
    assert [(r["ordinal"], r["at_ns"], r["gap_s"], r["num_tokens"], r["is_multi"], r["itl_s"]) for r in found] == [
        (1, 3 * S, 3.0, 3, True, 1.0),
        (2, 4 * S, 1.0, 1, False, 1.0),
    ]


def test_token_gap_without_counts_takes_a_chunk_as_one_token():
    """Unknown counts stay unknown, the gap is the ITL; one token or none has no gap."""
    tables = [request(token_ns=[0, 2 * S]), request(token_ns=[5]), request(token_ns=[]), request()]
    found = rows_of("token_gap", request=tables)
    assert [(r["gap_s"], r["num_tokens"], r["is_multi"], r["itl_s"]) for r in found] == [(2.0, None, None, 2.0)]


def test_prefill_takes_the_backend_of_the_step_that_covers_it():
    """First scheduled at 2.5 s: the step that ended at 3 s covers it; another worker's or run's does not."""
    found = rows_of(
        "evidence_prefill",
        request=[
            request(
                first_scheduled_ns=5 * S // 2, prompt_tokens=100, output_tokens=20, prefill_s=0.25, cached_tokens=64
            )
        ],
        step=[
            step(2, attention_backend="early"),
            step(3, attention_backend="covers"),
            step(4, attention_backend="late"),
            step(3, attention_backend="other") | {"worker": "x"},
            step(3, attention_backend="run") | {"run_id": "a"},
        ],
    )
    assert found == [
        {
            "input_tokens": 100,
            "sequence_length": 120,
            "prefill_ms": 250.0,
            "prompt_cache_hit": True,
            "attention_backend": "covers",
        }
    ]


def test_prefill_takes_tokens_from_another_vantage_where_the_engine_does_not_tell():
    """An engine row of OTLP has no cached tokens; the client's usage report of the same request has."""
    client = request(prompt_tokens=100, output_tokens=20, cached_tokens=64) | {"vantage": "client"}
    found = rows_of("evidence_prefill", request=[request(prefill_s=0.5), client])
    assert [tuple(row.values()) for row in found] == [(100, 120, 500.0, True, None)]


def test_prefill_falls_back_to_the_workers_flag_and_else_is_unknown():
    """Without steps the worker's own flag tells the backend; without either it is null, and so is an unknown hit."""
    worker = {"worker": "w", "at_ns": 5 * S, "flags": {"attention_backend": "TORCH_SDPA"}}
    assert rows_of("evidence_prefill", request=[request()], worker=[worker])[0]["attention_backend"] == "TORCH_SDPA"
    bare = rows_of("evidence_prefill", request=[request()])[0]
    assert bare["attention_backend"] is None
    assert bare["prompt_cache_hit"] is None


def test_kv_watermark_joins_reuse_of_the_minute_and_the_workers_facts():
    """48 of 64 blocks; 30 of 100 prompt tokens reused in the step's minute; bytes from blocks where not reported."""
    found = rows_of(
        "evidence_kv_watermark",
        "block_usage",
        step=[step(5, blocks_total=64, blocks_used=48, blocks_evicted=3), step(70, blocks_total=64, blocks_used=64)],
        request=[
            request(prompt_tokens=60, cached_tokens=30),
            request(prompt_tokens=60, cached_tokens=30) | {"vantage": "client"},
            request(prompt_tokens=40, cached_tokens=0, request_id="s"),
        ],
        worker=[
            {"worker": "w", "at_ns": 50 * S, "max_context": 4096, "kv_bytes_per_block": 1024},
            {"worker": "w", "at_ns": 60 * S, "max_context": 8192},
        ],
    )
    assert found == [
        {
            "kv_cache_bytes": 48 * 1024,
            "block_usage": 0.75,
            "eviction_count": 3,
            "reuse_rate": 0.3,
            "max_context": 4096,
        },
        {
            "kv_cache_bytes": 64 * 1024,
            "block_usage": 1.0,
            "eviction_count": None,
            "reuse_rate": None,
            "max_context": 8192,
        },
    ]


def test_batch_names_the_classes_admitted_in_the_step():
    """Two requests first scheduled within step 3 give its classes; step 4 admitted nobody."""
    found = rows_of(
        "evidence_batch",
        "active_sequences",
        step=[
            step(3, num_running=2, num_waiting_prefill=4, num_waiting_decode=1, batch_size=2, policy="fcfs"),
            step(4, num_running=3, num_waiting_prefill=4),
        ],
        request=[
            request(first_scheduled_ns=5 * S // 2, priority_class="high"),
            request(first_scheduled_ns=11 * S // 4, priority_class="batch"),
        ],
    )
    assert [tuple(row.values()) for row in found] == [(2, 2, 5, "batch,high", "fcfs"), (None, 3, 4, None, None)]


def test_decode_counts_each_request_once():
    """20 tokens over 1.9 s are 10 tokens/s; the client's row of the same request is left out, a lone one is not."""
    decoded = {"output_tokens": 20, "first_token_ns": 0, "last_token_ns": 19 * S // 10}
    found = rows_of(
        "evidence_decode",
        "tokens_per_second",
        request=[
            request(**decoded, decode_s=1.9, draft_tokens=40, accepted_tokens=10),
            request(**decoded) | {"vantage": "client"},
            request(request_id="outside", output_tokens=2, first_token_ns=0, last_token_ns=S) | {"vantage": "client"},
        ],
    )
    assert [tuple(row.values()) for row in found] == [(2, 1.0, None, None), (20, pytest.approx(10.0), 1900.0, 0.25)]


def test_cost_joins_worker_step_sample_and_the_other_vantages():
    """GPU and pool from the worker, use from its last step before the end, the bill from the client's row."""
    found = rows_of(
        "evidence_cost",
        request=[request(), request(billable_units=2.5, cost_center="team-a") | {"vantage": "client"}],
        worker=[{"worker": "w", "at_ns": 0, "gpu_id": "gpu-3"}, {"worker": "w", "at_ns": S, "pool": "east"}],
        step=[step(8, gpu_util=0.9), step(10, gpu_util=0.1)],
    )
    assert found == [
        {
            "gpu_id": "gpu-3",
            "pool": "east",
            "gpu_util": 0.9,
            "memory_util": None,
            "billable_units": 2.5,
            "cost_center": "team-a",
        }
    ]


def test_cost_takes_a_scraped_utilisation_where_steps_have_none():
    """The sample `gpu_util` before the end of the request stands in."""
    sample = {"worker": "w", "at_ns": 2 * S, "name": "gpu_util", "value": 0.5}
    assert rows_of("evidence_cost", request=[request()], sample=[sample])[0]["gpu_util"] == 0.5


def test_lineage_collects_ids_from_every_vantage():
    """The engine's row gets route and trace from the router's, the version from its worker; runs do not mix."""
    found = rows_of(
        "evidence_lineage",
        request=[
            request(generation_id="g"),
            request(route_id="route-7", trace_id="t" * 32) | {"vantage": "router"},
            request(route_id="foreign") | {"vantage": "router", "run_id": "other", "request_id": "s"},
        ],
        worker=[{"worker": "w", "at_ns": 0, "engine_version": "0.32.0"}],
    )
    assert sorted(tuple(row.values()) for row in found) == [
        ("r", "g", "route-7", "0.32.0", "t" * 32),
        ("s", None, "foreign", None, None),
    ]


def test_checks_go_to_their_views():
    """Each check shows in its own view; a leakage result joins the positions of its batch."""

    def check(what, **facts):
        return {"worker": "w", "at_ns": S, "check": what, "outcome": "passed", "batch_id": "b"} | facts

    checks = [
        check("sample_boundary", sample_ids=["a", "b"], segment_ids=[0, 1], eos_policy="each"),
        check("mask", attention_mask_hash=2**64 - 1, causal_mask_mode="block", ignore_index=-100),
        check("position", position_ids_strategy="restart"),
        check("leakage", leakage_test_result="none"),
        check("leakage", leakage_test_result="found", batch_id="c"),
    ]
    assert rows_of("evidence_sample_boundary", check=checks)[0]["sample_ids"] == ["a", "b"]
    assert rows_of("evidence_mask_integrity", check=checks) == [
        {
            "attention_mask_hash": 2**64 - 1,
            "causal_mask_mode": "block",
            "loss_mask_hash": None,
            "ignore_index": -100,
        }
    ]
    positions = rows_of("evidence_position", "leakage_test_result", check=checks)
    assert [(row["position_ids_strategy"], row["leakage_test_result"]) for row in positions] == [
        (None, "found"),
        ("restart", "none"),
    ]
