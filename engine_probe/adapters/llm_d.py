"""An endpoint picker: llm-d's inference scheduler, or that of the Gateway API Inference Extension, on its metrics port.

A picker is a router. Its page tells of pools, objectives, plugins and, where llm-d's KV cache indexer runs in it, of that
index; nothing of it is an engine's number, so every series keeps its name. Single decisions stand in its log
(`llm_d_log`). Written from the published source; no picker was run here. Source: reference section 10.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from engine_probe.adapters.adapter import Adapter, Client, Discovery, Line, LogReader, Surroundings
from engine_probe.adapters.llm_d_log import PickerLog
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.provides import Provides, names

ENGINE: Final = "llm-d"
PREFIXES: Final = (
    "inference_extension_",
    "inference_objective_",
    "inference_model_",
    "inference_pool_",
    "llm_d_",
    "kvcache_index_",
    "kvcache_tokenization_",
)
ATTEMPTS: Final = "inference_extension_scheduler_attempts_total"

TABLES: Final = tuple(MetricNames(ENGINE, (prefix,), {}) for prefix in PREFIXES)
"""One a prefix: the second prefix of one table would be an exporter's spelling of the first."""

METRICS: Final = Provides(
    engine=ENGINE,
    source="metrics",
    needs="a token that may read `/metrics` of the picker's metrics port (9090), or `--metrics-endpoint-auth=false`",
    names=names("sample: worker at_ns name labels value worker: worker at_ns role engine engine_version model flags"),
    caveats={
        "sample.value": "of pools, objectives and plugins: sums and averages over engines, never one engine's number",
        "worker.model": "of the first objective that has had a request",
    },
)
LOG: Final = Provides(
    engine=ENGINE,
    source="log",
    needs="`-v=4` (`-v=3` tells only who was chosen) and `--zap-encoder=json`; its output in a file that `--log` reads",
    names=names("route: at_ns request_id router policy chosen candidates"),
    caveats={
        "route.at_ns": "whole seconds, unless zap was told otherwise",
        "route.policy": "the plugin that picked",
        "route.candidates": "weighted scores, and requests running and waiting as last scraped; matched tokens are not told",
    },
)


class LlmdAdapter(Adapter):
    """The endpoint picker (EPP)."""

    engine = ENGINE
    title = "llm-d"
    tables = TABLES
    provides = (METRICS, LOG)
    guide = "docs/engines/llm-d.md"
    metrics_flag = "--metrics-port (9090), and a token that may read it"

    def recognises(self, page: Page) -> bool:
        return any(sample.series.name.startswith(PREFIXES) for sample in page.samples)

    def discover(self, client: Client, page: Page) -> Discovery:
        series = frozenset(page.names())
        by_pod: dict[str, float] = {}
        for sample in page.samples:
            pod = sample.series.labels.get("pod_name")
            if sample.series.name == ATTEMPTS and pod:
                by_pod[pod] = by_pod.get(pod, 0.0) + sample.value
        details = {
            "pools": _told(page, ("inference_pool_",), "name"),
            "ready": sum(s.value for s in page.samples if s.series.name == "inference_pool_ready_pods"),
            "by_pod": by_pod,
            "has_index": any(name.startswith("kvcache_index_") for name in series),
        }
        models = _told(page, ("inference_objective_", "inference_model_"), "model_name")
        return Discovery(models=models, series=series, details=details)

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        """A picker is one router, whatever it routes to."""
        told: dict[str, Any] = {"engine": ENGINE, "role": "router", "flags": {}}
        if seen.models:
            told["model"] = seen.models[0]
        if pools := _told(page, ("inference_pool_",), "name"):
            told["flags"]["pool"] = ",".join(pools)
        if plugins := _told(page, ("inference_extension_plugin_duration_seconds",), "plugin_type"):
            told["flags"]["plugins"] = ",".join(plugins)
        info = [s.series.labels for s in page.samples if s.series.name == "inference_extension_info"]
        version = next((labels.get("build_ref") or labels.get("commit") for labels in info), None)
        return {"0": told | ({"engine_version": version} if version else {})}

    def log_reader(self, worker: str) -> LogReader:
        return PickerLog(worker)

    def metrics_line(self, seen: Discovery, around: Surroundings) -> Line:
        pools = ", ".join(seen.details.get("pools", ())) or "unknown"
        text = f"llm-d endpoint picker of pool {pools}, {seen.details.get('ready', 0):.0f} pods ready"
        return Line("metrics", bool(seen.series), f"{text}; {len(seen.series)} series every {around.interval_s:g} s")

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        return [
            self.metrics_line(seen, around),
            _routes(around),
            _index(seen),
            Line("requests", False, "a picker tells none: attach to each engine too, or put `kvscope proxy` before it"),
        ]


def _routes(around: Surroundings) -> Line:
    if around.log_error is not None:
        return Line("routes", False, around.log_error)
    if around.log_path is not None:
        return Line("routes", None, f"decisions are read from {around.log_path}, where it has them (-v=4, JSON)")
    text = "counts by pod only. For one row a decision: -v=4 --zap-encoder=json, and give --log FILE"
    return Line("routes", False, text)


def _index(seen: Discovery) -> Line:
    """Whether this picker knows what the engines hold, or guesses from what it sent them."""
    if seen.details.get("has_index"):
        return Line("index", True, "KV cache index of the engines' events; its lookups are counted")
    return Line("index", False, "no KV cache index here: prefixes are guessed from earlier decisions, if scored at all")


def _told(page: Page, prefixes: tuple[str, ...], label: str) -> list[str]:
    """Values of a label on these series, each once, in their order."""
    found: Iterable[str | None] = (
        s.series.labels.get(label) for s in page.samples if s.series.name.startswith(prefixes)
    )
    return list(dict.fromkeys(value for value in found if value))
