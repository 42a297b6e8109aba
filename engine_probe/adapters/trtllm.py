"""TensorRT-LLM's own server (`trtllm-serve`): its Prometheus page, and endpoints that hand out what they tell once.

The server keeps its iteration records in one queue. With `return_perf_metrics` it reads the queue itself to feed its
Prometheus page; without it `/metrics` (JSON) is the only reader. So the JSON is asked only where the Prometheus page is
absent: whoever asks takes the records away from everybody else. `/perf_metrics` and `/kv_cache_events` drain too, and
are asked from one place. Invariant: what another reader took is a gap, never a number. Source: reference section 7;
TensorRT-LLM `serve/openai_server.py`, `metrics/collector.py` (2026).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, Poll, Surroundings, cards
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page, PageParser, Sample, Series
from engine_probe.adapters.trtllm_provides import PROVIDES
from engine_probe.errors import UnknownFormat
from engine_probe.sampling import Sampling

ENGINE: Final = "trtllm"
ITERATIONS: Final = "/metrics"
REQUESTS: Final = "/perf_metrics"
EVENTS: Final = "/kv_cache_events"
UP: Final = "trtllm_up"
"""The one series of a page that is made here, where the server has no Prometheus page but answers."""
_UP_SERIES: Final = Series(UP, {})

CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_usage_ratio": ("kv_cache_utilization",),
    "prompt_tokens_total": ("prompt_tokens_total",),
    "prompt_tokens_cached_total": ("prompt_cached_tokens_total",),
    "output_tokens_total": ("generation_tokens_total",),
    "requests_finished_total": ("request_success_total{finished_reason=stop|length}",),
    "requests_failed_total": ("request_success_total{finished_reason=timeout|cancelled|canceled}",),
    "tier_read_bytes_total": ("kv_cache_onboard_bytes_total",),
    "tier_written_bytes_total": ("kv_cache_offload_bytes_total",),
}
"""`kv_cache_reused_blocks_total` and its like count blocks, some of them reused in part, and keep their names."""

ALSO: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "prefix_queries_tokens_total": (("prompt_tokens_total",),),
    "prefix_hits_tokens_total": (("prompt_cached_tokens_total",),),
}

HISTOGRAMS: Final[dict[str, tuple[str, ...]]] = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "time_per_output_token_seconds": ("time_per_output_token_seconds",),
    "request_latency_seconds": ("e2e_request_latency_seconds",),
    "queue_time_seconds": ("request_queue_time_seconds",),
    "prefill_time_seconds": ("request_prefill_time_seconds",),
    "decode_time_seconds": ("request_decode_time_seconds",),
    "inference_time_seconds": ("request_inference_time_seconds",),
}

NAMES: Final = MetricNames(ENGINE, ("trtllm_",), CANONICAL, HISTOGRAMS, also=ALSO)


class TrtllmAdapter(Adapter):
    """trtllm-serve with the PyTorch or the TensorRT backend."""

    engine = ENGINE
    title = "TensorRT-LLM (trtllm-serve)"
    tables = (NAMES,)
    provides = PROVIDES
    metrics_path = "/prometheus/metrics"
    metrics_flag = "return_perf_metrics: true (or enable_iter_perf_stats: true) in its --config file"
    guide = "docs/engines/trtllm.md"

    def page(self, client: Client, parser: PageParser) -> Page:
        """The Prometheus page; where it is absent and this is trtllm-serve, a page that says so.

        Only a server that is not known to be trtllm-serve is asked for `/metrics`, so that nothing is drained here.
        """
        try:
            body, content_type = client.metrics(self.metrics_path)
            return parser.parse(body, content_type)
        except UnknownFormat:
            if steady_offset(client) is not None:
                return Page([Sample(_UP_SERIES, 1.0, None)], {}, {}, False)
        return parser.parse(*client.metrics(ITERATIONS, hint=self.page_hint()))

    def discover(self, client: Client, page: Page) -> Discovery:
        version = client.json("/version")
        has_page = not any(sample.series.name == UP for sample in page.samples)
        return Discovery(
            version=str(version["version"]) if isinstance(version, dict) and "version" in version else None,
            models=[card["id"] for card in cards(client.json("/v1/models"))],
            kv_sources={},
            series=frozenset(page.names()),
            ranks=["0"],
            prefix_caching=_reuses_blocks(page),
            details={"has_page": has_page, "steady_offset": steady_offset(client)},
        )

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        told = {key: value for key, value in self.common_facts(seen).items() if value is not None}
        return {"0": {**page_facts(page), **told}}

    def polls(self, seen: Discovery, worker: str, salt: bytes, sampling: Sampling) -> Sequence[Poll]:
        from engine_probe.adapters.trtllm_polls import EventPoll, IterationPoll, RequestPoll

        polls: list[Poll] = [EventPoll(worker, salt, sampling)]
        if seen.details.get("has_page"):
            polls.append(RequestPoll(worker, seen.details.get("steady_offset")))
        else:
            polls.append(IterationPoll(worker))
        return polls

    def open_sources(self, seen: Discovery) -> tuple[str, ...]:
        return ("metrics", "perf_metrics") if seen.details.get("has_page") else ("iterations",)

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        from engine_probe.adapters.trtllm_sight import describe

        return [self.metrics_line(seen, around), *describe(seen, around)]


def steady_offset(client: Client, clock: Any = time.time) -> float | None:
    """Wall clock minus the server's steady clock, s; None where it does not tell. Good to half of the way there and back."""
    sent = clock()
    told = client.json("/steady_clock_offset")
    received = clock()
    if not isinstance(told, dict):
        return None
    stamps = [told.get("receive_ts"), told.get("transmit_ts")]
    if not all(isinstance(stamp, int | float) and not isinstance(stamp, bool) for stamp in stamps):
        return None
    return float((sent - stamps[0] + received - stamps[1]) / 2)


