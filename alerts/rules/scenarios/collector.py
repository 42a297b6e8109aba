"""What the rules of the collector itself are held to."""

from __future__ import annotations

from typing import Final

from alerts.rules.scenario import Firing, Scenario, series
from alerts.rules.scenarios.common import COMES, SENDER
from store.metric_catalogue import (
    ALERT_FAILED_LOOKS,
    ALERT_OUTBOX,
    BUILD,
    INGEST_COMMIT,
    INGEST_QUEUE,
    INGEST_QUEUE_LIMIT,
    INGEST_REJECTED,
    SOURCE_LAG,
    SOURCE_RECEIVED,
    STORE_BUDGET,
    STORE_BYTES,
    STORE_FREE,
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
        (series(SOURCE_LAG, "0.2x10 120x10 0.2x30", **SENDER), COMES),
        {"10m": (), "17m": (Firing(SENDER, "2m 0s"),), "40m": ()},
    ),
    Scenario(
        "KvscopeCollectorLag", "a spool drains", (series(SOURCE_LAG, "0.2x5 300x2 0.2x30", **SENDER), COMES), {"8m": ()}
    ),
    Scenario(
        "KvscopeCollectorLag",
        "a sender that drained its spool at minute 10 and was taken down",
        (series(SOURCE_LAG, "300x90", **SENDER), series(SOURCE_RECEIVED, "0+60x10 600x80", **SENDER)),
        {"0m": (), "30m": (Firing(SENDER, "5m 0s"),), "76m": ()},
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
