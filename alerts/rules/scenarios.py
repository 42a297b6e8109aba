"""What each rule is held to: it fires, it ends, and it keeps quiet where something like it is harmless. Numbers are worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from alerts.rules.scenario import Firing, Scenario, series
from store.metric_catalogue import (
    ALERT_FAILED_LOOKS,
    ALERT_OUTBOX,
    BLOCK_EVICTIONS,
    BUILD,
    CONTRADICTIONS,
    GAP_MARKS,
    HOTSPOTS,
    INGEST_COMMIT,
    INGEST_QUEUE,
    INGEST_QUEUE_LIMIT,
    INGEST_REJECTED,
    KV_USAGE,
    NEWEST_STEP,
    OLDEST_WAIT,
    PREEMPTIONS,
    PREMATURE_EVICTIONS,
    REQUEST_ERRORS,
    REQUESTS,
    REQUESTS_RUNNING,
    ROUTES_JUDGED,
    ROUTING_REGRET,
    SLO_REQUESTS,
    SOURCE_ERROR,
    SOURCE_LAG,
    SOURCE_MISSING,
    SOURCE_RECEIVED,
    STORE_BUDGET,
    STORE_BYTES,
    STORE_FREE,
    WAITING_ON,
)
from store.metrics import SLO_GOAL

_M = {"model": "m"}
_W = {"worker": "w1"}
_OF = {"vantage": "engine", "worker": "w1", "model": "m"}
_SLO = {**_OF, "slo": "interactive"}
_SLOW = {"model": "m", "slo": "interactive"}
_S = {"source": "probe"}
_STEPS = series(NEWEST_STEP, "0+60x100", **_W)
_COMES = series(SOURCE_RECEIVED, "0+60x100", **_S)


def _budgets(goal: float) -> tuple[Scenario, ...]:
    """Of error budgets: what is missed is worked out as times of what the goal allows."""
    allowed = 1 - goal
    missed = round(100 * 20 * allowed, 9)  # of 100 requests a minute
    met = 100 - missed
    within = 200 * allowed / 2
    return (
        Scenario(
            "KvscopeErrorBudgetBurn",
            "20 times as many as the goal allows miss the SLO from minute 60 to 120",
            (
                series(
                    SLO_REQUESTS,
                    f"0+100x60 {6000 + met:.8g}+{met:.8g}x59 {6100 + 60 * met:.8g}+100x400",
                    outcome="met",
                    **_SLO,
                ),
                series(
                    SLO_REQUESTS, f"0x60 {missed:.8g}+{missed:.8g}x59 {60 * missed:.8g}x400", outcome="missed", **_SLO
                ),
            ),
            {
                "60m": (),
                # 59 minutes of the last hour's 60; 59 of all 119 so far.
                "119m": (
                    Firing({**_SLOW, "window": "1h", "severity": "critical"}, _percent(20 * allowed * 59 / 60)),
                    Firing({**_SLOW, "window": "6h", "severity": "critical"}, _percent(20 * allowed * 59 / 119)),
                ),
                # Ended for 20 minutes: the windows of 5 minutes are clean, those of half an hour are not.
                "140m": (
                    Firing({**_SLOW, "window": "6h", "severity": "critical"}, _percent(20 * allowed * 60 / 140)),
                    Firing({**_SLOW, "window": "1d", "severity": "warning"}, _percent(20 * allowed * 60 / 140)),
                ),
                "500m": (),
            },
        ),
        Scenario(
            "KvscopeErrorBudgetBurn",
            "a dozen requests an hour, all of them too slow: chance",
            (series(SLO_REQUESTS, "0+0.2x200", outcome="missed", **_SLO),),
            {"200m": ()},
        ),
        Scenario(
            "KvscopeErrorBudgetBurn",
            "half as many miss as the goal allows: within the budget",
            (
                series(SLO_REQUESTS, f"0+{200 - within:.8g}x600", outcome="met", **_SLO),
                series(SLO_REQUESTS, f"0+{within:.8g}x600", outcome="missed", **_SLO),
            ),
            {"600m": ()},
        ),
        Scenario(
            "KvscopeErrorBudgetBurn",
            "no request ever missed: there is no series of misses",
            (series(SLO_REQUESTS, "0+100x100", outcome="met", **_SLO),),
            {"100m": ()},
        ),
        *(_steady(times, allowed, windows) for times, windows in _STEADY),
    )


_STEADY: Final = (
    (2, {"3d": "warning"}),
    (4, {"1d": "warning", "3d": "warning"}),
    (10, {"6h": "critical", "1d": "warning", "3d": "warning"}),
)
"""Times of what the goal allows -> windows that fire: between 1 and 3, 3 and 6, 6 and 14.4."""


def _steady(times: int, allowed: float, windows: Mapping[str, str]) -> Scenario:
    """Of the four rules fire those for which that is too fast, after their wait, until their short window is clean."""
    missed = round(100 * times * allowed, 9)
    return Scenario(
        "KvscopeErrorBudgetBurn",
        f"{times} times as many as the goal allows miss the SLO for four hours and a half",
        (
            series(
                SLO_REQUESTS,
                f"0+{100 - missed:.8g}x270 {(100 - missed) * 270 + 100:.8g}+100x370",
                outcome="met",
                **_SLO,
            ),
            series(SLO_REQUESTS, f"0+{missed:.8g}x270 {missed * 270:.8g}x370", outcome="missed", **_SLO),
        ),
        {
            "10m": (),
            "250m": tuple(
                Firing({**_SLOW, "window": window, "severity": severity}, _percent(times * allowed))
                for window, severity in windows.items()
            ),
            "635m": (),
        },
    )


def _percent(share: float) -> str:
    """As Prometheus' humanizePercentage."""
    return f"{100 * share:.4g}%"


