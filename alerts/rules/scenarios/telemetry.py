"""What the rules of telemetry are held to."""

from __future__ import annotations

from typing import Final

from alerts.rules.scenario import Firing, Scenario, series
from alerts.rules.scenarios.common import COMES, SENDER
from store.metric_catalogue import (
    CONTRADICTIONS,
    GAP_MARKS,
    SOURCE_ERROR,
    SOURCE_MISSING,
    SOURCE_RECEIVED,
)

TELEMETRY: Final = (
    Scenario(
        "KvscopeTelemetryGap",
        "a first gap mark, in a series that was not there before",
        (series(GAP_MARKS, "_x10 1x40", **SENDER),),
        {"9m": (), "12m": (Firing(SENDER),), "30m": ()},
    ),
    Scenario("KvscopeTelemetryGap", "an old one", (series(GAP_MARKS, "3x60", **SENDER),), {"30m": ()}),
    Scenario(
        "KvscopeBatchesMissing",
        "two numbers stay away",
        (series(SOURCE_MISSING, "0x10 2x20 0x20", **SENDER),),
        {"10m": (), "26m": (Firing(SENDER, "2"),), "45m": ()},
    ),
    Scenario(
        "KvscopeBatchesMissing",
        "batches overtake each other",
        (series(SOURCE_MISSING, "0 1 0 2 0 1 0 0 3 0 0 1 0 0 2 0 0 0 1 0", **SENDER),),
        {"19m": ()},
    ),
    Scenario(
        "KvscopeBatchesMissing",
        "one was refused at minute 10 and stays missing, as does another at minute 80: each is told for an hour",
        (series(SOURCE_MISSING, "0x10 1x69 2x90", **SENDER),),
        {"9m": (), "26m": (Firing(SENDER, "1"),), "78m": (), "96m": (Firing(SENDER, "2"),), "150m": ()},
    ),
    Scenario(
        "KvscopeSourceSilent",
        "the last batch came at minute 10",
        (series(SOURCE_RECEIVED, "0+60x10 600x90", **SENDER),),
        {"10m": (), "16m": (Firing(SENDER, "6m 0s"),), "71m": ()},
    ),
    Scenario(
        "KvscopeSourceSilent",
        "people who set marks are no source",
        (series(SOURCE_RECEIVED, "0x60", source="api"),),
        {"30m": ()},
    ),
    Scenario(
        "KvscopeClockError",
        "known to within two seconds",
        (series(SOURCE_ERROR, "0.01x10 2x30 0.01x30", **SENDER), COMES),
        {"10m": (), "28m": (Firing(SENDER, "2s"),), "55m": ()},
    ),
    Scenario(
        "KvscopeClockError", "known to within 50 ms", (series(SOURCE_ERROR, "0.05x60", **SENDER), COMES), {"30m": ()}
    ),
    Scenario(
        "KvscopeClockError",
        "a machine with a bad clock, taken down at minute 10",
        (series(SOURCE_ERROR, "2x90", **SENDER), series(SOURCE_RECEIVED, "0+60x10 600x80", **SENDER)),
        {"0m": (), "30m": (Firing(SENDER, "2s"),), "76m": ()},
    ),
    Scenario(
        "KvscopeDataContradiction",
        "hit counter and requests disagree for ten minutes",
        (series(CONTRADICTIONS, "0x10 1x10 0x30", check="cached_tokens"),),
        {"10m": (), "17m": (Firing({"check": "cached_tokens"}),), "40m": ()},
    ),
    Scenario(
        "KvscopeDataContradiction",
        "one pass alone",
        (series(CONTRADICTIONS, "0x10 1 0x30", check="phases"),),
        {"14m": ()},
    ),
)
