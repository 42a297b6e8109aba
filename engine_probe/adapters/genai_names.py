"""Metrics by OpenTelemetry's GenAI conventions as tables of names, spelled as Prometheus spells them.

`gen_ai.server.*` is what a server says of itself and takes the canonical names; `gen_ai.client.*` is what applications
saw, whose service is no worker, and stands under `client_*` beside them, so that the two vantages are never added up.
A histogram of tokens is split by its label `gen_ai_token_type`. Source: reference 15; semantic-conventions-genai
`docs/gen-ai/gen-ai-metrics.md`, `client-inference.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from engine_probe.adapters.metric_names import SUFFIXES, Labels, MetricNames


def _application(worker: str | None, labels: Labels) -> str | None:
    """What applications saw is no engine instance's: nobody's where labels name the application, as OTLP's resource does.

    On a page that was scraped nothing names it but who was scraped.
    """
    return None if "service" in labels or "instance" in labels else worker


def _split(canonical: str, wire: str, label: str, value: str) -> Mapping[str, tuple[str, ...]]:
    """A family that is one of several in a wire family, told apart by a label."""
    return {canonical + suffix: (f"{wire}{suffix}{{{label}={value}}}",) for suffix in SUFFIXES}


SERVER: Final = MetricNames(
    "genai",
    ("gen_ai_server_",),
    canonical={},
    histograms={
        "request_latency_seconds": ("request_duration_seconds",),
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "time_per_output_token_seconds": ("time_per_output_token_seconds",),
    },
)
CLIENT: Final = MetricNames(
    "genai",
    ("gen_ai_client_",),
    canonical={
        **_split("client_request_prompt_tokens", "token_usage", "gen_ai_token_type", "input"),
        **_split("client_request_output_tokens", "token_usage", "gen_ai_token_type", "output|completion"),
        "client_prompt_tokens_total": ("inference_usage_input_tokens_total",),
        "client_output_tokens_total": ("inference_usage_output_tokens_total",),
        "client_cached_tokens_total": ("inference_usage_cache_read_input_tokens_total",),
    },
    histograms={
        "client_request_latency_seconds": ("inference_duration_seconds", "operation_duration_seconds"),
        "client_time_to_first_token_seconds": (
            "inference_time_to_first_chunk_seconds",
            "operation_time_to_first_chunk_seconds",
        ),
        "client_time_per_output_chunk_seconds": (
            "inference_time_per_output_chunk_seconds",
            "operation_time_per_output_chunk_seconds",
        ),
    },
    worker_of=_application,
)
TABLES: Final = (SERVER, CLIENT)
