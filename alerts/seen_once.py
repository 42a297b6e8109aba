"""What several checks of one tick ask of the store: windows are chosen and loaded once, and forgotten when the tick is over.

Idea: contradictions, TTFT and TPOT look at the same window, and both latencies compare it with the same baseline. Reading it is the
larger part of a look's cost, in CPU and in the database's memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from diagnosis.facts import Facts
from diagnosis.loading.load import load
from diagnosis.windows import Chosen, choose
from engine_probe.errors import BadWindow
from store.evidence.lineage import window_sql
from store.interface import Store, Window

MOST_REQUESTS: Final = 300_000
"""More in one window are not looked at: the collector would be busy with the minute before for longer than a minute."""


class SeenOnce:
    """Facts by window and vantage, baselines by question. The checks of one evaluator share one; facts are never changed."""

    def __init__(self) -> None:
        self._facts: dict[tuple[Window, str], Facts] = {}
        self._chosen: dict[tuple[Window | None, Window, int], Chosen] = {}

    def load(self, store: Store, window: Window, name: str, vantage: str) -> Facts:
        """As `diagnosis.loading.load.load`. Raises BadWindow, also where the window holds more than MOST_REQUESTS."""
        key = (window, vantage)
        if key not in self._facts:
            _check_size(store, window, vantage)
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


def _check_size(store: Store, window: Window, vantage: str) -> None:
    condition, params = window_sql(window, "arrival_ns")
    sql = f"SELECT count(*) AS n FROM request WHERE {condition} AND vantage = ?"
    num_requests = store.query(sql, [*params, vantage]).column("n")[0].as_py()
    if num_requests > MOST_REQUESTS:
        raise BadWindow(
            f"{num_requests:,} requests from {window}; a look for alerts takes at most {MOST_REQUESTS:,}: shorten the windows "
            "(KVSCOPE_ALERTS__WINDOW_S, KVSCOPE_ALERTS__HOLD_S), or ask `kvscope diagnose`, which knows no limit",
            requests=num_requests,
        )
