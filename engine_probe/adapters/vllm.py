"""vLLM 0.8 to 0.33 as seen on its `/metrics` page: wire names mapped to the contract's sample names.

Invariant: the presence of a series decides, never the version; where an old and a new name of one thing stand on the
same page (0.9 to 0.11, 0.24) the new one takes the canonical name and the old one keeps its own, so nothing is
counted twice. The name on the wire stays in `labels.wire`. Counters are stored as they are: a restart makes them
fall, and `deltas` is how to difference them. Source: reference sections 3, 4.3 to 4.5, 13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from engine_probe.adapters import lmcache
from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, LogReader, Surroundings, cards
from engine_probe.adapters.metric_names import SUFFIXES, MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.vllm_provides import PROVIDES

ENGINE: Final = "vllm"
PLUGIN_INFO: Final = "kvscope_plugin_info"
OWN_INFO: Final = "kvscope_engine_info"
"""On the page of kvscope's own engine, which shows vLLM's names beside its own (docs/engine-server.md)."""

CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_queries_tokens_total": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    "prefix_hits_tokens_total": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
    "external_queries_tokens_total": ("external_prefix_cache_queries_total",),
    "external_hits_tokens_total": ("external_prefix_cache_hits_total",),
    "preemptions_total": ("num_preemptions_total",),
    "prompt_tokens_total": ("prompt_tokens_total",),
    "prompt_tokens_computed_total": ("prompt_tokens_by_source_total{source=local_compute}",),
    "prompt_tokens_cached_total": ("prompt_tokens_cached_total",),
    "output_tokens_total": ("generation_tokens_total",),
    "draft_tokens_total": ("spec_decode_num_draft_tokens_total",),
    "accepted_tokens_total": ("spec_decode_num_accepted_tokens_total",),
    "requests_finished_total": ("request_success_total{finished_reason=stop|length|repetition}",),
    "requests_failed_total": ("request_success_total{finished_reason=abort|error}",),
    "tier_read_bytes_total": ("kv_offload_load_bytes_total", "kv_offload_total_bytes_total{transfer_type=CPU_to_GPU}"),
    "tier_written_bytes_total": (
        "kv_offload_store_bytes_total",
        "kv_offload_total_bytes_total{transfer_type=GPU_to_CPU}",
    ),
}
"""Canonical name -> wire names without prefix, newest first; `{label=a|b}` takes only those label values.

vLLM's `request_success` counts every end, aborts and errors too: finished and failed are kept apart here.
`blocks_evicted_total` is not on vLLM's page: it is the number of `evicted` block rows (KV events)."""

HISTOGRAMS: Final[dict[str, tuple[str, ...]]] = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    # Until 0.18 the gap between two outputs was called time per output token; since 0.11 that is the request's mean.
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "request_latency_seconds": ("e2e_request_latency_seconds",),
    "queue_time_seconds": ("request_queue_time_seconds",),
    "prefill_time_seconds": ("request_prefill_time_seconds",),
    "decode_time_seconds": ("request_decode_time_seconds",),
    "inference_time_seconds": ("request_inference_time_seconds",),
    "step_tokens": ("iteration_tokens_total",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_output_tokens": ("request_generation_tokens",),
    "request_computed_tokens": ("request_prefill_kv_computed_tokens",),
    "request_preemptions": ("request_num_preemptions",),
    "block_lifetime_seconds": ("kv_block_lifetime_seconds",),
    "block_idle_before_evict_seconds": ("kv_block_idle_before_evict_seconds",),
    "block_reuse_gap_seconds": ("kv_block_reuse_gap_seconds",),
}
"""Families exposed as `_bucket` (with `le`), `_sum` and `_count`; canonical family -> wire families, newest first."""

KNOWN: Final = frozenset(
    [wire.partition("{")[0] for wires in CANONICAL.values() for wire in wires]
    + [wire + suffix for wires in HISTOGRAMS.values() for wire in wires for suffix in SUFFIXES]
)
"""Wire names without prefix that are vLLM's own."""


_MADE_ID: Final = re.compile(
    r"(?:chatcmpl-|cmpl-)([0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:-\d{1,7})?(?:-[0-9a-f]{8})?"
    r"|cmpl-(.+)-[0-9]+|(?:chat)?cmpl-(.*)",
    re.DOTALL,
)
"""An engine's id that is made from a UUID (with dashes or without), which is what most clients send and kvscope makes;
else from another id. The first way that fits counts."""


def worker_name(worker: str, rank: int | str | None) -> str:
    """Name of one data-parallel rank (one scheduler, one KV cache) of `worker`; rank 0 keeps the plain name."""
    text = "" if rank is None else str(rank)
    return worker if text in ("", "0") else f"{worker}/dp{text}"


def normalise_request_id(engine_id: str) -> str:
    """The id that the client sent as X-Request-Id: `cmpl-abc-0`, `chatcmpl-abc` -> `abc`. Other ids stay as they are.

    Completions get `-<n>` appended for the n-th prompt of a call, chat completions do not (reference 4.1). Since 0.33 the
    id inside the engine has 8 random digits more; they are told from the client's own where that is a UUID.
    """
    made = _MADE_ID.fullmatch(engine_id)
    return engine_id if made is None else made[made.lastindex or 0]


def worker_of(worker: str | None, labels: Mapping[str, str]) -> str | None:
    """The rank that a series speaks of."""
    return None if worker is None else worker_name(worker, labels.get("engine"))


