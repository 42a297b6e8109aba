"""The collector itself: gone, late, full, refusing, out of disk, or unable to tell anybody."""

from __future__ import annotations

from typing import Final

from alerts.rules.rule import Alerting, Rule, grew, increase, lately, rate, select
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

_LABELS = {"role": "collector"}

RULES: Final[tuple[Rule, ...]] = (
    Alerting(
        "KvscopeCollectorDown",
        f"absent({select(BUILD)})",
        "no collector is scraped",
        "Prometheus has no kvscope collector: nothing is recorded, and every other alert of this file is blind.",
        severity="critical",
        wait="2m",
        keep=None,
        labels=_LABELS,
        todo=(
            "is the process there, and does /readyz answer? Senders keep their rows meanwhile, as long as their spools last",
        ),
    ),
    Alerting(
        "KvscopeCollectorLag",
        f"{select(SOURCE_LAG)} > 60{lately(SOURCE_RECEIVED, 'source')}",
        "rows of {{ $labels.source }} come late",
        "The newest row of {{ $labels.source }} was {{ $value | humanizeDuration }} old when it came.",
        wait="5m",
        labels=_LABELS,
        todo=(
            "KvscopeIngestFull or a slow commit beside it: the collector is the bottleneck (docs/volume.md)",
            "else the way there: the sender's spool drains, or its clock is off",
        ),
    ),
    Alerting(
        "KvscopeIngestFull",
        f"{select(INGEST_QUEUE)} / {select(INGEST_QUEUE_LIMIT)} > 0.8",
        "the collector's queue is nearly full",
        "{{ $value | humanizePercentage }} of the batches that fit are on their way to disk; the next ones are answered with 429.",
        wait="2m",
        labels=_LABELS,
        todo=("fewer block events (docs/volume.md), a faster disk, or a second collector",),
    ),
    Alerting(
        "KvscopeCommitsSlow",
        f"histogram_quantile(0.99, {rate(INGEST_COMMIT, '5m', 'le', series=INGEST_COMMIT.bucket)}) > 1",
        "commits take more than a second",
        "99 of 100 batches of 5 minutes were on disk after {{ $value | humanizeDuration }}.",
        wait="10m",
        labels=_LABELS,
        todo=("a slow or busy disk; heavy queries beside ingest (query times are on the dashboard Collector)",),
    ),
    Alerting(
        "KvscopeBatchesRejected",
        grew(INGEST_REJECTED, "10m", "reason"),
        "batches are refused ({{ $labels.reason }})",
        "{{ $value | humanize }} batches of 10 minutes were refused: {{ $labels.reason }}. What they held is not stored; where the reason "
        "passes (disk-full, too-many-batches) their senders keep it and try again.",
        wait="5m",
        labels=_LABELS,
        todo=("the sender's log has the problem document: kind, row, column, value and what was expected",),
    ),
    Alerting(
        "KvscopeDiskFull",
        f"predict_linear({select(STORE_FREE)}[1h], 14400) < 0 or {select(STORE_BYTES)} / {select(STORE_BUDGET)} > 0.95",
        "the collector's disk is full within four hours",
        "By the trend of an hour nothing is free then, or the disk budget is used up to 95 %; batches get 507 and wait with their senders.",
        severity="critical",
        wait="15m",
        labels=_LABELS,
        todo=(
            "shorter retention (KVSCOPE_RETENTION__MAX_AGE_S, KVSCOPE_RETENTION__MAX_BYTES), or kvscope store prune now",
        ),
    ),
    Alerting(
        "KvscopeAlertsUndelivered",
        f"{select(ALERT_OUTBOX, state='dead')} > 0 or min_over_time({select(ALERT_OUTBOX, state='waiting')}[15m]) > 0",
        "{{ $labels.receiver }} does not get its messages",
        "{{ $value | humanize }} messages to {{ $labels.receiver }} wait for 15 minutes, or are dead letters.",
        wait="0m",
        labels=_LABELS,
        todo=("kvscope alerts list --deliveries dead says why; kvscope alerts replay sends them again",),
    ),
    Alerting(
        "KvscopeLooksFail",
        f"{increase(ALERT_FAILED_LOOKS, '30m', 'check')} > 2",
        "the evaluator cannot look ({{ $labels.check }})",
        "{{ $value | humanize }} looks of 30 minutes ended with an error: nobody would be told of what {{ $labels.check }} looks for.",
        wait="0m",
        labels=_LABELS,
        todo=("the collector's log has the reason with each: `check failed`",),
    ),
)
