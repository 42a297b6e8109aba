"""SGLang 0.4.10 to 0.5.23 as seen on its `/metrics` page and told by `/server_info`.

Invariant: the presence of a series decides, never the version. Series that the ranks of one tensor-parallel group
repeat are taken from the lowest rank; data-parallel ranks are workers of their own. SGLang makes many series at their
first use: one that is missing says nothing. Source: reference section 5; SGLang 0.4.10.post2, 0.5.10.post1, 0.5.18,
0.5.20, 0.5.23 `observability/metrics_collector.py`, `runtime_context.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engine_probe.adapters import lmcache
from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, LogReader, Surroundings, cards
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.sglang_provides import PROVIDES
from engine_probe.adapters.vllm import worker_name
from engine_probe.digits import port_number

ENGINE: Final = "sglang"

CANONICAL: Final[dict[str, tuple[str, ...]]] = {
    # With priority scheduling the total stands under the empty priority, its parts under numbers.
    "requests_running": ("num_running_reqs{priority=}",),
    "requests_waiting": ("num_queue_reqs{priority=}",),
    "kv_usage_ratio": ("token_usage",),
    "prefix_hits_tokens_total": ("prefill_effective_tokens_total{mode=device_hit|host_hit|storage_hit}",),
    "preemptions_total": ("num_retracted_requests_total", "total_retracted_reqs"),
    "prompt_tokens_total": ("prompt_tokens_total",),
    "prompt_tokens_computed_total": (
        "prefill_effective_tokens_total{mode=input}",
        "realtime_tokens_total{mode=prefill_compute}",
    ),
    "prompt_tokens_cached_total": ("cached_tokens_total",),
    "output_tokens_total": ("generation_tokens_total",),
    "requests_finished_total": ("num_requests_total",),
    "requests_failed_total": ("num_aborted_requests_total",),
    "tier_read_bytes_total": ("load_back_bytes_total",),
    "tier_written_bytes_total": ("hicache_backup_bytes_total",),
}
"""`spec_accept_rate` is that of the last batch, and 0 where nothing is drafted: no counter can be made of it, and it keeps its name.
`evicted_tokens_total` counts tokens, not blocks, and keeps its name: count `evicted` block rows (KV events)."""

ALSO: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "prefix_queries_tokens_total": (("prefill_effective_tokens_total",), ("prompt_tokens_total",)),
    "prefix_hits_tokens_total": (("cached_tokens_total",),),
}

HISTOGRAMS: Final[dict[str, tuple[str, ...]]] = {
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "request_latency_seconds": ("e2e_request_latency_seconds",),
    "queue_time_seconds": ("queue_time_seconds",),
    "request_prompt_tokens": ("prompt_tokens_histogram",),
    "request_output_tokens": ("generation_tokens_histogram",),
    "request_computed_tokens": ("uncached_prompt_tokens_histogram",),
    "request_preemptions": ("num_retractions",),
}

SAFE_FLAGS: Final = frozenset(
    """attention_backend chunked_prefill_size context_length disable_cuda_graph disable_overlap_schedule
    disable_radix_cache disaggregation_mode dp_size dtype enable_cache_report enable_dp_attention
    enable_hierarchical_cache enable_metrics enable_mixed_chunk enable_priority_scheduling enable_torch_compile ep_size
    hicache_ratio hicache_size hicache_storage_backend hicache_write_policy kv_cache_dtype max_prefill_tokens
    max_queued_requests max_running_requests max_total_tokens mem_fraction_static num_continuous_decode_steps page_size
    pp_size prefill_attention_backend decode_attention_backend prefill_max_requests quantization radix_eviction_policy
    retraction_policy schedule_conservativeness schedule_policy speculative_algorithm speculative_eagle_topk
    speculative_num_draft_tokens speculative_num_steps stream_interval tp_size""".split()  # noqa: SIM905  # a list of words reads better so
)
"""Settings that are kept. Others (paths, addresses, keys, templates) may hold secrets and are left out."""

_ROLES: Final = {"null": "mixed", "prefill": "prefill", "decode": "decode"}


def worker_of(worker: str | None, labels: Mapping[str, str]) -> str | None:
    """The data-parallel rank that a series speaks of."""
    return None if worker is None else worker_name(worker, labels.get("dp_rank"))


NAMES: Final = MetricNames(
    ENGINE,
    ("sglang:", "sglang_"),
    CANONICAL,
    HISTOGRAMS,
    also=ALSO,
    worker_of=worker_of,
    ranks=("tp_rank", "pp_rank", "moe_ep_rank"),
    per_rank=("_bytes_total",),
)


class SglangAdapter(Adapter):
    """SGLang's HTTP server with one or more data-parallel ranks."""

    engine = ENGINE
    title = "SGLang"
    tables = (NAMES, lmcache.NAMES)
    provides = PROVIDES
    metrics_flag = "--enable-metrics"
    guide = "docs/engines/sglang.md"

    def discover(self, client: Client, page: Page) -> Discovery:
        info = client.json("/server_info")
        if not isinstance(info, dict):
            info = client.json("/get_server_info")  # its name before 0.5
        info = info if isinstance(info, dict) else {}
        models = cards(client.json("/v1/models"))
        dp = _count(info.get("dp_size")) or 1
        version, caching_off = info.get("version"), info.get("disable_radix_cache")
        contexts = (info.get("context_length"), *(card.get("max_model_len") for card in models))
        return Discovery(
            version=version if isinstance(version, str) else None,
            models=[card["id"] for card in models if card.get("parent") is None] or _names(info),
            max_context=next((value for value in map(_count, contexts) if value), None),
            kv_sources=kv_sources(info),
            series=frozenset(page.names()),
            ranks=[str(rank) for rank in range(dp)],
            prefix_caching=not caching_off if isinstance(caching_off, bool) else None,
            details=info,
        )

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        info = seen.details
        pages = page_geometry(page)
        told: dict[str, dict[str, Any]] = {}
        for rank in seen.ranks or sorted(pages) or ["0"]:
            facts = {**self.common_facts(seen), **pages.get(rank, {})}
            facts["max_context"] = seen.max_context or facts.get("max_context")
            told[rank] = facts | info_facts(info)
            tokens, size = _count(info.get("max_total_num_tokens")), told[rank].get("block_size")
            if told[rank].get("num_blocks") is None and tokens and size:
                told[rank]["num_blocks"] = tokens // size
        return told

    def rank_worker(self, worker: str, rank: str) -> str:
        return worker_name(worker, rank)

    def open_sources(self, seen: Discovery) -> tuple[str, ...]:
        found = ["metrics"] if seen.series else []
        if seen.details:
            found.append("server_info")
        if seen.kv_sources and seen.prefix_caching is not False:
            found.append("kv_events")
        return tuple(found)

    def log_reader(self, worker: str) -> LogReader:
        from engine_probe.adapters.sglang_log import SglangLog

        return SglangLog(worker)

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        from engine_probe.adapters.sglang_sight import describe

        return [self.metrics_line(seen, around), *describe(seen, around)]


