"""What a check of the telemetry says, and what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diagnosis.calibration import threshold

TOLERANCE: Final = threshold(
    "checks.tolerance",
    least=0.05,
    unit="relative",
    says="difference of two counts of the same thing, half of what makes them disagree",
    why="a counter is scraped at other instants than requests begin and end: once a second, a twentieth of a short window",
)
RARE: Final = threshold(
    "checks.rare",
    least=0.01,
    unit="share of requests",
    says="requests of which something is told that cannot be, before it is a contradiction and no accident",
    why="a row in a hundred is cut short by a restart or a batch that was lost",
)
NOTHING: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one window. `status`: ok | warning | contradiction.

    about     rows (what was delivered) | telemetry (two numbers for one thing) | clock | service (what the engine did wrong)
    touches   names of observations (`kind.column`) that cannot be trusted while this stands; None: any of them
    value     the number behind the statement; unit: its unit. None: there is no single one
    subject   the worker it is about, where it is one
    """

    check: str
    status: str
    statement: str
    about: str = "rows"
    touches: frozenset[str] | None = None
    value: float | None = None
    unit: str = ""
    subject: str | None = None

    @property
    def contradicts(self) -> bool:
        return self.status == "contradiction"

    def is_under(self, needs: tuple[str, ...]) -> bool:
        """Whether a cause with these needs rests on what this check found fault with.

        A need that something else can meet (`a|b`) is touched only where all of its options are.
        """
        if self.touches is None:
            return True
        return any(all(option in self.touches for option in need.split("|")) for need in needs)


def is_rare(share: float, beside: float = 0.0) -> bool:
    """Whether so few requests tell what cannot be that it is an accident. beside: share of which that is known already."""
    RARE.note(share - beside)
    return share <= RARE.value + beside


def differ(one: float, other: float, *, least: float, error: float) -> bool:
    """Whether two counts of one thing differ by more than `least`, their sampling `error`, and what scraping explains."""
    beyond, larger = abs(one - other) - error, max(one, other)
    TOLERANCE.note(beyond / (2 * larger) if beyond > least else 0.0)
    return beyond > max(least, 2 * TOLERANCE.value * larger)


NUMBERS_OF_REUSE: Final[Mapping[str, frozenset[str]]] = {
    "counter": frozenset({"sample.prefix_hits_tokens_total", "sample.prompt_tokens_cached_total"}),
    "requests": frozenset({"request.cached_tokens", "request.computed_tokens", "request.prompt_blocks"}),
    "steps": frozenset({"step.prefill_tokens"}),
}
"""What cannot be trusted where the named witness of reuse is not telling the truth."""
