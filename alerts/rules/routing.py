"""Routing: hotspots that the collector found, and the time that routing loses."""

from __future__ import annotations

from typing import Final

from alerts.rules.rule import Alerting, Rule, rate, select
from store.metric_catalogue import HOTSPOTS, ROUTES_JUDGED, ROUTING_REGRET

RULES: Final[tuple[Rule, ...]] = (
    Alerting(
        "KvscopeHotspot",
        f"{select(HOTSPOTS, kind='!')} > 0",
        "{{ $labels.worker }} is a hotspot ({{ $labels.kind }})",
        "The collector found that {{ $labels.worker }} gets more than it can serve, or serves slower than its like: {{ $labels.kind }}.",
        wait="2m",
        labels={"role": "hotspot", "cause": "hotspot_{{ $labels.kind }}"},
        todo=(
            "kvscope hotspots: which prefix or tenant, what it costs, from how many waiting on another worker is cheaper",
            "affinity: spill over above the load that the finding names, or keep the prefix on two workers",
            "straggler: look at that machine; dead_signal, tie_breaking, stale_index, unreachable_threshold: the router",
        ),
    ),
    Alerting(
        "KvscopeRoutingRegret",
        f"{rate(ROUTING_REGRET, '10m')} / {rate(ROUTES_JUDGED, '10m')} > 0.5",
        "routing loses more than half a second a request",
        "Each decision of 10 minutes lost {{ $value | humanizeDuration }} in the mean against the best worker there was at its instant.",
        wait="10m",
        labels={"role": "cause", "metric": "ttft"},
        todo=("kvscope hotspots says where, and why the router sends them there",),
    ),
)
