"""What the rules of KV blocks are held to."""

from __future__ import annotations

from typing import Final

from alerts.rules.scenario import Firing, Scenario, series
from alerts.rules.scenarios.common import OF_WORKER, STEPS, WORKER
from store.metric_catalogue import (
    BLOCK_EVICTIONS,
    KV_USAGE,
    NEWEST_STEP,
    PREEMPTIONS,
    PREMATURE_EVICTIONS,
    REQUESTS,
    REQUESTS_RUNNING,
    WAITING_ON,
)

BLOCKS: Final = (
    Scenario(
        "KvscopeKvExhaustion",
        "two percent of the pool more every minute, until requests end",
        (series(KV_USAGE, "0.3x20 0.32+0.02x24 0.3x30", **WORKER),),
        # At minute 41: 0.72, rising by 0.02 a minute for a quarter of an hour: 0.72 + 30 * 0.02 = 1.32.
        {"20m": (), "41m": (Firing(WORKER, "132%"),), "70m": ()},
    ),
    Scenario(
        "KvscopeKvExhaustion",
        "nearly full and steady: that is what a pool is for",
        (series(KV_USAGE, "0.95x60", **WORKER),),
        {"60m": ()},
    ),
    Scenario(
        "KvscopeKvExhaustion",
        "rises from little to little",
        (series(KV_USAGE, "0.1+0.01x40", **WORKER),),
        {"40m": ()},
    ),
    Scenario(
        "KvscopeKvBlocked",
        "four wait for blocks for a quarter of an hour",
        (series(WAITING_ON, "0x10 4x15 0x30", on="blocks", **WORKER), STEPS),
        {"10m": (), "22m": (Firing({**WORKER, "on": "blocks"}),), "45m": ()},
    ),
    Scenario(
        "KvscopeKvBlocked",
        "every other minute somebody waits a moment; others wait for seats",
        (
            series(WAITING_ON, "0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3", on="blocks", **WORKER),
            series(WAITING_ON, "9x25", on="seats", **WORKER),
            STEPS,
        ),
        {"23m": ()},
    ),
    Scenario(
        "KvscopeKvBlocked",
        "a worker that was taken down while somebody waited at minute 10",
        (series(WAITING_ON, "4x90", on="blocks", **WORKER), series(NEWEST_STEP, "0+60x10 600x80", **WORKER)),
        {"0m": (), "60m": (Firing({**WORKER, "on": "blocks"}),), "76m": ()},
    ),
    Scenario(
        "KvscopePreemptionStorm",
        "half a preemption a request from minute 10 to 30",
        (
            series(REQUESTS, "0+60x70", state="finished", **OF_WORKER),
            series(PREEMPTIONS, "0x10 30+30x19 600x40", **OF_WORKER),
        ),
        {"10m": (), "25m": (Firing({"worker": "w1", "model": "m"}, "500m"),), "50m": ()},
    ),
    Scenario(
        "KvscopePreemptionStorm",
        "one preemption in sixty requests",
        (series(REQUESTS, "0+60x60", state="finished", **OF_WORKER), series(PREEMPTIONS, "0+1x60", **OF_WORKER)),
        {"40m": ()},
    ),
    Scenario(
        "KvscopePrematureEviction",
        "40 of 100 evicted blocks come back; both kinds of rows tell the same evictions",
        (
            series(BLOCK_EVICTIONS, "0+100x90", kind="block", **WORKER),
            series(BLOCK_EVICTIONS, "0+100x90", kind="step", **WORKER),
            series(PREMATURE_EVICTIONS, "0x15 40+40x24 1000x50", **WORKER),
        ),
        {"15m": (), "36m": (Firing(WORKER, "40%"),), "70m": ()},
    ),
    Scenario(
        "KvscopePrematureEviction",
        "a cache that turns over: one evicted block in ten is asked for again",
        (
            series(BLOCK_EVICTIONS, "0+100x90", kind="block", **WORKER),
            series(PREMATURE_EVICTIONS, "0+10x90", **WORKER),
        ),
        {"60m": ()},
    ),
    Scenario(
        "KvscopeBlockLeak",
        "the floor rises from 10 % to 30 % of the pool while as much runs as before; a restart ends it",
        (
            series(KV_USAGE, "0.1x30 0.1+0.0025x80 0.3x30 0.1x90", **WORKER),
            series(REQUESTS_RUNNING, "8x250", **WORKER),
        ),
        # From minute 127 to 142 it was 0.3, an hour before 0.19 (minute 67) and more: 0.3 - 0.19.
        {"30m": (), "142m": (Firing(WORKER, "11%"),), "210m": ()},
    ),
    Scenario(
        "KvscopeBlockLeak",
        "more blocks because more runs",
        (
            series(KV_USAGE, "0.1x60 0.6x120", **WORKER),
            series(REQUESTS_RUNNING, "4x60 24x120", **WORKER),
        ),
        {"140m": ()},
    ),
)
