"""Numbers that were measured and not chosen: thresholds from runs in which nothing was wrong, confidence from runs with known faults.

They are kept in `calibration.toml`, which `kvscope lab calibrate` writes, each with its origin. A threshold is declared beside the
cause that uses it, with the least that is material at all and why; what null runs reach by chance raises it. A cause that is not in
the file yet is judged by its least. What is no threshold of a comparison but a definition (what a stall is, how many steps make a median)
stands beside its use, with what it means. Invariant: confidence is a monotone function of the certainty it is read off.
"""

from __future__ import annotations

import importlib
import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("calibration.toml")
MARGIN = 1.25
"""Times what 99 of 100 null runs stay within."""

_heard: ContextVar[dict[str, float] | None] = ContextVar("heard", default=None)
_declared: dict[str, Threshold] = {}


@dataclass(frozen=True, slots=True)
class Threshold:
    """A statistic of a window or of a pair of them has to reach `value` before a judgement may stand on it.

    least    what is material whatever the noise, in `unit`; why: what makes it material
    """

    name: str
    least: float
    unit: str
    says: str
    why: str

    @property
    def value(self) -> float:
        told = measured()["thresholds"].get(self.name)
        return self.least if told is None else max(self.least, float(told["value"]))

    def note(self, statistic: float) -> None:
        """Tell whoever listens the statistic: where it is worked out and another rule decides, or where there was nothing (0)."""
        heard = _heard.get()
        if heard is not None and math.isfinite(statistic):
            heard[self.name] = max(float(statistic), heard.get(self.name, -math.inf))

    def is_reached(self, statistic: float) -> bool:
        """Whether it stands out; whoever listens is told the statistic."""
        self.note(statistic)
        return bool(statistic >= self.value)


def all_reached(*asked: tuple[Threshold, float]) -> bool:
    """Whether every statistic reaches its threshold, for a judgement that needs them all.

    Chance has to reach all of them at once to mislead, so a statistic is told only where the others are reached, and else 0: what one of
    them does alone, in pairs where another is far away, raises no threshold.
    """
    missed = [one for one, statistic in asked if not statistic >= one.value]
    for one, statistic in asked:
        one.note(statistic if all(other is one for other in missed) else 0.0)
    return not missed


def threshold(name: str, *, least: float, unit: str, says: str, why: str) -> Threshold:
    """Declare one; a name is used once."""
    found = Threshold(name, least, unit, says, why)
    assert _declared.setdefault(name, found) == found, f"two thresholds are called {name}"
    return found


def declared() -> Mapping[str, Threshold]:
    """All thresholds of the causes, the hotspots and the checks, by name."""
    from diagnosis.cause import all_causes

    all_causes()
    for name in ("judge", "hotspots.judge"):  # what these are made of declares the rest
        importlib.import_module(f"diagnosis.{name}")
    return dict(sorted(_declared.items()))


@contextmanager
def listening() -> Iterator[dict[str, float]]:
    """The largest statistic that each threshold was asked about meanwhile."""
    heard: dict[str, float] = {}
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


def stated(certainty: float) -> float:
    """Confidence of a cause whose certainty is this: the share of such that were right in the lab."""
    told = measured()["confidence"]
    return float(np.interp(certainty, told["certainty"], told["right"]))


@cache
def measured() -> dict[str, Any]:
    """The file as it is; without one, thresholds are their least and confidence is the certainty itself."""
    if not FILE.exists():
        return {"thresholds": {}, "confidence": {"certainty": [0.0, 1.0], "right": [0.0, 1.0], "runs": []}}
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