REQUESTS_SEEN: Final = (
    Scenario(
        "KvscopeRequestErrors",
        "one in ten fails from minute 10 to 20",
        (
            series(REQUESTS, "0+90x60", state="finished", **_OF),
            series(REQUESTS, "0x10 10+10x9 100x40", state="failed", **_OF),
            series(REQUEST_ERRORS, "0x10 10+10x9 100x40", status="500", reason="server_error", **_OF),
        ),
        {"10m": (), "18m": (Firing(_M, "10%"),), "40m": ()},
    ),
    Scenario(
        "KvscopeRequestErrors",
        "callers give up: that is theirs",
        (
            series(REQUESTS, "0+90x60", state="finished", **_OF),
            series(REQUESTS, "0+30x60", state="aborted", **_OF),
            series(REQUEST_ERRORS, "0+30x60", status="499", reason="aborted", **_OF),
        ),
        {"30m": ()},
    ),
    Scenario(
        "KvscopeQueueStuck",
        "the oldest has waited for 45 s for three minutes",
        (series(OLDEST_WAIT, "2x10 45x3 1x30", **_W), _STEPS),
        {"10m": (), "13m": (Firing(_W, "45s"),), "30m": ()},
    ),
    Scenario(
        "KvscopeQueueStuck", "20 s are long, and no page", (series(OLDEST_WAIT, "20x30", **_W), _STEPS), {"30m": ()}
    ),
    Scenario(
        "KvscopeQueueStuck",
        "a worker that was taken down with a queue at minute 10: an hour later it is nobody's any more",
        (series(OLDEST_WAIT, "45x90", **_W), series(NEWEST_STEP, "0+60x10 600x80", **_W)),
        {"0m": (), "60m": (Firing(_W, "45s"),), "76m": ()},
    ),
)