def page_geometry(page: Page) -> dict[str, dict[str, Any]]:
    """By data-parallel rank: block_size, num_blocks, max_context, kv_bytes_per_block, as far as the page tells them."""
    gauges: dict[str, dict[str, float]] = {}
    for series, value, _ in page.samples:
        name = NAMES.bare(series.name)
        rank = series.labels.get("dp_rank", "0")
        if name == "cache_config_info":  # 0.5.10
            for key in ("page_size", "num_pages"):
                if series.labels.get(key, "").isdigit():
                    gauges.setdefault(rank, {})[key] = float(series.labels[key])
        elif name in ("page_size", "num_pages", "context_len", "max_total_num_tokens", "kv_cache_memory_usage_gb"):
            gauges.setdefault(rank, {})[name] = value
    return {rank: found for rank, seen in gauges.items() if (found := _geometry(seen))}


def _geometry(seen: Mapping[str, float]) -> dict[str, Any]:
    size, pages, tokens = (int(seen.get(key, 0)) for key in ("page_size", "num_pages", "max_total_num_tokens"))
    found: dict[str, Any] = {"block_size": size or None, "max_context": int(seen.get("context_len", 0)) or None}
    found["num_blocks"] = pages or (tokens // size if size and tokens else None)
    # The pool holds one page more than can be used. Where the division is not exact, other pools share the memory.
    num_bytes = round(seen.get("kv_cache_memory_usage_gb", 0.0) * (1 << 30))
    if num_bytes and size and tokens:
        for slots in (tokens + size, tokens):
            if num_bytes % slots == 0:
                found["kv_bytes_per_block"] = num_bytes // slots * size
                break
    return {key: value for key, value in found.items() if value is not None}


def info_facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """`worker` columns told by server arguments, whether from /server_info or from the start-up log; `auto` is unknown."""
    facts: dict[str, Any] = {
        "role": _ROLES.get(str(info.get("disaggregation_mode"))),
        "dtype": _type(info.get("dtype")),
        "kv_dtype": _type(info.get("kv_cache_dtype")),
        "tp": _count(info.get("tp_size")),
        "pp": _count(info.get("pp_size")),
        "dp": _count(info.get("dp_size")),
        "block_size": _count(info.get("page_size")),
    }
    flags = {key: _flag(info[key]) for key in sorted(SAFE_FLAGS & info.keys()) if info[key] is not None}
    return {key: value for key, value in facts.items() if value is not None} | {"flags": flags}


def kv_sources(info: Mapping[str, Any]) -> dict[str, Any] | None:
    """KV-event publishers by rank, in vLLM's form and with `bind`: whether the engine binds. None where not told."""
    if not info:
        return None
    config = _config(info.get("kv_events_config"))
    told = info.get("kv_events")
    dp = _count(info.get("dp_size")) or 1
    if isinstance(told, dict) and isinstance(told.get("endpoint_host"), str):
        host, port = told["endpoint_host"], _count(told.get("endpoint_port_base"))
        replay, topic = _count(told.get("replay_endpoint_port_base")), str(told.get("topic") or "")
        dp = _count(told.get("dp_size")) or dp
        if not port:
            return {}
        endpoints = [(f"tcp://{host}:{port + r}", f"tcp://*:{replay + r}" if replay else None) for r in range(dp)]
    elif config.get("publisher", "null") == "zmq":
        base, again = str(config.get("endpoint") or "tcp://*:5557"), config.get("replay_endpoint")
        topic = str(config.get("topic") or "")
        endpoints = [(_offset(base, r), _offset(again, r) if isinstance(again, str) else None) for r in range(dp)]
    else:
        return {}
    asked = config.get("bind")
    return {
        str(rank): {
            "endpoint": endpoint,
            "replay_endpoint": again,
            "topic": topic,
            "bind": asked if isinstance(asked, bool) else binds(endpoint),
        }
        for rank, (endpoint, again) in enumerate(endpoints)
    }


def binds(endpoint: str) -> bool:
    """Whether SGLang binds its publisher there: wildcards (also 0.0.0.0), ipc and inproc; else it connects."""
    return any(part in endpoint for part in ("*", "::", "0.0.0.0")) or endpoint.startswith(("ipc://", "inproc://"))


def _offset(endpoint: str, rank: int) -> str:
    """tcp port + rank, as SGLang does it."""
    head, _, port = endpoint.rpartition(":")
    number = port_number(port)
    return f"{head}:{number + rank}" if rank and number is not None else endpoint


def _config(text: Any) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text) if isinstance(text, str) else text
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _names(info: Mapping[str, Any]) -> list[str]:
    name = info.get("served_model_name")
    return [name] if isinstance(name, str) else []


def _type(value: Any) -> str | None:
    return value.removeprefix("torch.") if isinstance(value, str) and value not in ("auto", "") else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 53 else None


def _flag(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
