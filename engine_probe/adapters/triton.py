"""Triton Inference Server with the TensorRT-LLM backend: its page on port 8002, gauges of the batch manager.

The page tells of load and of KV blocks, all of it as gauges; it has neither requests nor tokens nor a hit rate. Triton's
own `nv_inference_*` counters stand beside it, one set a model of the ensemble, and keep their names. Source: reference
section 7; triton-inference-server/tensorrtllm_backend README (2026-07).
"""

from __future__ import annotations

from typing import Any, Final

from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, Surroundings
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.provides import Provides, names

ENGINE: Final = "triton-trtllm"
BLOCKS: Final = "kv_cache_block_metrics"

CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    "requests_running": ("request_metrics{request_type=scheduled}",),
    "requests_waiting": ("request_metrics{request_type=waiting}",),
    "kv_usage_ratio": ("kv_cache_block_metrics{kv_cache_block_type=fraction}",),
}

NAMES: Final = MetricNames(ENGINE, ("nv_trt_llm_",), CANONICAL)

METRICS: Final = Provides(
    engine=ENGINE,
    source="metrics",
    needs="nothing (`--allow-metrics=false` closes it); the page is on `--metrics-port` (8002)",
    names=names(
        """sample: worker at_ns name labels value requests_running requests_waiting kv_usage_ratio
        worker: worker at_ns engine model block_size num_blocks flags
        mark: worker at_ns mark subject text attrs"""
    ),
    caveats={"sample.requests_running": "requests of the last scheduled batch"},
)
CLIENT: Final = Provides(
    engine=ENGINE,
    source="client",
    needs="a client or load generator that keeps what it saw",
    names=names(
        """request: worker at_ns request_id vantage state engine model labels arrival_ns first_token_ns last_token_ns
        end_ns token_ns token_counts output_tokens http_status error"""
    ),
)


class TritonAdapter(Adapter):
    """Triton's page where a TensorRT-LLM model is among its models."""

    engine = ENGINE
    title = "Triton with TensorRT-LLM"
    tables = (NAMES,)
    provides = (METRICS, CLIENT)
    guide = "docs/engines/trtllm.md"

    def discover(self, client: Client, page: Page) -> Discovery:
        models = {s.series.labels.get("model") for s in page.samples if NAMES.bare(s.series.name) == BLOCKS}
        return Discovery(
            models=sorted(model for model in models if model),
            kv_sources={},
            series=frozenset(page.names()),
            ranks=["0"],
        )

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        """Geometry of the one TensorRT-LLM model; several models have several caches, and then it is unknown."""
        facts: dict[str, Any] = {"engine": ENGINE, "model": seen.models[0] if seen.models else None, "flags": {}}
        for series, value, _ in page.samples:
            if NAMES.bare(series.name) == BLOCKS and len(seen.models) < 2 and value > 0:
                column = {"tokens_per": "block_size", "max": "num_blocks"}.get(
                    series.labels.get("kv_cache_block_type", "")
                )
                if column is not None:
                    facts[column] = int(value)
        return {"0": facts}

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        return [
            self.metrics_line(seen, around),
            Line("requests", False, "Triton tells of no single request: record them at its clients"),
            Line("steps", False, "only the newest batch, when it is asked; `trtllm-serve` tells of every iteration"),
            Line("blocks", False, "no block events here; `trtllm-serve` has them"),
        ]
