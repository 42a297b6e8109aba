"""Rows of the benchmarks, seeded: the reference request row, narrow block events, scalar events, OTLP spans.

The reference row is that of design section 11: 45 scalar columns, 200 token instants, 128 block hashes, 4 spans.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from engine_probe.schema import arrow_schema

START_NS = 1_764_403_200_000_000_000
TOKENS, BLOCKS, SPANS = 200, 128, 4
_WORDS = {
    "vantage": "engine",
    "state": "finished",
    "engine": "vllm",
    "model": "llama-3-70b",
    "tenant": "acme",
    "workload": "interactive",
    "priority_class": "normal",
    "finish_reason": "stop",
    "cost_center": "cc-42",
}
_DURATIONS = (
    *("frontend", "tokenize", "queue", "cache_lookup", "alloc", "prefill"),
    *("first_sample", "decode", "stalled", "postprocess", "tail", "unexplained"),
)
_COUNTS = (
    *("prompt_tokens", "cached_tokens", "cached_tokens_device", "computed_tokens", "recomputed_tokens"),
    *("output_tokens", "num_preemptions", "prefill_chunks", "http_status"),
)


def requests(count: int, seed: int = 0) -> pa.Table:
    """`count` reference rows, full schema of `request`."""
    rng = np.random.default_rng(seed)
    arrival = START_NS + np.arange(count) * 1_000_000
    tokens = arrival[:, None] + np.cumsum(rng.integers(5_000_000, 30_000_000, (count, TOKENS)), axis=1)
    columns: dict[str, Any] = {name: [word] * count for name, word in _WORDS.items()}
    columns |= {
        "worker": [f"worker-{i % 8}" for i in range(count)],
        "request_id": [f"req-{seed:08x}-{i:024x}" for i in range(count)],
        "route_id": [f"route-{i:016x}" for i in range(count)],
        "trace_id": [f"{seed:08x}{i * 7919:024x}" for i in range(count)],
        "session_id": [f"session-{i // 5:08x}" for i in range(count)],
        "turn": np.arange(count) % 5,
        "attempt": np.zeros(count, np.int64),
        "arrival_ns": arrival,
        "first_scheduled_ns": arrival + 1_000_000,
        "first_token_ns": tokens[:, 0],
        "last_token_ns": tokens[:, -1],
        "end_ns": tokens[:, -1] + 1_000_000,
        "at_ns": tokens[:, -1] + 1_000_000,
        "token_ns": _lists(tokens, pa.int64()),
        "prefix_hash": rng.integers(0, 2**63, count).astype(np.uint64),
        "billable_units": rng.random(count),
        "prompt_blocks": _lists(rng.integers(0, 2**63, (count, BLOCKS)).astype(np.uint64), pa.uint64()),
    }
    columns |= {f"{phase}_s": rng.random(count) * 0.1 for phase in _DURATIONS}
    columns |= {name: rng.integers(100, 600, count) for name in _COUNTS}
    schema = arrow_schema("request")
    starts = np.repeat(arrival, SPANS) + np.tile(np.arange(SPANS) * 1_000_000_000, count)
    spans = pa.StructArray.from_arrays(
        [
            pa.array(["queue", "prefill", "decode", "tail"] * count),
            pa.array(starts),
            pa.array(starts + 1_000_000_000),
            pa.array(rng.integers(0, 500, SPANS * count)),
        ],
        fields=list(schema.field("spans").type.value_type),
    )
    columns["spans"] = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * SPANS), spans)
    return _table("request", columns, count)


def blocks(count: int, seed: int = 0) -> pa.Table:
    """`count` narrow block events: what happened, to which block, where."""
    rng = np.random.default_rng(seed)
    return _table(
        "block",
        {
            "worker": ["worker-0"] * count,
            "at_ns": START_NS + np.arange(count) * 1_000,
            "change": np.array(["stored", "evicted", "hit"])[np.arange(count) % 3],
            "block_hash": rng.integers(0, 2**63, count).astype(np.uint64),
            "num_tokens": np.full(count, 16),
            "tier": ["device"] * count,
        },
        count,
    )


def scalar_events(count: int) -> list[dict[str, Any]]:
    """`count` step rows as a JSON sender would write them: ten scalar columns."""
    return [
        {
            "worker": "worker-0",
            "at_ns": START_NS + i * 10_000_000,
            "step": i,
            "duration_s": 0.01,
            "num_running": 32 + i % 7,
            "num_waiting_prefill": i % 3,
            "prefill_tokens": 512,
            "decode_tokens": 32,
            "blocks_total": 4096,
            "blocks_used": 2048 + i % 64,
        }
        for i in range(count)
    ]


def spans(count: int, seed: int) -> bytes:
    """`count` vLLM request spans as one OTLP protobuf body."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    rng = np.random.default_rng(seed)
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    service = resource.resource.attributes.add()
    service.key, service.value.string_value = "service.name", "worker-0"
    scope = resource.scope_spans.add()
    for i in range(count):
        span = scope.spans.add()
        span.name = "llm_request"
        span.trace_id, span.span_id = rng.bytes(16), rng.bytes(8)
        span.start_time_unix_nano = START_NS + (seed * count + i) * 1_000_000
        span.end_time_unix_nano = span.start_time_unix_nano + 2_000_000_000
        _attribute(span, "gen_ai.request.id", f"cmpl-{seed}-{i}-0")
        _attribute(span, "gen_ai.response.model", "llama-3-70b")
        for name, value in (("prompt_tokens", 512), ("completion_tokens", 128)):
            _attribute(span, f"gen_ai.usage.{name}", value)
        for name, seconds in (
            ("time_to_first_token", 0.25),
            ("time_in_queue", 0.05),
            ("time_in_model_prefill", 0.15),
            ("time_in_model_decode", 1.7),
            ("e2e", 2.0),
        ):
            _attribute(span, f"gen_ai.latency.{name}", seconds)
    body: bytes = request.SerializeToString()
    return body


def _attribute(span: Any, key: str, value: str | float) -> None:
    pair = span.attributes.add()
    pair.key = key
    if isinstance(value, str):
        pair.value.string_value = value
    elif isinstance(value, int):
        pair.value.int_value = value
    else:
        pair.value.double_value = value


def _lists(values: np.ndarray[Any, Any], type_: pa.DataType) -> pa.ListArray:
    rows, width = values.shape
    return pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * width, pa.array(values.ravel(), type_))


def _table(kind: str, columns: dict[str, Any], count: int) -> pa.Table:
    schema = arrow_schema(kind)
    arrays = [
        pa.nulls(count, field.type)
        if field.name not in columns
        else columns[field.name]
        if isinstance(columns[field.name], pa.Array)
        else pa.array(columns[field.name], field.type)
        for field in schema
    ]
    return pa.table(arrays, schema=schema)
