"""Small rows and batches for tests of the store, each with what it must have and the rest unknown."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from engine_probe.schema import table_from_rows
from store.interface import Batch, BatchId

S = 1_000_000_000
START_NS = 1_764_000_000 * S
"""2025-11-24T16:00:00Z: the present of a test's clock."""


class Clock:
    """A clock that stands still until it is moved (ns)."""

    def __init__(self, now_ns: int = START_NS) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.now_ns += round(seconds * S)


def request(request_id: str = "r", at_s: float = 0.0, **facts: Any) -> dict[str, Any]:
    """A finished request of the client that arrived at START + at_s."""
    arrival = START_NS + round(at_s * S)
    base = {"request_id": request_id, "vantage": "client", "state": "finished", "arrival_ns": arrival, "at_ns": arrival}
    return base | facts


def step(number: int, **facts: Any) -> dict[str, Any]:
    """Step `number` of worker w, a second apart from the next."""
    return {"worker": "w", "step": number, "at_ns": START_NS + number * S} | facts


def steps(first: int, count: int, **facts: Any) -> pa.Table:
    """A table of steps `first`, `first` + 1, ..."""
    return table_from_rows("step", [step(number, **facts) for number in range(first, first + count)])


def batch(tables: dict[str, list[dict[str, Any]]], seq: int | None = None, **facts: Any) -> Batch:
    """A batch of rows by kind; with `seq` it is batch `seq` of sender `probe`, epoch `e`."""
    identity = None if seq is None else BatchId("probe", "e", seq)
    return Batch({kind: table_from_rows(kind, rows) for kind, rows in tables.items()}, identity, **facts)


def numbers(store: Any) -> list[int]:
    """Numbers of the stored steps in the order of the table."""
    return [int(number) for number in store.query("SELECT step FROM step").column(0).to_pylist()]
