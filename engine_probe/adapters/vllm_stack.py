"""The router of vLLM's production-stack: its page repeats `vllm:` names with a label `server`, its own view of them.

Invariant: what a router believes of its servers is never stored as the servers' own number. Source: reference
section 13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from engine_probe.adapters.adapter import Adapter, Discovery, Line, LogReader, Surroundings
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.provides import Provides, names
from engine_probe.adapters.router_log import StackRouterLog, worker_of_url

PREFIXES: Final = ("vllm:", "vllm_")


def server_of(worker: str | None, labels: Mapping[str, str]) -> str | None:
    """The server that the router speaks of."""
    return worker_of_url(labels["server"]) if "server" in labels else worker


NAMES: Final = MetricNames("vllm-stack", PREFIXES, {"router_load": ("num_requests_running",)}, worker_of=server_of)


LOG: Final = Provides(
    engine="vllm-stack",
    source="log",
    needs="nothing; its output in a file that `attach --log` reads",
    names=names("route: at_ns request_id router chosen decision_s"),
)
METRICS: Final = Provides(
    engine="vllm-stack",
    source="metrics",
    needs="nothing",
    names=names("sample: worker at_ns name labels value router_load"),
    caveats={"sample.router_load": "what the router believes; the truth is in the engines' own numbers"},
)


class VllmStackAdapter(Adapter):
    """vllm-project/production-stack's router."""

    engine = "vllm-stack"
    title = "vLLM production-stack router"
    tables = (NAMES,)
    guide = "docs/engines/routers.md"
    provides = (METRICS, LOG)

    def recognises(self, page: Page) -> bool:
        found = [s.series.labels for s in page.samples if s.series.name.startswith(PREFIXES)]
        return any("server" in labels for labels in found) and not any("engine" in labels for labels in found)

    def log_reader(self, worker: str) -> LogReader:
        return StackRouterLog(worker)

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        if around.log_path is not None and around.log_error is None:
            routes = Line("routes", None, f"decisions are read from {around.log_path}")
        else:
            text = (
                "one row a decision stands in its log: give --log FILE; attach to each engine itself for what it does"
            )
            routes = Line("routes", False, around.log_error or text)
        return [self.metrics_line(seen, around), routes]