def page_facts(page: Page) -> dict[str, Any]:
    """`worker` columns that the page tells: gauges of the KV cache and the info series of the configuration."""
    facts: dict[str, Any] = {}
    flags: dict[str, str] = {}
    for series, value, _ in page.samples:
        name, labels = NAMES.bare(series.name), series.labels
        if name == "kv_cache_tokens_per_block" and value > 0:
            facts["block_size"] = int(value)
        elif name == "kv_cache_max_blocks" and value > 0:
            facts["num_blocks"] = int(value)
        elif name == "kv_cache_config_info":
            facts["block_size"] = _integer(labels.get("page_size")) or facts.get("block_size")
            facts["kv_dtype"] = _kind(labels.get("cache_dtype") or labels.get("dtype"))
            flags |= _flags(labels, ("enable_block_reuse", "free_gpu_memory_fraction", "host_cache_size", "page_size"))
        elif name == "model_config_info":
            facts["dtype"] = _kind(labels.get("dtype"))
            flags |= _flags(labels, ("dtype", "quantization", "gpu_type", "max_seq_len", "max_batch_size"))
            facts["max_context"] = _integer(labels.get("max_seq_len"))
        elif name == "parallel_config_info":
            facts |= {key: _integer(labels.get(f"{key}_size")) for key in ("tp", "pp")}
            flags |= _flags(labels, ("tp_size", "pp_size", "ep_size", "enable_attention_dp"))
    return {key: value for key, value in facts.items() if value is not None} | {"engine": ENGINE, "flags": flags}


def _reuses_blocks(page: Page) -> bool | None:
    for series, _, _ in page.samples:
        if series.name == "trtllm_kv_cache_config_info":
            return {"true": True, "false": False}.get(series.labels.get("enable_block_reuse", "").lower())
    return None


def _flags(labels: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    return {key: labels[key] for key in wanted if labels.get(key) not in (None, "", "None")}


def _kind(text: str | None) -> str | None:
    return text.removeprefix("torch.") if text and text not in ("auto", "None") else None


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and 0 < len(text) < 16 else None
