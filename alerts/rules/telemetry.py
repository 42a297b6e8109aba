"""Telemetry: rows that are lost, senders that fell silent, clocks that are off, numbers that contradict each other."""

from __future__ import annotations

from typing import Final

from alerts.rules.rule import Alerting, Rule, grew, lately, select
from store.metric_catalogue import CONTRADICTIONS, GAP_MARKS, SOURCE_ERROR, SOURCE_MISSING, SOURCE_RECEIVED

_LABELS = {"role": "telemetry"}
_SILENT = f"time() - {select(SOURCE_RECEIVED, source='!api')}"

RULES: Final[tuple[Rule, ...]] = (
    Alerting(
        "KvscopeTelemetryGap",
        grew(GAP_MARKS, "10m", "source"),
        "{{ $labels.source }} lost rows",
        "A sender says that its spool overflowed: verdicts on these minutes have less confidence, and counts are too low.",
        wait="0m",
        labels=_LABELS,
        todo=(
            "was the collector away for long (its log), or is the sender's spool too small for the time it may be away?",
            "docs/volume.md: what may be left out by intention, so that the rest is told whole",
        ),
    ),
    Alerting(
        "KvscopeBatchesMissing",
        # Against an hour ago: a batch that was refused stays missing for as long as its sender lives.
        f"min_over_time({select(SOURCE_MISSING)}[10m]) > ({select(SOURCE_MISSING)} offset 1h or 0 * {select(SOURCE_MISSING)})",
        "batches of {{ $labels.source }} have not come",
        "For 10 minutes {{ $value }} or more numbers of {{ $labels.source }}'s batches were skipped and did not come later. "
        "(An hour after the newest of them this ends by itself.)",
        wait="5m",
        labels=_LABELS,
        todo=("does the sender still run? A batch that was refused stays missing: KvscopeBatchesRejected says why",),
    ),
    Alerting(
        "KvscopeSourceSilent",
        f"{_SILENT} > 300 and {_SILENT} < 3600",
        "{{ $labels.source }} has fallen silent",
        "Nothing came from {{ $labels.source }} for {{ $value | humanizeDuration }}. (After an hour this ends by itself: it was taken down.)",
        severity="info",
        wait="0m",
        keep=None,
        labels=_LABELS,
        todo=("is the engine down, or only what watches it? kvscope doctor URL says what answers",),
    ),
    Alerting(
        "KvscopeClockError",
        f"{select(SOURCE_ERROR)} > 1{lately(SOURCE_RECEIVED, 'source')}",
        "the clock of {{ $labels.source }} is known badly",
        "It is only known to within {{ $value | humanizeDuration }}: instants of {{ $labels.source }} and of others are not compared.",
        wait="15m",
        cause="clock_skew",
        labels=_LABELS,
    ),
    Alerting(
        "KvscopeDataContradiction",
        f"{select(CONTRADICTIONS)} == 1",
        "telemetry contradicts itself ({{ $labels.check }})",
        "Counters, events, client and engine do not agree by the check {{ $labels.check }}. Believe neither number before that is settled.",
        wait="5m",
        cause="telemetry_contradiction",
        labels=_LABELS,
    ),
)
