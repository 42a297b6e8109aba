"""What `hotspots` answers: the document, and the hotspots in it. Keys are the field names; unknown is None."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Evidence:
    """sql: gives `value` in the first column of one row; None where no SQL gives it."""

    statement: str
    value: float | None
    unit: str
    sql: str | None
    request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change, and from where on it pays. Unknown is None.

    replicas         workers that should hold the prefix; spill_above: requests waiting above which another worker is cheaper
    recompute_s      seconds that another worker computes the prefix in; wait_each_s: that each waiting request adds
    threshold_ratio  match below which the router's threshold must lie
    """

    text: str
    replicas: int | None = None
    spill_above: int | None = None
    recompute_s: float | None = None
    wait_each_s: float | None = None
    threshold_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Hotspot:
    """One hotspot. kind None: too much goes there, and why cannot be told (`because` says what is missing).

    regret_s      seconds lost against the best alternatives by the decisions of the interval that this is about
    num_requests  of those decisions; detected_ns: end of the first test interval in which it was found
    in_baseline   the same kind at the same subject was found in the baseline; None: there is no baseline
    """

    kind: str | None
    cause: str | None
    subject: dict[str, str | None]
    interval: dict[str, int]
    detected_ns: int
    regret_s: float | None
    regret_share: float | None
    num_requests: int
    statement: str
    because: str | None
    evidence: tuple[Evidence, ...]
    advice: Advice
    in_baseline: bool | None = None


@dataclass(frozen=True, slots=True)
class Hotspots:
    """The answer. status: hotspots | none | not_observable."""

    status: str
    verdict: str
    window: dict[str, Any]
    baseline: dict[str, Any] | None
    interval_s: float
    num_intervals: int
    false_alarm_rate: float
    num_decisions: int
    has_routes: bool
    policies: tuple[str, ...]
    regret: dict[str, Any]
    hotspots: tuple[Hotspot, ...]
    cannot_tell: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        return asdict(self)

    def beside(self, other: Hotspots) -> Hotspots:
        """This one with `other` as its baseline."""
        known = {(spot.kind, spot.subject["kind"], spot.subject["id"]) for spot in other.hotspots}
        marked = tuple(
            replace(spot, in_baseline=(spot.kind, spot.subject["kind"], spot.subject["id"]) in known)
            for spot in self.hotspots
        )
        new = sum(not spot.in_baseline for spot in marked)
        told = f" {new} of {len(marked)} were not there in the baseline." if marked else ""
        before = other.window | {"regret_mean_s": other.regret["mean_s"], "num_hotspots": len(other.hotspots)}
        return replace(self, hotspots=marked, baseline=before, verdict=self.verdict + told)
