"""Numbers that a page does not state but holds: shares of time between two pages, states out of bit masks, sums.

A derivation sees one target's pages in their order and may remember the last one. Invariant: it says nothing that the
pages do not hold; without a former page there is no share of time, and a counter that fell has no share either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from engine_probe.adapters.prometheus import Sample


class Told(NamedTuple):
    """One number under its canonical name. `labels` holds `wire`, the name it was made of."""

    name: str
    labels: Mapping[str, str]
    value: float


class Derivation(Protocol):
    """What one table's pages hold beside what they state."""

    def told(self, samples: Sequence[Sample], at_ns: int) -> Sequence[Told]:
        """Numbers of the page with these samples, scraped at `at_ns`."""


class Shares:
    """Shares of time from counters of seconds: (busy, whole) of this page against those of the last one."""

    def __init__(self) -> None:
        self._last: dict[object, tuple[float, float]] = {}

    def share(self, key: object, busy: float, whole: float) -> float | None:
        """Increase of `busy` over that of `whole`, within 0 and 1; None on the first sight or where either fell."""
        last, self._last[key] = self._last.get(key), (busy, whole)
        if last is None or busy < last[0] or whole <= last[1]:
            return None
        return min((busy - last[0]) / (whole - last[1]), 1.0)
