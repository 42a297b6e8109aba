"""Text Generation Inference, v2 and v3: its page, `/info`, its request log, and the timing headers of its answers.

TGI tells no time to first token, no KV usage and no prefix cache: its queue, its batch and the whole of inference are
what can be seen. Its counters have no `_total` on the wire; `tgi_request_failure` counts what was refused as well.
Source: reference section 8; huggingface/text-generation-inference `router/src/server.rs` (2026-01).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, LogReader, Surroundings
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.tgi_provides import PROVIDES

ENGINE: Final = "tgi"

CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    "requests_running": ("batch_current_size",),
    "requests_waiting": ("queue_size",),
    "requests_finished_total": ("request_success",),
    "requests_failed_total": ("request_failure",),
}
ALSO: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "prompt_tokens_total": (("request_input_length_sum",),),
    "output_tokens_total": (("request_generated_tokens_sum",),),
}
HISTOGRAMS: Final[dict[str, tuple[str, ...]]] = {
    "time_per_output_token_seconds": ("request_mean_time_per_token_duration",),
    "request_latency_seconds": ("request_duration",),
    "queue_time_seconds": ("request_queue_duration",),
    "inference_time_seconds": ("request_inference_duration",),
    "request_prompt_tokens": ("request_input_length",),
    "request_output_tokens": ("request_generated_tokens",),
}

NAMES: Final = MetricNames(ENGINE, ("tgi_",), CANONICAL, HISTOGRAMS, also=ALSO)

SAFE_FLAGS: Final = (
    "max_concurrent_requests",
    "max_input_tokens",
    "max_input_length",
    "max_total_tokens",
    "max_batch_total_tokens",
    "max_batch_size",
    "max_waiting_tokens",
    "waiting_served_ratio",
    "max_client_batch_size",
    "validation_workers",
    "model_device_type",
)


TIMINGS: Final = ("x-validation-time", "x-queue-time", "x-prompt-tokens", "x-generated-tokens")


def timing_columns(headers: Mapping[str, str]) -> dict[str, Any]:
    """`request` columns told by the headers of an answer that was not streamed (names in lower case); whole milliseconds.

    x-validation-time runs from arrival to the queue (tokenisation lies in it), x-queue-time to the first batch,
    x-inference-time to the end: prefill and decode are not told apart.
    """
    found = {
        "frontend_s": _milliseconds(headers.get("x-validation-time")),
        "queue_s": _milliseconds(headers.get("x-queue-time")),
        "prompt_tokens": _count(headers.get("x-prompt-tokens")),
        "output_tokens": _count(headers.get("x-generated-tokens")),
    }
    return {key: value for key, value in found.items() if value is not None}


class TgiAdapter(Adapter):
    """text-generation-inference's router with its one model."""

    engine = ENGINE
    title = "TGI"
    tables = (NAMES,)
    provides = PROVIDES
    guide = "docs/engines/tgi.md"

    def discover(self, client: Client, page: Page) -> Discovery:
        info = client.json("/info")
        info = info if isinstance(info, dict) else {}
        version, model, most = info.get("version"), info.get("model_id"), info.get("max_total_tokens")
        return Discovery(
            version=version if isinstance(version, str) else None,
            models=[model] if isinstance(model, str) else [],
            max_context=most if type(most) is int and most > 0 else None,
            kv_sources={},
            series=frozenset(page.names()),
            ranks=["0"],
            details=info,
        )

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        info = seen.details
        kind = info.get("model_dtype")
        flags = {key: str(info[key]) for key in SAFE_FLAGS if info.get(key) is not None}
        for series, value, _ in page.samples:
            if NAMES.bare(series.name) == "batch_max_total_tokens" and value > 0:  # v3: the token budget it measured
                flags["max_batch_total_tokens"] = str(int(value))
        facts = {**self.common_facts(seen), "role": "mixed", "flags": flags}
        facts["dtype"] = kind.removeprefix("torch.") if isinstance(kind, str) else None
        return {"0": facts}

    def open_sources(self, seen: Discovery) -> tuple[str, ...]:
        return ("metrics", "info") if seen.details else ("metrics",)

    def log_reader(self, worker: str) -> LogReader:
        from engine_probe.adapters.tgi_log import TgiLog

        return TgiLog(worker)

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        told = around.log_path is not None and around.log_error is None
        text = "queue and inference of each, from its log; first tokens are not told"
        if not told:
            text = around.log_error or (
                "only counters and histograms. For one row a request: give --log FILE with TGI's output (--json-output), "
                "or record them with kvscope proxy"
            )
        return [
            self.metrics_line(seen, around),
            Line("requests", told, text),
            Line("steps", False, "TGI tells of batches in sums only: what a queue waits for is not observable"),
            Line("blocks", False, "TGI tells neither KV usage nor what its prefix cache holds"),
        ]


def _milliseconds(text: str | None) -> float | None:
    value = _count(text)
    return None if value is None else value / 1e3


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 13 else None