NAMES: Final = MetricNames(ENGINE, ("vllm:", "vllm_"), CANONICAL, HISTOGRAMS, worker_of=worker_of)
OWN_NAMES: Final = MetricNames(
    "kvscope",
    ("kvscope_engine_",),
    {"blocks_evicted_total": ("kv_block_evictions_total",)},
    worker_of=worker_of,
)
"""kvscope's own engine counts what vLLM's page does not tell."""


class VllmAdapter(Adapter):
    """vLLM, one API server with one or more data-parallel ranks."""

    engine = ENGINE
    title = "vLLM"
    tables = (NAMES, lmcache.NAMES, OWN_NAMES)
    provides = PROVIDES
    guide = "docs/attach-vllm.md"

    def recognises(self, page: Page) -> bool:
        return any(
            wire is not None
            and ("engine" in series.labels or wire == "cache_config_info" or "server" not in series.labels)
            and (wire in KNOWN or wire == "cache_config_info")
            for series, _, _ in page.samples
            for wire in (NAMES.bare(series.name),)
        )

    def discover(self, client: Client, page: Page) -> Discovery:
        version, sources = client.json("/version"), client.json("/kv_event_sources")
        models = cards(client.json("/v1/models"))
        contexts = [card["max_model_len"] for card in models if isinstance(card.get("max_model_len"), int)]
        configs = cache_config(page)
        return Discovery(
            version=str(version["version"]) if isinstance(version, dict) and "version" in version else None,
            models=[card["id"] for card in models if card.get("parent") is None],
            max_context=contexts[0] if contexts else None,
            kv_sources=sources if isinstance(sources, dict) else None,
            series=frozenset(page.names()),
            ranks=sorted(configs, key=lambda rank: (len(rank), rank)),
            prefix_caching=next((cache_config_facts(labels)["prefix_caching"] for labels in configs.values()), None),
            plugin_worker=_plugin_worker(page),
        )

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        common = {key: value for key, value in self.common_facts(seen).items() if value is not None}
        if len(seen.ranks) > 1:
            common["dp"] = len(seen.ranks)
        if OWN_INFO in seen.series:
            common["engine"] = "kvscope"
        configs = cache_config(page)
        if not configs:
            return {"0": {**common, "flags": {}}}
        return {
            rank: cache_config_facts(labels, max(len(seen.ranks), len(configs))) | common
            for rank, labels in configs.items()
        }

    def rank_worker(self, worker: str, rank: str) -> str:
        return worker_name(worker, rank)

    def open_sources(self, seen: Discovery) -> tuple[str, ...]:
        found = ["metrics"] if seen.series else []
        if seen.plugin_worker is not None:
            found.append("plugin")
        if seen.kv_sources and seen.prefix_caching is not False:
            found.append("kv_events")
        return tuple(found)

    def log_reader(self, worker: str) -> LogReader:
        from engine_probe.adapters.geometry import StartupLog
        from engine_probe.adapters.lmcache_log import BesideEngine, LmcacheLog

        return BesideEngine(StartupLog(), LmcacheLog(worker))

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        from engine_probe.adapters.vllm_sight import describe

        return [self.metrics_line(seen, around), *describe(seen, around)]


def cache_config(page: Page) -> dict[str, Mapping[str, str]]:
    """Labels of `vllm:cache_config_info` by data-parallel rank ("0", "1", ...); empty where the page has none."""
    found = {}
    for series, _, _ in page.samples:
        if series.name in ("vllm:cache_config_info", "vllm_cache_config_info"):
            found[series.labels.get("engine", "0")] = series.labels
    return found


def cache_config_facts(labels: Mapping[str, str], num_ranks: int = 1) -> dict[str, Any]:
    """`worker` columns told by cache_config_info: block_size, num_blocks, kv_dtype, prefix_caching and `flags`.

    num_ranks  data-parallel ranks on the page: each shows the sum of all ranks' blocks (vLLM adds them up at start)
    One block a rank is the null block: usable num_blocks = num_gpu_blocks / num_ranks - 1. "None" is unknown.
    """
    flags = {
        key: value for key, value in labels.items() if value != "None" and key not in ("engine", "model_name", "pid")
    }
    num_gpu_blocks = _integer(labels.get("num_gpu_blocks"))
    if num_gpu_blocks is not None:
        num_gpu_blocks = num_gpu_blocks // num_ranks if num_gpu_blocks % num_ranks == 0 else None
    facts: dict[str, Any] = {
        "engine": ENGINE,
        "model": labels.get("model_name"),
        "block_size": _integer(labels.get("block_size")),
        "num_blocks": None if num_gpu_blocks is None else max(num_gpu_blocks - 1, 0),
        "kv_dtype": None if labels.get("cache_dtype") in (None, "auto", "None") else labels["cache_dtype"],
        "prefix_caching": _boolean(labels.get("enable_prefix_caching")),
        "flags": flags,
    }
    return facts


def _plugin_worker(page: Page) -> str | None:
    """The name under which the plugin inside the engine reports; it tells that of one rank, `worker_name(base, rank)`."""
    told = [s.series.labels for s in page.samples if s.series.name == PLUGIN_INFO]
    first: Mapping[str, str] = min(told, key=lambda labels: labels.get("engine", ""), default={})
    worker = first.get("worker")
    return None if worker is None else worker.removesuffix(worker_name("", first.get("engine")))


def _integer(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _boolean(text: str | None) -> bool | None:
    return {"True": True, "true": True, "False": False, "false": False}.get(text or "")
