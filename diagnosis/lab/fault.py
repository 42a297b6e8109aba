"""A fault: what it changes in a scene, and what a judge who knows everything would say of it.

Its identifier is a cause's stable name where it injects that cause, or the name of something that is no cause at all (`none`,
`aa`, `innocent_mark`, `too_few`), of which nothing may be said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from diagnosis.lab.scene import Scene, Tables
from engine_probe.errors import UsageError

Subject = tuple[str, str | None]
"""(worker | prefix | tenant | fleet, which one); None: it is not known before the run."""
FLEET: Subject = ("fleet", None)
Change = Callable[[Scene, float], Scene]
WORDS = ("mild", "typical", "strong")


@dataclass(frozen=True, slots=True)
class Severity:
    """How bad, in the fault's own unit. `mild` to `strong` is the range that `at` takes, whichever is the larger number."""

    mild: float
    typical: float
    strong: float
    unit: str

    def at(self, text: str) -> float:
        """`mild`, `typical`, `strong` or a number of the range. Raises UsageError."""
        if text in WORDS:
            return float(getattr(self, text))
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        low, high = sorted((self.mild, self.strong))
        if not low <= value <= high:
            raise UsageError(
                f"severity {text!r} is neither {', '.join(WORDS)} nor a number from {low:g} to {high:g} ({self.unit})"
            )
        return value


SWITCH = Severity(1, 1, 1, "on")


@dataclass(frozen=True, slots=True)
class Expected:
    """What may be said.

    causes      one of them must be ranked first
    acceptable  also right in the first place: what the fault does by way of, or a coarser name of it
    never       wrong wherever it is named with medium confidence or more
    is_silent   right is to name nothing
    quality     checks that must not be `ok`
    is_told     the cause is about what is told: it is to be named although no latency moved
    """

    causes: tuple[str, ...] = ()
    acceptable: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    is_silent: bool = False
    quality: tuple[str, ...] = ()
    is_told: bool = False


def _same(scene: Scene, severity: float) -> Scene:
    return scene


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    change     the scene with the fault, from the scene without
    setting    what both runs of it need: the scene in which the fault can show
    subject    of the cause; a function of the suspect's rows where the run decides it
    begins_at  share of the measured time after which it begins
    is_paired  both runs have the same calls (False: the suspect is drawn anew, as two windows of a live system are)
    requests   of its runs, where it must be a number of its own
    metric     ttft | tpot | e2e: what it shows in
    """

    name: str
    family: str
    what: str
    severity: Severity
    expected: Expected
    change: Change = _same
    setting: Change = _same
    subject: Subject | Callable[[Tables], Subject] = FLEET
    begins_at: float = 0.0
    is_paired: bool = True
    requests: int | None = None
    metric: str = "ttft"
    parts: tuple[str, ...] = field(default=())
    """Names of the faults that a pair is made of."""

    @property
    def has_setting(self) -> bool:
        """Whether it needs another scene than the base to show in."""
        return self.setting is not _same


def quiet_in(fault: Fault, prefix: str) -> Fault:
    """Nothing wrong: two draws of the traffic in the setting of this fault."""
    return Fault(
        f"{prefix}{fault.name}",
        "quiet",
        f"Two draws of the same traffic, in the setting of {fault.name}",
        fault.severity,
        Expected(is_silent=True),
        setting=fault.setting,
        is_paired=False,
        requests=fault.requests,
        metric=fault.metric,
    )


def pair(first: Fault, second: Fault) -> Fault:
    """Both at once. Raises UsageError where they cannot be told apart or run together."""
    if first.name == second.name:
        raise UsageError(f"{first.name} with itself is no pair")
    if first.parts or second.parts:
        raise UsageError("a pair is made of two single faults")
    for one in (first, second):
        if one.requests is not None or one.name in ("none", "aa"):
            raise UsageError(f"{one.name} is no fault that another can be added to")
    silent = first.expected.is_silent and second.expected.is_silent
    told = [one.expected for one in (first, second) if not one.expected.is_silent]
    causes = tuple(name for one in told for name in one.causes)
    acceptable = tuple(name for one in told for name in one.acceptable if name not in causes)
    allowed = {*causes, *acceptable}
    never = tuple(dict.fromkeys(name for one in told for name in one.never if name not in allowed))
    loud = first if not first.expected.is_silent else second
    return Fault(
        name=f"{first.name}+{second.name}",
        family="pairs",
        what=f"{first.what}; and {second.what[0].lower()}{second.what[1:]}",
        severity=Severity(0, 1, 2, "both mild (0), typical (1), strong (2)"),
        expected=Expected(causes, acceptable, never, silent, (*first.expected.quality, *second.expected.quality)),
        change=lambda scene, severity: _both(first.change, second.change, first, second, scene, severity),
        setting=lambda scene, severity: _both(first.setting, second.setting, first, second, scene, severity),
        subject=loud.subject,
        begins_at=min(first.begins_at, second.begins_at),
        is_paired=first.is_paired and second.is_paired,
        metric=loud.metric,
        parts=(first.name, second.name),
    )


def severity_of(part: Fault, severity: float) -> float:
    """A pair's severity (0, 1, 2) in the unit of one of its parts."""
    return part.severity.at(WORDS[min(round(severity), 2)])


def _both(one: Change, other: Change, first: Fault, second: Fault, scene: Scene, severity: float) -> Scene:
    return other(one(scene, severity_of(first, severity)), severity_of(second, severity))
