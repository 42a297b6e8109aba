"""vLLM 0.8 to 0.33 as seen on its `/metrics` page: wire names mapped to the contract's sample names.

Invariant: the presence of a series decides, never the version; where an old and a new name of one thing stand on the
same page (0.9 to 0.11, 0.24) the new one takes the canonical name and the old one keeps its own, so nothing is
counted twice. The name on the wire stays in `labels.wire`. Counters are stored as they are: a restart makes them
fall, and `deltas` is how to difference them. Source: reference sections 3, 4.3 to 4.5, 13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from engine_probe.adapters.prometheus import MAX_REMEMBERED_SERIES, Page, Series

ENGINE: Final = "vllm"
DROPPED_PREFIXES: Final = ("python_", "http_")
"""Series of the interpreter and of the web framework on the same page: they say nothing about the engine."""

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
`blocks_evicted_total` is not on the page: it is the number of `evicted` block rows (KV events)."""

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

_SUFFIXES = ("_bucket", "_sum", "_count")
_RENAMED = re.compile(r"(?P<name>[^{]+)(?:\{(?P<label>\w+)=(?P<values>[^}]+)\})?")
_ROUTE_PREFIX = re.compile(r"(?:chatcmpl|cmpl)-")


def _rules() -> dict[str, list[tuple[str, str | None, frozenset[str], tuple[str, ...]]]]:
    """Wire name -> (canonical name, label, its values, newer wire names that shadow it)."""
    rules: dict[str, list[tuple[str, str | None, frozenset[str], tuple[str, ...]]]] = {}

    def add(wire: str, canonical: str, label: str | None, values: frozenset[str], newer: Sequence[str]) -> None:
        rules.setdefault(wire, []).append((canonical, label, values, tuple(newer)))

    for canonical, wires in CANONICAL.items():
        newer: list[str] = []
        for wire in wires:
            match = _RENAMED.fullmatch(wire)
            assert match is not None
            values = frozenset((match["values"] or "").split("|"))
            add(match["name"], canonical, match["label"], values, newer)
            newer.append(match["name"])
    for canonical, wires in HISTOGRAMS.items():
        for suffix in _SUFFIXES:
            for position, wire in enumerate(wires):
                add(wire + suffix, canonical + suffix, None, frozenset(), [name + suffix for name in wires[:position]])
    return rules


_RULES: Final = _rules()


def detect(page: Page) -> str | None:
    """Who made this page: `vllm`, `vllm_router` (production-stack: `vllm:` names with label `server`), or None."""
    routed = False
    for sample in page.samples:
        series = sample.series
        if series.name.startswith(("vllm:", "vllm_")):
            if "engine" in series.labels or series.name[5:] == "cache_config_info":
                return ENGINE
            routed = routed or "server" in series.labels
            if "server" not in series.labels and series.name[5:] in _RULES:
                return ENGINE
    return "vllm_router" if routed else None


def worker_name(worker: str, rank: int | str | None) -> str:
    """Name of one data-parallel rank (one scheduler, one KV cache) of `worker`; rank 0 keeps the plain name."""
    text = "" if rank is None else str(rank)
    return worker if text in ("", "0") else f"{worker}/dp{text}"


def normalise_request_id(engine_id: str) -> str:
    """The id that the client sent as X-Request-Id: `cmpl-abc-0`, `chatcmpl-abc` -> `abc`. Other ids stay as they are.

    Completions get `-<n>` appended for the n-th prompt of a call, chat completions do not (reference 4.1).
    """
    if engine_id.startswith("cmpl-"):
        head, dash, tail = engine_id[5:].rpartition("-")
        return head if dash and head and tail.isascii() and tail.isdigit() else engine_id[5:]
    return engine_id.removeprefix("chatcmpl-")


class SampleMapper:
    """Turns pages of one instance into `sample` rows; remembers each series' mapping from page to page."""

    def __init__(self, worker: str | None, *, drop_prefixes: tuple[str, ...] = DROPPED_PREFIXES) -> None:
        self._worker = worker
        self._drop_prefixes = drop_prefixes
        self._mapped: dict[Series, tuple[str, Mapping[str, str], str | None] | None] = {}
        self._label_sets: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}
        self._names: frozenset[str] = frozenset()
        self._role: str | None = None

    def rows(self, page: Page, at_ns: int) -> list[tuple[str | None, int, str, Mapping[str, str], float]]:
        """(worker, at_ns, name, labels, value) of every sample kept; NaN (no value yet) is left out, infinities too.

        The labels of one series are the same object in every page (the thinner keys on it).
        """
        names = frozenset(page.names())
        if names != self._names or len(self._mapped) > 4 * len(page.samples):
            self._names, self._role = names, detect(page)
            self._mapped.clear()
        rows = []
        for series, value, stated_ns in page.samples:
            if series not in self._mapped:
                self._mapped[series] = self._map(series)
            mapped = self._mapped[series]
            if mapped is not None and -1e308 <= value <= 1e308:
                name, labels, worker = mapped
                rows.append((worker, at_ns if stated_ns is None else stated_ns, name, labels, value))
        return rows

    def _map(self, series: Series) -> tuple[str, Mapping[str, str], str | None] | None:
        name = series.name
        if name.startswith(self._drop_prefixes) or self._is_created(name):
            return None
        labels: Mapping[str, str] = series.labels
        worker = self._worker
        canonical = name
        if name.startswith(("vllm:", "vllm_")):
            canonical = "vllm:" + name[5:]
            if "server" in labels and "engine" not in labels and self._role == "vllm_router":
                # What a router believes of its servers is never the servers' own number.
                canonical = "router_load" if name[5:] == "num_requests_running" else canonical
                worker = labels["server"]
            else:
                canonical = self._canonical(name[5:], labels) or canonical
                if worker is not None:
                    worker = worker_name(worker, labels.get("engine"))
        if canonical != name:
            labels = {**labels, "wire": name}
        if len(self._label_sets) > MAX_REMEMBERED_SERIES:
            self._label_sets.clear()
        return canonical, self._label_sets.setdefault(tuple(labels.items()), labels), worker

    def _canonical(self, wire: str, labels: Mapping[str, str]) -> str | None:
        for canonical, label, values, newer in _RULES.get(wire, ()):
            if any(prefix + name in self._names for name in newer for prefix in ("vllm:", "vllm_")):
                continue
            if label is None or labels.get(label) in values:
                return canonical
        return None

    def _is_created(self, name: str) -> bool:
        """`x_created` beside the family x is prometheus_client's creation time, not a measurement."""
        base = name.removesuffix("_created")
        return base != name and any(base + suffix in self._names for suffix in ("", "_total", *_SUFFIXES))


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


def deltas(values: Iterable[float]) -> list[float]:
    """Increments of a counter between neighbouring scrapes; a fall is a restart, after which it counts from 0.

    [5, 8, 2] -> [3, 2]. n values give n - 1 increments, none of them negative.
    """
    out: list[float] = []
    previous: float | None = None
    for value in values:
        if previous is not None:
            out.append(value - previous if value >= previous else value)
        previous = value
    return out


def _integer(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _boolean(text: str | None) -> bool | None:
    return {"True": True, "true": True, "False": False, "false": False}.get(text or "")
