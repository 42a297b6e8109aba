"""What an OTLP export is answered: empty, or how many of its items were refused, and why one of them was.

The same for spans and for data points but for the names; in the media type of the request. Source: OTLP 1.x,
"OTLP/HTTP Response", `partial_success`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from engine_probe.wire.codec import JSON_CONTENT_TYPE

if TYPE_CHECKING:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

PROTOBUF: Final = "application/x-protobuf"
MEDIA_TYPES: Final = (PROTOBUF, JSON_CONTENT_TYPE)
SOURCE: Final = "otlp"
"""Who sent it, where the sender does not say."""
MAX_REASON: Final = 300


def answer_of_spans(media_type: str, num_rejected: int, reason: str) -> bytes:
    """The body for `POST /v1/traces`."""
    if media_type == JSON_CONTENT_TYPE:
        return _json("rejectedSpans", num_rejected, reason)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    response = ExportTraceServiceResponse()
    if num_rejected:
        response.partial_success.rejected_spans = num_rejected
    return _protobuf(response, num_rejected, reason)


def answer_of_points(media_type: str, num_rejected: int, reason: str) -> bytes:
    """The body for `POST /v1/metrics`."""
    if media_type == JSON_CONTENT_TYPE:
        return _json("rejectedDataPoints", num_rejected, reason)
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

    response = ExportMetricsServiceResponse()
    if num_rejected:
        response.partial_success.rejected_data_points = num_rejected
    return _protobuf(response, num_rejected, reason)


def _json(rejected: str, num_rejected: int, reason: str) -> bytes:
    partial = {rejected: str(num_rejected), "errorMessage": reason[:MAX_REASON]}
    return msgspec.json.encode({"partialSuccess": partial} if num_rejected else {})


def _protobuf(
    response: ExportTraceServiceResponse | ExportMetricsServiceResponse, num_rejected: int, reason: str
) -> bytes:
    if num_rejected:
        response.partial_success.error_message = reason[:MAX_REASON]
    serialised: bytes = response.SerializeToString()
    return serialised
