"""The router of vLLM's production-stack: its page repeats `vllm:` names with a label `server`, its own view of them.

Invariant: what a router believes of its servers is never stored as the servers' own number. Source: reference
section 13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from engine_probe.adapters.adapter import Adapter, Discovery, Line, Surroundings
from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page
from engine_probe.adapters.provides import Provides, names

PREFIXES: Final = ("vllm:", "vllm_")


def server_of(worker: str | None, labels: Mapping[str, str]) -> str | None:
    """The server that the router speaks of."""
    return labels.get("server", worker)


NAMES: Final = MetricNames("vllm-stack", PREFIXES, {"router_load": ("num_requests_running",)}, worker_of=server_of)


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
    guide = "docs/observability.md"
    provides = (METRICS,)

    def recognises(self, page: Page) -> bool:
        found = [s.series.labels for s in page.samples if s.series.name.startswith(PREFIXES)]
        return any("server" in labels for labels in found) and not any("engine" in labels for labels in found)

    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        text = "the router tells no decision on this page; attach to each engine itself for what it does"
        return [self.metrics_line(seen, around), Line("routes", False, text)]
