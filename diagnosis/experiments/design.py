"""What an experiment compares, and in which order its runs are made.

Idea: a repeat is one round over all arms with one trace, so arms are compared on the same calls, pair by pair; inside a round
the order is drawn by seed, so that what drifts with time (heat, a neighbour, a cache that fills) does not favour an arm.
Invariant: every arm is run once in every round; the same seed gives the same order.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_probe.errors import UsageError

MIN_REPEATS = 3
"""Two repeats cannot tell their spread from chance: Student's t of one degree of freedom is 12.7."""
FACTORIAL = ("A", "B", "C", "D")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of serving.

    settings   what it is run with, by name, as far as arms can differ in it
    is_warm    what the warm-up left in the cache is there when counting begins; else the cache is emptied then
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    is_warm: bool = True

    def __post_init__(self) -> None:
        if not self.name or not all(c.isalnum() or c in "-_." for c in self.name) or self.name.startswith("."):
            raise UsageError(
                f"an arm named {self.name!r} cannot be a folder and a run; use letters, digits, '-', '_' and '.'"
            )


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: an arm, the number of its repeat (from 1), and when its turn comes (from 0)."""

    arm: Arm
    repeat: int
    turn: int

    @property
    def run_id(self) -> str:
        return f"{self.arm.name}/{self.repeat}"


def factorial(off: Mapping[str, str], on: Mapping[str, str]) -> list[Arm]:
    """A off/cold, B off/warm, C on/cold, D on/warm: the cache, and whether it has seen the prefixes."""
    return [Arm("A", off, is_warm=False), Arm("B", off), Arm("C", on, is_warm=False), Arm("D", on)]


def schedule(arms: Sequence[Arm], repeats: int, seed: int) -> list[Trial]:
    """Every run in its turn: round by round, the arms of a round in an order drawn by `seed`.

    Raises UsageError for fewer than two arms or three repeats, or two arms of one name.
    """
    names = [arm.name for arm in arms]
    if len(arms) < 2:
        raise UsageError(f"an experiment compares two arms or more; there is {', '.join(names) or 'none'}")
    if len({name.casefold() for name in names}) < len(names):
        raise UsageError(f"two arms have one name: {', '.join(names)}; each is a folder of its own")
    if repeats < MIN_REPEATS:
        raise UsageError(
            f"{repeats} repeats cannot tell a change from chance; give {MIN_REPEATS} or more", repeats=repeats
        )
    rng = random.Random(f"{seed}/order")
    trials: list[Trial] = []
    for repeat in range(1, repeats + 1):
        turn = list(arms)
        rng.shuffle(turn)
        trials += [Trial(arm, repeat, len(trials) + place) for place, arm in enumerate(turn)]
    return trials


def contrasts(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Pairs (baseline, suspect) to be read, the one that was asked for first.

    Of A, B, C, D: B to D is what the warm cache changes, A to C the cold one, C to D what warming does, A to B must be
    nothing (without a cache nothing can be warm). Else everything against the first arm.
    """
    names = [arm.name for arm in arms]
    if tuple(sorted(names)) == FACTORIAL:
        return [("B", "D"), ("A", "C"), ("C", "D"), ("A", "B")]
    return [(names[0], name) for name in names[1:]]
