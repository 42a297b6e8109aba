"""All counts of the watched fleet: one book, and who writes what into it. Rows of imported runs are history and stay out."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from collector.counts.blocks import Blocks
from collector.counts.book import Book
from collector.counts.bounded import Names
from collector.counts.columns import live_rows
from collector.counts.outcomes import Outcomes
from collector.counts.routes import count_marks, count_routes, count_transfers
from collector.counts.slos import Slos
from collector.counts.steps import count_steps

MOST_POLICIES: Final = 20


class Fleet:
    """Counts committed rows; safe from several threads. `outcomes` is called by `Latencies`, which knows what was told before."""

    def __init__(self, max_workers: int, slos: Slos, top_tenants: int, top_prefixes: int) -> None:
        self.book = Book()
        self.worker = Names(max_workers)
        self.outcomes = Outcomes(self.book, slos, top_tenants, top_prefixes)
        self._policy = Names(MOST_POLICIES)
        self._blocks = Blocks(self.book, self.worker)
        self._lock = threading.Lock()

    def observe(self, tables: Mapping[str, pa.Table]) -> None:
        """Count every kind but requests."""
        if "step" in tables:
            count_steps(self.book, live_rows(tables["step"]), self.worker)
        if "block" in tables:
            with self._lock:
                self._blocks.count(live_rows(tables["block"]))
        if "route" in tables:
            count_routes(self.book, live_rows(tables["route"]), self.worker, self._policy)
        if "transfer" in tables:
            count_transfers(self.book, live_rows(tables["transfer"]), self.worker)
        if "mark" in tables:
            count_marks(self.book, live_rows(tables["mark"]))
