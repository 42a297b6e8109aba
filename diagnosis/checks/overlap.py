"""Steps that overlap: what they are told to take is more than the time in which they ran."""

from __future__ import annotations

from diagnosis.checks.check import Check
from diagnosis.facts import Facts


def overlapping_steps(facts: Facts) -> Check | None:
    """Workers with several steps in flight; from end to end a step is as long as tokens are apart, and that is what is compared."""
    told = {} if facts.steps is None else facts.steps.overlaps
    if not told:
        return None
    worst = max(told, key=lambda name: told[name])
    return Check(
        "steps",
        "ok",
        f"{facts.name}: steps overlap (those of {worst or 'the engine'} are told to take {told[worst]:.1f} times the time that they cover); "
        "a step is taken from the end of the one before to its own",
        value=told[worst],
        unit="times",
        subject=worst,
    )
