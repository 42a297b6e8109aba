"""What an engine's counters gained over a run: the last number of each series less its first.

Invariant: a counter that fell (a restart) or was seen once gains nothing that is known; unknown is None.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

QUEUE = "queue_time_seconds"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker in one run. queue_s: seconds its requests waited, together; waiting_*: requests in its queue, over time and at most."""

    worker: str
    num_requests: int
    queue_s: float | None
    waiting_mean: float | None
    waiting_max: int | None


@dataclass(frozen=True, slots=True)
class Gains:
    """by_worker: sample name -> worker -> gain of all its series together; None where one of them fell."""

    by_worker: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: pa.Table | None) -> Gains:
        """Of the `sample` rows of a run; None: there are none."""
        if samples is None or not samples.num_rows:
            return cls()
        ends: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = {}
        rows = samples.sort_by("at_ns").select(["name", "worker", "labels", "value"]).to_pylist()
        for row in rows:
            if row["value"] is None or not row["name"].endswith(("_total", "_sum", "_count")):
                continue
            key = (row["name"], row["worker"] or "", tuple(sorted(row["labels"] or ())))
            ends.setdefault(key, []).append(row["value"])
        found: dict[str, dict[str, float | None]] = defaultdict(dict)
        for (name, worker, _), values in ends.items():
            fell = len(values) < 2 or any(after < before for before, after in itertools.pairwise(values))
            before = found[name].get(worker, 0.0)
            found[name][worker] = None if fell or before is None else before + values[-1] - values[0]
        return cls(found)

    def total(self, name: str) -> int | None:
        """Of all workers together."""
        told = self.by_worker.get(name, {}).values()
        known = [value for value in told if value is not None]
        return round(sum(known)) if known and len(known) == len(told) else None

    def loads(self, span_s: float) -> list[WorkerLoad]:
        """What each worker's requests waited; [] where no engine tells it. A queue's longest is not known."""
        waited, counts = (self.by_worker.get(f"{QUEUE}_{part}", {}) for part in ("sum", "count"))
        return [
            WorkerLoad(
                worker, round(count), seconds, seconds / span_s if span_s > 0 and seconds is not None else None, None
            )
            for worker in sorted(waited)
            if (count := counts.get(worker)) is not None
            for seconds in [waited[worker]]
        ]
