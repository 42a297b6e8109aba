"""A worker gets more than it can serve: the hotspots of a window, one alert a hotspot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alerts.condition import Condition, Look
from diagnosis.cause import all_causes
from diagnosis.hotspots.finding import Hotspot
from diagnosis.hotspots.judge import hotspots
from diagnosis.telling.wording import seconds
from engine_probe.errors import BadWindow, DiagnosisError
from store.interface import Store, Window

HOTSPOT = "KvscopeHotspotFound"


@dataclass(frozen=True, slots=True)
class HotspotCheck:
    """min_regret_s: a hotspot that lost less time a request of its own is nobody's page."""

    store: Store
    min_regret_s: float = 0.05
    name: str = "hotspots"

    def owns(self, labels: Mapping[str, str]) -> bool:
        """Hotspots."""
        return labels.get("alertname") == HOTSPOT

    def look(self, window: Window, baseline: str | None) -> Look:
        """Judge the routing of the window; nothing is compared."""
        try:
            found = hotspots(self.store, window)
        except (BadWindow, DiagnosisError) as error:
            return Look(can_tell=False, because=error.message)
        if found.status == "not_observable":
            return Look(can_tell=False, because=found.verdict)
        return Look(tuple(_condition(spot) for spot in found.hotspots if self._is_material(spot)))

    def report(self, window: str, baseline: str | None) -> str:
        """The page of workers: hotspots need no baseline, and a postmortem cannot be without one."""
        return f"/workers?suspect={window}"

    def _is_material(self, spot: Hotspot) -> bool:
        if spot.regret_s is None:
            return True
        return spot.num_requests > 0 and spot.regret_s / spot.num_requests >= self.min_regret_s


def _condition(spot: Hotspot) -> Condition:
    labels = {"alertname": HOTSPOT, "role": "hotspot", "severity": "warning", "kind": spot.kind or "unknown"}
    if spot.cause is not None:
        labels["cause"] = spot.cause
    if spot.subject["id"] is not None:
        labels[str(spot.subject["kind"])] = spot.subject["id"]
    lost = "" if spot.regret_s is None else f", {seconds(spot.regret_s)} lost in {spot.num_requests} requests"
    annotations = {
        "summary": f"{spot.statement}{lost}",
        "description": "; ".join(fact.statement for fact in spot.evidence[:4]),
        "remedy": spot.advice.text,
        "runbook_url": spot.cause if spot.cause is not None and spot.cause in all_causes() else HOTSPOT,
    }
    return Condition(labels, annotations, spot.interval["start_ns"])
