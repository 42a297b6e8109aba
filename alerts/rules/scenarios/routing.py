"""What the rules of routing are held to."""

from __future__ import annotations

from typing import Final

from alerts.rules.scenario import Firing, Scenario, series
from alerts.rules.scenarios.common import WORKER
from store.metric_catalogue import (
    HOTSPOTS,
    ROUTES_JUDGED,
    ROUTING_REGRET,
)

ROUTING: Final = (
    Scenario(
        "KvscopeHotspot",
        "w1 is one for five minutes",
        (
            series(HOTSPOTS, "0x10 1x5 0x30", kind="affinity", **WORKER),
            series(HOTSPOTS, "0x50", kind="affinity", worker="w2"),
        ),
        {"10m": (), "13m": (Firing({**WORKER, "kind": "affinity"}),), "30m": ()},
    ),
    Scenario(
        "KvscopeHotspot",
        "one judged interval alone",
        (series(HOTSPOTS, "0x5 1 0x30", kind="straggler", **WORKER),),
        {"8m": ()},
    ),
    Scenario(
        "KvscopeRoutingRegret",
        "a second lost by each decision from minute 15 to 40",
        (
            series(ROUTES_JUDGED, "0+60x100", **WORKER),
            series(ROUTING_REGRET, "0x15 60+60x24 1500x60", **WORKER),
        ),
        {"15m": (), "37m": (Firing({}, "1s"),), "70m": ()},
    ),
    Scenario(
        "KvscopeRoutingRegret",
        "20 ms a decision",
        (series(ROUTES_JUDGED, "0+60x60", **WORKER), series(ROUTING_REGRET, "0+1.2x60", **WORKER)),
        {"40m": ()},
    ),
)
