"""Why one worker was slower than the others, by what was measured of its GPU and host: what differs, and what does not.

Invariant: a measure is a reason only where the worker is worse than the median of the others by more than `APART`; one that is as
good as theirs is said too, since it rules something out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diagnosis.cause import Case, Evidence
from diagnosis.facts import HostMeasure
from diagnosis.telling.wording import listing, number, percent

APART: Final = 0.10
"""A tenth, of the others' value or as a share: the least that is told of a change anywhere."""


@dataclass(frozen=True, slots=True)
class Measure:
    """How a canonical sample speaks of slowness. worse: more | less; is_share: a number from 0 to 1, compared by difference."""

    text: str
    worse: str = "more"
    is_share: bool = False
    unit: str = "ratio"


MEASURES: Final = {
    "gpu_throttled": Measure("its clocks were held down", "more", True),
    "gpu_throttled_seconds_total": Measure("time with its clocks held down", unit="s"),
    "gpu_clock_hertz": Measure("its clock", "less", unit="Hz"),
    "gpu_temperature_celsius": Measure("its temperature", unit="degrees Celsius"),
    "gpu_memory_temperature_celsius": Measure("its memory's temperature", unit="degrees Celsius"),
    "gpu_xid_errors_total": Measure("XID errors", unit="errors"),
    "cpu_util": Measure("its host's CPU use", "more", True),
    "cpu_throttled_seconds_total": Measure("time that its CPU quota held it back", unit="s"),
    "cpu_thermal_throttles_total": Measure("times that its host's CPU got too hot", unit="times"),
}
"""Each is summed up as a mean; what ends in `_total` as its increase."""


def reasons(case: Case, worker: str) -> list[Evidence]:
    """Evidence from the samples of the worker's GPU and host over the time in which it was slow; empty where none were taken."""
    routing = case.suspect.routing
    found = [] if routing is None else [m for m in routing.hosts if m.worker == worker]
    apart = [measure for measure in found if is_worse(measure)]
    alike = [measure for measure in found if measure not in apart]
    out = [
        Evidence(
            f"meanwhile {_what(measure)} at {worker}: {_value(measure, measure.value)} "
            f"({_value(measure, measure.others)} at the others): a reason",
            measure.value,
            MEASURES[measure.name].unit,
            measure.sql,
        )
        for measure in apart
    ]
    if alike:
        told = [f"{_what(m)} {_value(m, m.value)} ({_value(m, m.others)})" for m in alike]
        out.append(
            Evidence(
                f"as at the others was {listing(told)}: not the reason",
                alike[0].value,
                MEASURES[alike[0].name].unit,
                alike[0].sql,
            )
        )
    return out


def is_worse(measure: HostMeasure) -> bool:
    """Whether the worker stands apart from the others in the direction that makes slow."""
    rule = MEASURES[measure.name]
    more = measure.value - measure.others if rule.worse == "more" else measure.others - measure.value
    return more > (APART if rule.is_share else APART * max(abs(measure.others), 1e-9))


def _what(measure: HostMeasure) -> str:
    text = MEASURES[measure.name].text
    return text if measure.reason is None else f"{text} for {measure.reason}"


def _value(measure: HostMeasure, value: float) -> str:
    rule = MEASURES[measure.name]
    return percent(value) if rule.is_share else f"{number(value)} {rule.unit}"
