"""The ways in: `/v1/events`, `/v1/traces` and `/v1/metrics`. Plain requests in, no model validation on the hot path."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from collector import problems
from collector.intake.ingest import MEDIA_TYPES
from collector.intake.otlp_answer import MEDIA_TYPES as TRACE_MEDIA_TYPES
from collector.intake.otlp_answer import PROTOBUF
from collector.services import services_of
from engine_probe.errors import (
    BadRequest,
    BatchRejected,
    BodyTimeout,
    DiskFull,
    InvalidRows,
    NotReady,
    OutOfMemory,
    StoreBusy,
    TooLarge,
    TooManyBatches,
    Unauthorized,
    UnknownFormat,
    WrongHost,
)
from engine_probe.wire.codec import ARROW_CONTENT_TYPE, JSON_CONTENT_TYPE, NDJSON_CONTENT_TYPE

router = APIRouter(tags=["ingest"])

_ERRORS: Final = (
    BadRequest,
    Unauthorized,
    WrongHost,
    BodyTimeout,
    TooLarge,
    UnknownFormat,
    InvalidRows,
    BatchRejected,
    TooManyBatches,
    StoreBusy,
    OutOfMemory,
    NotReady,
    DiskFull,
)

EXAMPLE_JSON: Final[dict[str, Any]] = {
    "source": "proxy-1",
    "epoch": "6f1f4d6e",
    "seq": 0,
    "sent_ns": 1764403200000000000,
    "events": {
        "request": [
            {
                "request_id": "a1",
                "vantage": "client",
                "state": "finished",
                "model": "llama-3-70b",
                "arrival_ns": 1764403195000000000,
                "first_token_ns": 1764403195250000000,
                "last_token_ns": 1764403196250000000,
                "at_ns": 1764403196250000000,
                "prompt_tokens": 900,
                "output_tokens": 41,
            }
        ]
    },
}
EXAMPLE_NDJSON: Final = (
    '{"source": "proxy-1", "epoch": "6f1f4d6e", "seq": 1, "sent_ns": 1764403201000000000}\n'
    '{"kind": "mark", "at_ns": 1764403200000000000, "mark": "deployed", "subject": "worker-0", "text": "v2 is out"}\n'
)
EXAMPLE_OTLP: Final[dict[str, Any]] = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "worker-0"}}]},
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "traceId": "5b8efff798038103d269b633813fc60c",
                            "spanId": "eee19b7ec3c1b174",
                            "name": "llm_request",
                            "startTimeUnixNano": "1764403195000000000",
                            "endTimeUnixNano": "1764403196250000000",
                            "attributes": [
                                {"key": "gen_ai.request.id", "value": {"stringValue": "cmpl-a1-0"}},
                                {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.25}},
                            ],
                        }
                    ]
                }
            ],
        }
    ]
}


EXAMPLE_OTLP_METRICS: Final[dict[str, Any]] = {
    "resourceMetrics": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "worker-0"}}]},
            "scopeMetrics": [
                {
                    "metrics": [
                        {
                            "name": "gen_ai.server.time_to_first_token",
                            "unit": "s",
                            "histogram": {
                                "aggregationTemporality": 2,
                                "dataPoints": [
                                    {
                                        "timeUnixNano": "1764403196250000000",
                                        "count": "3",
                                        "sum": 0.9,
                                        "explicitBounds": [0.25, 0.5],
                                        "bucketCounts": ["1", "2", "0"],
                                    }
                                ],
                            },
                        }
                    ]
                }
            ],
        }
    ]
}


class Accepted(BaseModel):
    """The batch is on disk."""

    accepted: dict[str, int] = Field(
        description="rows committed by kind; empty for a duplicate", examples=[{"request": 1}]
    )
    duplicate: bool = Field(description="the batch had been committed before under the same identity")
    received_ns: int = Field(description="the collector's clock when the request came, ns since 1970-01-01 UTC")
    ignored_columns: dict[str, int] | None = Field(
        None, description="columns that this contract does not know -> rows that carried them; absent where none"
    )


class PartialSuccess(BaseModel):
    """Spans that were left out, and why."""

    rejectedSpans: str
    errorMessage: str


class PartialMetrics(BaseModel):
    """Points that were left out, and why."""

    rejectedDataPoints: str
    errorMessage: str


class MetricsAccepted(BaseModel):
    """OTLP's ExportMetricsServiceResponse."""

    partialSuccess: PartialMetrics | None = None


class TracesAccepted(BaseModel):
    """OTLP's ExportTraceServiceResponse."""

    partialSuccess: PartialSuccess | None = None


