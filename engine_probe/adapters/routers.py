"""The stand-alone routers of SGLang and vLLM (packages `sglang-router`, `vllm-router`): their pages and their logs.

A router is no engine: it has no KV cache and no steps. Its page tells what it believes of its workers (`router_load`)
and how often it chose whom; single decisions stand in its log (`router_log`). Both serve their page on a port of its
own (`--prometheus-port`, 29000). Read on real sglang-router 0.3.2 and vllm-router 0.1.17.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from engine_probe.adapters.adapter import Adapter, Discovery, Line, LogReader, Surroundings
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.provides import Provides, names
from engine_probe.adapters.router_log import SglangRouterLog, VllmRouterLog, worker_of_url


def worker_told(worker: str | None, labels: Mapping[str, str]) -> str | None:
    """The worker that a series speaks of, by the name that `attach` gives it; else the router itself."""
    return worker_of_url(labels["worker"]) if "worker" in labels else worker


SGLANG_NAMES: Final = MetricNames(
    "sglang-router",
    ("smg_", "sgl_router_"),
    {"router_load": ("worker_requests_active", "running_requests")},
    worker_of=worker_told,
)
VLLM_NAMES: Final = MetricNames(
    "vllm-router", ("vllm_router_",), {"router_load": ("running_requests",)}, worker_of=worker_told
)

_PAGE: Final = "sample: worker at_ns name labels value router_load worker: worker at_ns role engine flags"
_BELIEF: Final = "what the router believes; the truth is in the engines' own numbers"
_SECONDS: Final = "whole seconds: the router's log says no more"

SGLANG_PROVIDES: Final = (
    Provides(
        engine="sglang-router",
        source="metrics",
        needs="nothing; the page is on `--prometheus-port` (29000)",
        names=names(_PAGE),
        caveats={"sample.router_load": _BELIEF},
    ),
    Provides(
        engine="sglang-router",
        source="log",
        needs="`--log-level debug`, and its output in a file that `attach --log` reads",
        names=names("route: at_ns request_id router policy chosen"),
        caveats={
            "route.at_ns": _SECONDS,
            "route.request_id": "a retry is a further decision for the same id",
            "route.policy": "from its start-up lines, where all its models have the same",
        },
    ),
)
VLLM_PROVIDES: Final = (
    Provides(
        engine="vllm-router",
        source="metrics",
        needs="nothing; the page is on `--prometheus-port` (29000)",
        names=names(_PAGE),
        caveats={"sample.router_load": _BELIEF},
    ),
    Provides(
        engine="vllm-router",
        source="log",
        needs="`--policy consistent_hash` and requests that carry `X-Request-Id`; its output in a file",
        names=names("route: at_ns request_id router policy chosen"),
        caveats={
            "route.at_ns": _SECONDS,
            "route.request_id": "its other policies do not name the request in their log, so no row can be made",
        },
    ),
)


class RouterAdapter(Adapter):
    """What both have in common."""

    guide = "docs/engines/routers.md"
    metrics_port = "--prometheus-port (29000), not on the port that serves requests"
    decisions: ClassVar[str]
    """The metric that counts decisions by worker and policy."""

    def recognises(self, page: Page) -> bool:
        return any(sample.series.name.startswith(self.tables[0].prefixes) for sample in page.samples)

    def discover(self, client: Any, page: Page) -> Discovery:
        return Discovery(series=frozenset(page.names()), details={"policies": self._policies(page)})

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        policies = self._policies(page)
        flags = {"policy": ",".join(policies)} if policies else {}
        return {"0": {"engine": self.engine, "role": "router", "flags": flags}}

    def metrics_line(self, seen: Discovery, around: Surroundings) -> Line:
        policy = ", ".join(seen.details.get("policies", ())) or "unknown until it has decided"
        text = f"{self.title}, policy {policy}; {len(seen.series)} series every {around.interval_s:g} s"
        return Line("metrics", bool(seen.series), text)

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        return [self.metrics_line(seen, around), self._routes(around), _engines()]

    def _routes(self, around: Surroundings) -> Line:
        needs = self.provides[1].needs.replace("`", "")
        if around.log_error is not None:
            return Line("routes", False, around.log_error)
        if around.log_path is None:
            return Line("routes", False, f"counts by worker only. For one row a decision: {needs}, and give --log FILE")
        return Line("routes", None, f"decisions are read from {around.log_path}, where it has them: {needs}")

    def _policies(self, page: Page) -> list[str]:
        """Policies that have decided something so far."""
        told = (s.series.labels.get("policy") for s in page.samples if s.series.name.endswith(self.decisions))
        return sorted({policy for policy in told if policy})


class SglangRouterAdapter(RouterAdapter):
    """sglang-router (Shepherd model gateway)."""

    engine = "sglang-router"
    title = "SGLang router"
    tables = (SGLANG_NAMES,)
    provides = SGLANG_PROVIDES
    decisions = "worker_selection_total"

    def log_reader(self, worker: str) -> LogReader:
        return SglangRouterLog(worker)


class VllmRouterAdapter(RouterAdapter):
    """vllm-router."""

    engine = "vllm-router"
    title = "vLLM router"
    tables = (VLLM_NAMES,)
    provides = VLLM_PROVIDES
    decisions = "policy_decisions_total"

    def log_reader(self, worker: str) -> LogReader:
        return VllmRouterLog(worker)


def _engines() -> Line:
    return Line(
        "requests", False, "a router tells none here: attach to each engine too, or put `kvscope proxy` before it"
    )
