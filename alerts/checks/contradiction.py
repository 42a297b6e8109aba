"""Counters, events, client and engine do not agree: whatever rests on them is in doubt, quiet dashboards too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alerts.condition import Condition, Look
from alerts.seen_once import SeenOnce
from diagnosis import quality
from diagnosis.windows import judged_vantage, vantages
from engine_probe.errors import BadWindow
from store.interface import Store, Window

CONTRADICTION = "KvscopeContradiction"


@dataclass(frozen=True, slots=True)
class ContradictionCheck:
    """The checks of data quality that every diagnosis begins with (docs/diagnosis.md). `seen` is shared by a tick's checks."""

    store: Store
    name: str = "contradictions"
    seen: SeenOnce | None = None

    def owns(self, labels: Mapping[str, str]) -> bool:
        """Contradictions."""
        return labels.get("alertname") == CONTRADICTION

    def look(self, window: Window, baseline: str | None) -> Look:
        """Check the window alone."""
        seen = SeenOnce() if self.seen is None else self.seen
        vantage = judged_vantage(vantages(self.store, window))
        if vantage is None:
            return Look(can_tell=False, because=f"no requests arrived in {window}")
        try:
            with self.store.sharing():
                checks = quality.check(seen.load(self.store, window, "the window", vantage))
        except BadWindow as error:
            return Look(can_tell=False, because=error.message)
        assert window.start_ns is not None
        found = [
            _condition(check.check, check.statement, window.start_ns)
            for check in checks
            if check.status == "contradiction"
        ]
        return Look(tuple(found))

    def report(self, window: str, baseline: str | None) -> str:
        """The report of the window: its part on the quality of the data."""
        return f"/api/v1/reports?suspect={window}&format=html"


def _condition(check: str, statement: str, start_ns: int) -> Condition:
    labels = {
        "alertname": CONTRADICTION,
        "role": "telemetry",
        "severity": "warning",
        "cause": "telemetry_contradiction",
        "check": check,
    }
    annotations = {
        "summary": f"telemetry contradicts itself ({check})",
        "description": statement,
        "remedy": "do not believe either number before this is settled: verdicts of these minutes have less confidence",
        "runbook_url": CONTRADICTION,
    }
    return Condition(labels, annotations, start_ns)