BLOCKS: Final = (
    Scenario(
        "KvscopeKvExhaustion",
        "two percent of the pool more every minute, until requests end",
        (series(KV_USAGE, "0.3x20 0.32+0.02x24 0.3x30", **_W),),
        # At minute 41: 0.72, rising by 0.02 a minute for a quarter of an hour: 0.72 + 30 * 0.02 = 1.32.
        {"20m": (), "41m": (Firing(_W, "132%"),), "70m": ()},
    ),
    Scenario(
        "KvscopeKvExhaustion",
        "nearly full and steady: that is what a pool is for",
        (series(KV_USAGE, "0.95x60", **_W),),
        {"60m": ()},
    ),
    Scenario(
        "KvscopeKvExhaustion",
        "rises from little to little",
        (series(KV_USAGE, "0.1+0.01x40", **_W),),
        {"40m": ()},
    ),
    Scenario(
        "KvscopeKvBlocked",
        "four wait for blocks for a quarter of an hour",
        (series(WAITING_ON, "0x10 4x15 0x30", on="blocks", **_W), _STEPS),
        {"10m": (), "22m": (Firing({**_W, "on": "blocks"}),), "45m": ()},
    ),
    Scenario(
        "KvscopeKvBlocked",
        "every other minute somebody waits a moment; others wait for seats",
        (
            series(WAITING_ON, "0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3", on="blocks", **_W),
            series(WAITING_ON, "9x25", on="seats", **_W),
            _STEPS,
        ),
        {"23m": ()},
    ),
    Scenario(
        "KvscopeKvBlocked",
        "a worker that was taken down while somebody waited at minute 10",
        (series(WAITING_ON, "4x90", on="blocks", **_W), series(NEWEST_STEP, "0+60x10 600x80", **_W)),
        {"0m": (), "60m": (Firing({**_W, "on": "blocks"}),), "76m": ()},
    ),
    Scenario(
        "KvscopePreemptionStorm",
        "half a preemption a request from minute 10 to 30",
        (
            series(REQUESTS, "0+60x70", state="finished", **_OF),
            series(PREEMPTIONS, "0x10 30+30x19 600x40", **_OF),
        ),
        {"10m": (), "25m": (Firing({"worker": "w1", "model": "m"}, "500m"),), "50m": ()},
    ),
    Scenario(
        "KvscopePreemptionStorm",
        "one preemption in sixty requests",
        (series(REQUESTS, "0+60x60", state="finished", **_OF), series(PREEMPTIONS, "0+1x60", **_OF)),
        {"40m": ()},
    ),
    Scenario(
        "KvscopePrematureEviction",
        "40 of 100 evicted blocks come back; both kinds of rows tell the same evictions",
        (
            series(BLOCK_EVICTIONS, "0+100x90", kind="block", **_W),
            series(BLOCK_EVICTIONS, "0+100x90", kind="step", **_W),
            series(PREMATURE_EVICTIONS, "0x15 40+40x24 1000x50", **_W),
        ),
        {"15m": (), "36m": (Firing(_W, "40%"),), "70m": ()},
    ),
    Scenario(
        "KvscopePrematureEviction",
        "a cache that turns over: one evicted block in ten is asked for again",
        (
            series(BLOCK_EVICTIONS, "0+100x90", kind="block", **_W),
            series(PREMATURE_EVICTIONS, "0+10x90", **_W),
        ),
        {"60m": ()},
    ),
    Scenario(
        "KvscopeBlockLeak",
        "the floor rises from 10 % to 30 % of the pool while as much runs as before; a restart ends it",
        (
            series(KV_USAGE, "0.1x30 0.1+0.0025x80 0.3x30 0.1x90", **_W),
            series(REQUESTS_RUNNING, "8x250", **_W),
        ),
        # From minute 127 to 142 it was 0.3, an hour before 0.19 (minute 67) and more: 0.3 - 0.19.
        {"30m": (), "142m": (Firing(_W, "11%"),), "210m": ()},
    ),
    Scenario(
        "KvscopeBlockLeak",
        "more blocks because more runs",
        (
            series(KV_USAGE, "0.1x60 0.6x120", **_W),
            series(REQUESTS_RUNNING, "4x60 24x120", **_W),
        ),
        {"140m": ()},
    ),
)

ROUTING: Final = (
    Scenario(
        "KvscopeHotspot",
        "w1 is one for five minutes",
        (
            series(HOTSPOTS, "0x10 1x5 0x30", kind="affinity", **_W),
            series(HOTSPOTS, "0x50", kind="affinity", worker="w2"),
        ),
        {"10m": (), "13m": (Firing({**_W, "kind": "affinity"}),), "30m": ()},
    ),
    Scenario(
        "KvscopeHotspot",
        "one judged interval alone",
        (series(HOTSPOTS, "0x5 1 0x30", kind="straggler", **_W),),
        {"8m": ()},
    ),
    Scenario(
        "KvscopeRoutingRegret",
        "a second lost by each decision from minute 15 to 40",
        (
            series(ROUTES_JUDGED, "0+60x100", **_W),
            series(ROUTING_REGRET, "0x15 60+60x24 1500x60", **_W),
        ),
        {"15m": (), "37m": (Firing({}, "1s"),), "70m": ()},
    ),
    Scenario(
        "KvscopeRoutingRegret",
        "20 ms a decision",
        (series(ROUTES_JUDGED, "0+60x60", **_W), series(ROUTING_REGRET, "0+1.2x60", **_W)),
        {"40m": ()},
    ),
)

