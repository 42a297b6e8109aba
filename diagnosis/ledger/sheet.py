"""Seconds that are given away, a row a cause: none twice, and of what is left no more than there is.

Invariant: what `carve` gave and what it returns sum to what there was; `join` moves seconds between rows and loses none.
"""

from __future__ import annotations

import numpy as np

from diagnosis.facts import F64, I64
from diagnosis.ledger.rows import ORDINARY, ROWS


class Sheet:
    """Seconds given away so far, a row a cause; the helper that keeps every request's sum."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.columns: dict[str, F64] = {}
        self.waits = np.zeros(n)

    def add(self, name: str, seconds: F64, rows: I64 | slice = slice(None)) -> None:
        """Seconds of one cause, of all requests or of those `rows`; unknown ones count nothing."""
        if name not in ROWS:
            raise KeyError(name)
        column = self.columns.setdefault(name, np.zeros(self.n))
        column[rows] += known_or_0(seconds)

    def carve(self, left: F64, name: str, seconds: F64) -> F64:
        """Give `seconds` (at most what is left) to `name`; returns what remains."""
        taken = np.clip(known_or_0(seconds), 0.0, np.maximum(left, 0.0))
        self.add(name, taken)
        return left - taken

    def join(self, part: Sheet, slow: F64) -> None:
        """Take over what another sheet gave away, ordinary work less the share `slow` [n] of it that slower steps added.

        What somebody answers for already stays with them: those seconds were worked out at the usual speed.
        """
        for name, column in part.columns.items():
            taken = column * slow if name in ORDINARY else np.zeros(self.n)
            self.add(name, column - taken)
            self.add("slow_steps", taken)

    def scale(self, factor: F64) -> None:
        """All seconds of each request times its factor [n]."""
        self.columns = {name: column * factor for name, column in self.columns.items()}
        self.waits = self.waits * factor

    def table(self, keep: I64) -> tuple[tuple[str, ...], F64]:
        """The names of the rows that hold anything, and their seconds, of the requests `keep`: [len(keep), number of names]."""
        names = tuple(name for name in ROWS if name in self.columns and np.any(self.columns[name][keep] != 0))
        parts = np.stack([self.columns[name][keep] for name in names], axis=1) if names else np.zeros((len(keep), 1))
        return names or ("unexplained",), parts

    def first_order(self, keep: I64) -> F64:
        """What the requests `keep` waited in the queue, whoever answers for it, s."""
        return self.waits[keep]


def known_or_0(values: F64) -> F64:
    """The values with 0 for the unknown ones."""
    return np.where(np.isfinite(values), values, 0.0)
