"""What a check of the telemetry says, and what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TOLERANCE: Final = 0.05
"""Relative difference of two counts of the same thing that scraping once a second explains."""
RARE: Final = 0.01
"""Share of the requests up to which something that cannot be is an accident, and beyond which it is a contradiction."""
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


NUMBERS_OF_REUSE: Final[Mapping[str, frozenset[str]]] = {
    "counter": frozenset({"sample.prefix_hits_tokens_total", "sample.prompt_tokens_cached_total"}),
    "requests": frozenset({"request.cached_tokens", "request.computed_tokens", "request.prompt_blocks"}),
    "steps": frozenset({"step.prefill_tokens"}),
}
"""What cannot be trusted where the named witness of reuse is not telling the truth."""
