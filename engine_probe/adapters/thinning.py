"""Store of a scraped page only what says something: numbers that stand still are written at their edges.

Invariant: lossless to differences. Of a run of equal values the first and the last are kept (and one every
`heartbeat_s`), so the sum of increments between any two scrapes, and the value at any scrape by carrying the last one
forward, are those of the full page. Series in `always` are kept at every scrape: their means and their zeros are
asked for in any window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from engine_probe.events import CANONICAL_SAMPLES, HOST_SAMPLES

Row = tuple[str | None, int, str, Mapping[str, str], float]  # worker, at_ns, name, labels, value

ALWAYS: Final = frozenset(name for name in CANONICAL_SAMPLES if not (name in HOST_SAMPLES and name.endswith("_total")))
HEARTBEAT_S: Final = 15.0


class Thinner:
    """Passes on the rows of successive scrapes of one target, holding back runs of equal values."""

    def __init__(self, *, heartbeat_s: float = HEARTBEAT_S, always: frozenset[str] = ALWAYS) -> None:
        self._heartbeat_ns = round(heartbeat_s * 1e9)
        self._always = always
        # Keyed by name and identity of the labels; the rows kept hold the labels, so no identity is ever used again.
        self._kept: dict[tuple[str, str | None, int], Row] = {}  # last row written
        self._held: dict[tuple[str, str | None, int], Row] = {}  # newest row held back

    def thin(self, rows: Iterable[Row]) -> list[Row]:
        """Rows of one scrape -> rows to store now (some may be from earlier scrapes)."""
        out: list[Row] = []
        for row in rows:
            if row[2] in self._always:
                out.append(row)
                continue
            key = (row[2], row[0], id(row[3]))
            kept = self._kept.get(key)
            if kept is not None and kept[4] == row[4] and row[1] - kept[1] < self._heartbeat_ns:
                self._held[key] = row
                continue
            held = self._held.pop(key, None)
            if held is not None and held[4] != row[4]:
                out.append(held)
            out.append(row)
            self._kept[key] = row
        return out

    def flush(self) -> list[Row]:
        """Rows still held back: the last sight of every series that stood still. Call at the end of a recording."""
        held = list(self._held.values())
        self._held.clear()
        return held
