"""What several checks of one tick ask of the store: windows are chosen and loaded once, and forgotten when the tick is over.

Idea: contradictions, TTFT and TPOT look at the same window, and both latencies compare it with the same baseline. Reading it is the
larger part of a look's cost, in CPU and in the database's memory.
"""

from __future__ import annotations

from dataclasses import replace

from diagnosis.facts import Facts
from diagnosis.loading.load import load
from diagnosis.windows import Chosen, choose
from store.interface import Store, Window


class SeenOnce:
    """Facts by window and vantage, baselines by question. The checks of one evaluator share one; facts are never changed."""

    def __init__(self) -> None:
        self._facts: dict[tuple[Window, str], Facts] = {}
        self._chosen: dict[tuple[Window | None, Window, int], Chosen] = {}

    def load(self, store: Store, window: Window, name: str, vantage: str) -> Facts:
        """As `diagnosis.loading.load.load`. Raises BadWindow."""
        key = (window, vantage)
        if key not in self._facts:
            self._facts[key] = load(store, window, name, vantage)
        return replace(self._facts[key], name=name)

    def choose(self, store: Store, baseline: Window | None, suspect: Window, now_ns: int) -> Chosen:
        """As `diagnosis.windows.choose`. Raises BadWindow."""
        key = (baseline, suspect, now_ns)
        if key not in self._chosen:
            self._chosen[key] = choose(store, baseline, suspect, now_ns)
        return self._chosen[key]

    def forget(self) -> None:
        """The tick is over: let go of the rows."""
        self._facts.clear()
        self._chosen.clear()