TELEMETRY: Final = (
    Scenario(
        "KvscopeTelemetryGap",
        "a first gap mark, in a series that was not there before",
        (series(GAP_MARKS, "_x10 1x40", **_S),),
        {"9m": (), "12m": (Firing(_S),), "30m": ()},
    ),
    Scenario("KvscopeTelemetryGap", "an old one", (series(GAP_MARKS, "3x60", **_S),), {"30m": ()}),
    Scenario(
        "KvscopeBatchesMissing",
        "two numbers stay away",
        (series(SOURCE_MISSING, "0x10 2x20 0x20", **_S),),
        {"10m": (), "26m": (Firing(_S, "2"),), "45m": ()},
    ),
    Scenario(
        "KvscopeBatchesMissing",
        "batches overtake each other",
        (series(SOURCE_MISSING, "0 1 0 2 0 1 0 0 3 0 0 1 0 0 2 0 0 0 1 0", **_S),),
        {"19m": ()},
    ),
    Scenario(
        "KvscopeBatchesMissing",
        "one was refused at minute 10 and stays missing, as does another at minute 80: each is told for an hour",
        (series(SOURCE_MISSING, "0x10 1x69 2x90", **_S),),
        {"9m": (), "26m": (Firing(_S, "1"),), "78m": (), "96m": (Firing(_S, "2"),), "150m": ()},
    ),
    Scenario(
        "KvscopeSourceSilent",
        "the last batch came at minute 10",
        (series(SOURCE_RECEIVED, "0+60x10 600x90", **_S),),
        {"10m": (), "16m": (Firing(_S, "6m 0s"),), "71m": ()},
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
        (series(SOURCE_ERROR, "0.01x10 2x30 0.01x30", **_S), _COMES),
        {"10m": (), "28m": (Firing(_S, "2s"),), "55m": ()},
    ),
    Scenario(
        "KvscopeClockError", "known to within 50 ms", (series(SOURCE_ERROR, "0.05x60", **_S), _COMES), {"30m": ()}
    ),
    Scenario(
        "KvscopeClockError",
        "a machine with a bad clock, taken down at minute 10",
        (series(SOURCE_ERROR, "2x90", **_S), series(SOURCE_RECEIVED, "0+60x10 600x80", **_S)),
        {"0m": (), "30m": (Firing(_S, "2s"),), "76m": ()},
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

COLLECTOR: Final = (
    Scenario(
        "KvscopeCollectorDown",
        "away from minute 10 to 30",
        (series(BUILD, "1x9 stale _x19 1x20", version="0.1.0"),),
        {"9m": (), "14m": (Firing(),), "35m": ()},
    ),
    Scenario("KvscopeCollectorDown", "a restart", (series(BUILD, "1x9 stale 1x20", version="0.1.0"),), {"12m": ()}),
    Scenario(
        "KvscopeCollectorLag",
        "rows two minutes old for ten minutes",
        (series(SOURCE_LAG, "0.2x10 120x10 0.2x30", **_S), _COMES),
        {"10m": (), "17m": (Firing(_S, "2m 0s"),), "40m": ()},
    ),
    Scenario(
        "KvscopeCollectorLag", "a spool drains", (series(SOURCE_LAG, "0.2x5 300x2 0.2x30", **_S), _COMES), {"8m": ()}
    ),
    Scenario(
        "KvscopeCollectorLag",
        "a sender that drained its spool at minute 10 and was taken down",
        (series(SOURCE_LAG, "300x90", **_S), series(SOURCE_RECEIVED, "0+60x10 600x80", **_S)),
        {"0m": (), "30m": (Firing(_S, "5m 0s"),), "76m": ()},
    ),
    Scenario(
        "KvscopeIngestFull",
        "60 of 64 batches",
        (series(INGEST_QUEUE, "3x10 60x5 3x30"), series(INGEST_QUEUE_LIMIT, "64x60")),
        {"10m": (), "14m": (Firing({}, "93.75%"),), "35m": ()},
    ),
    Scenario(
        "KvscopeIngestFull",
        "half full",
        (series(INGEST_QUEUE, "32x30"), series(INGEST_QUEUE_LIMIT, "64x30")),
        {"20m": ()},
    ),
    Scenario(
        "KvscopeCommitsSlow",
        "commits of 2 to 5 s from minute 10 to 40",
        (
            series(INGEST_COMMIT, "0+60x10 600x30 660+60x50", part=INGEST_COMMIT.bucket, le="0.1"),
            series(INGEST_COMMIT, "0+60x10 600x30 660+60x50", part=INGEST_COMMIT.bucket, le="2"),
            series(INGEST_COMMIT, "0+60x90", part=INGEST_COMMIT.bucket, le="5"),
            series(INGEST_COMMIT, "0+60x90", part=INGEST_COMMIT.bucket, le="+Inf"),
        ),
        # All of the last 5 minutes lie between 2 and 5 s; 99 of 100 of the way: 2 + 0.99 * 3.
        {"10m": (), "30m": (Firing({}, "4.97s"),), "60m": ()},
    ),
    Scenario(
        "KvscopeCommitsSlow",
        "all within 100 ms",
        (
            series(INGEST_COMMIT, "0+60x60", part=INGEST_COMMIT.bucket, le="0.1"),
            series(INGEST_COMMIT, "0+60x60", part=INGEST_COMMIT.bucket, le="+Inf"),
        ),
        {"40m": ()},
    ),
    Scenario(
        "KvscopeBatchesRejected",
        "a batch a minute from minute 10 to 20",
        (series(INGEST_REJECTED, "_x10 1+1x9 10x40", reason="invalid-rows"),),
        {"10m": (), "19m": (Firing({"reason": "invalid-rows"}, "10"),), "45m": ()},
    ),
    Scenario(
        "KvscopeBatchesRejected",
        "refused yesterday",
        (series(INGEST_REJECTED, "7x60", reason="invalid-rows"),),
        {"40m": ()},
    ),
    Scenario(
        "KvscopeDiskFull",
        "a gigabyte every two minutes of 40 that are free; then somebody prunes",
        (series(STORE_FREE, "40000000000x30 39500000000-500000000x50 60000000000x90"),),
        {"30m": (), "80m": (Firing(),), "175m": ()},
    ),
    Scenario(
        "KvscopeDiskFull",
        "the disk budget is used up",
        (series(STORE_BYTES, "10x10 96x30 10x60"), series(STORE_BUDGET, "100x100")),
        {"10m": (), "27m": (Firing(),), "50m": ()},
    ),
    Scenario(
        "KvscopeDiskFull",
        "full and steady, by retention",
        (series(STORE_FREE, "5000000000x90"), series(STORE_BYTES, "80x90"), series(STORE_BUDGET, "100x90")),
        {"90m": ()},
    ),
    Scenario(
        "KvscopeAlertsUndelivered",
        "two dead letters, replayed at minute 20",
        (series(ALERT_OUTBOX, "0x10 2x10 0x20", receiver="chat", state="dead"),),
        {"10m": (), "12m": (Firing({"receiver": "chat", "state": "dead"}, "2"),), "30m": ()},
    ),
    Scenario(
        "KvscopeAlertsUndelivered",
        "messages that wait for a retry, one after the other",
        (series(ALERT_OUTBOX, "0x10 1x5 0x20", receiver="chat", state="waiting"),),
        {"14m": ()},
    ),
    Scenario(
        "KvscopeLooksFail",
        "every look of ten minutes",
        (series(ALERT_FAILED_LOOKS, "0x10 1+1x9 10x60", check="hotspots"),),
        {"10m": (), "20m": (Firing({"check": "hotspots"}, "10"),), "70m": ()},
    ),
    Scenario(
        "KvscopeLooksFail",
        "one look in an hour",
        (series(ALERT_FAILED_LOOKS, "0x30 1x60", check="hotspots"),),
        {"40m": ()},
    ),
)


def scenarios(slo_goal: float = SLO_GOAL) -> tuple[Scenario, ...]:
    """All of them, for rules of that goal."""
    return (*_budgets(slo_goal), *REQUESTS_SEEN, *BLOCKS, *ROUTING, *TELEMETRY, *COLLECTOR)