def _header(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


_ENCODING: Final = _header(
    "Content-Encoding", "compression of the whole body", {"type": "string", "enum": ["identity", "gzip", "zstd"]}
)
_NUMBER: Final = {"type": "integer", "format": "int64", "minimum": 0}

_EVENTS_DOC: Final[dict[str, Any]] = {
    "parameters": [
        _header("Kvscope-Source", "who sends; with epoch and seq the batch is applied once", {"type": "string"}),
        _header("Kvscope-Epoch", "random id that the sender keeps in its spool", {"type": "string"}),
        _header("Kvscope-Seq", "number of the batch in its epoch, from 0; any order", _NUMBER),
        _header("Kvscope-Sent-Ns", "the sender's clock when it sent, for its clock offset", _NUMBER),
        _header("Idempotency-Key", "applies a batch without identity once", {"type": "string", "maxLength": 200}),
        _ENCODING,
    ],
    "requestBody": {
        "required": True,
        "content": {
            ARROW_CONTENT_TYPE: {
                "schema": {
                    "type": "string",
                    "format": "binary",
                    "description": "complete Arrow IPC streams one after another, each of one kind, with kvscope.kind "
                    "and kvscope.contract in the schema's metadata; buffers plain, lz4 or zstd",
                }
            },
            JSON_CONTENT_TYPE: {
                "schema": {
                    "type": "object",
                    "required": ["events"],
                    "properties": {
                        "source": {"type": "string"},
                        "epoch": {"type": "string"},
                        "seq": _NUMBER,
                        "sent_ns": _NUMBER,
                        "events": {
                            "type": "object",
                            "description": "kind -> rows; columns as in the event contract, absent means unknown",
                            "additionalProperties": {"type": "array", "items": {"type": "object"}},
                        },
                    },
                },
                "example": EXAMPLE_JSON,
            },
            NDJSON_CONTENT_TYPE: {
                "schema": {
                    "type": "string",
                    "description": "a header line (optional), then a row a line with its kind",
                },
                "example": EXAMPLE_NDJSON,
            },
        },
    },
}
_TRACES_DOC: Final[dict[str, Any]] = {
    "parameters": [_header("Kvscope-Source", "who sends; default otlp", {"type": "string"}), _ENCODING],
    "requestBody": {
        "required": True,
        "content": {
            PROTOBUF: {
                "schema": {"type": "string", "format": "binary", "description": "OTLP ExportTraceServiceRequest"}
            },
            JSON_CONTENT_TYPE: {
                "schema": {
                    "type": "object",
                    "required": ["resourceSpans"],
                    "properties": {"resourceSpans": {"type": "array", "items": {"type": "object"}}},
                },
                "example": EXAMPLE_OTLP,
            },
        },
    },
}
_METRICS_DOC: Final[dict[str, Any]] = {
    "parameters": [_header("Kvscope-Source", "who sends; default otlp", {"type": "string"}), _ENCODING],
    "requestBody": {
        "required": True,
        "content": {
            PROTOBUF: {
                "schema": {"type": "string", "format": "binary", "description": "OTLP ExportMetricsServiceRequest"}
            },
            JSON_CONTENT_TYPE: {
                "schema": {
                    "type": "object",
                    "required": ["resourceMetrics"],
                    "properties": {"resourceMetrics": {"type": "array", "items": {"type": "object"}}},
                },
                "example": EXAMPLE_OTLP_METRICS,
            },
        },
    },
}
assert tuple(_EVENTS_DOC["requestBody"]["content"]) == MEDIA_TYPES
assert tuple(_TRACES_DOC["requestBody"]["content"]) == TRACE_MEDIA_TYPES


@router.post(
    "/v1/events",
    summary="Store a batch of rows",
    response_class=Response,
    responses={200: {"model": Accepted, "description": "committed"}, **problems.responses(*_ERRORS)},
    openapi_extra=_EVENTS_DOC,
)
async def post_events(request: Request) -> Response:
    """200 once the batch is on disk. A batch with an identity is applied once: a repeat answers `duplicate: true`.

    Nothing of a batch is stored where any row is refused.
    """
    return await services_of(request).ingest.events(request)


@router.post(
    "/v1/traces",
    summary="Store OTLP spans",
    response_class=Response,
    responses={
        200: {
            "model": TracesAccepted,
            "description": "committed; spans that cannot be rows are told in partialSuccess",
            "content": {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}},
        },
        **problems.responses(*_ERRORS),
    },
    openapi_extra=_TRACES_DOC,
)
async def post_traces(request: Request) -> Response:
    """OTLP/HTTP, protobuf or JSON. Spans of requests become request rows, each span once: vLLM's own, and any SDK's
    that follow the GenAI conventions."""
    return await services_of(request).traces.export(request)


@router.post(
    "/v1/metrics",
    summary="Store OTLP metrics",
    response_class=Response,
    responses={
        200: {
            "model": MetricsAccepted,
            "description": "committed; points that cannot be rows are told in partialSuccess",
            "content": {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}},
        },
        **problems.responses(*_ERRORS),
    },
    openapi_extra=_METRICS_DOC,
)
async def post_metrics(request: Request) -> Response:
    """OTLP/HTTP, protobuf or JSON. Points become sample rows; deltas are added up, a repeated point counts once."""
    return await services_of(request).otlp_metrics.export(request)
