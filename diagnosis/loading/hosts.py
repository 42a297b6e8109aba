"""What was measured beside a hotspot: the GPU and host of a straggler, and block events that a router which began late cannot attach.

Read only where there is such a hotspot. A measure comes with the SQL that gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from diagnosis.claims.straggler_reason import MEASURES
from diagnosis.facts import HostMeasure, Unattached
from diagnosis.hotspots.finding import Hotspot
from store.evidence.lineage import ON_DEVICE, window_sql
from store.interface import Store, Window
from store.statements import literal

INCREASE: Final = "_total"
MOST_EVENTS: Final = 300_000
"""Block events that are replayed, the first ones: an index that began anew is worst off at its beginning."""


def hosts(store: Store, window: Window, stragglers: Sequence[Hotspot]) -> list[HostMeasure]:
    """Each measure of the GPU and host of each straggler, over its slow time, beside the median of the other workers."""
    found = []
    for spot in stragglers:
        worker = str(spot.subject["id"])
        among = Window(spot.interval["start_ns"], spot.interval["end_ns"], window.run_id)
        condition, params = window_sql(among, "at_ns")
        rows = store.query(
            "SELECT name, labels['reason'] AS reason, worker, avg(value) AS mean, max(value) - min(value) AS increase FROM sample "
            f"WHERE {condition} AND worker IS NOT NULL AND name IN ({', '.join(map(literal, MEASURES))}) GROUP BY ALL",
            params,
        ).to_pylist()
        values: dict[tuple[str, str | None], dict[str, float]] = {}
        for row in rows:
            how = "increase" if row["name"].endswith(INCREASE) else "mean"
            values.setdefault((row["name"], row["reason"]), {})[row["worker"]] = float(row[how])
        for (name, reason), by_worker in sorted(values.items(), key=lambda each: (each[0][0], each[0][1] or "")):
            others = [value for other, value in by_worker.items() if other != worker]
            if worker in by_worker and others:
                sql = _sql(condition, name, reason, worker)
                found.append(HostMeasure(worker, name, reason, by_worker[worker], float(np.median(others)), sql))
    return found


def _sql(condition: str, name: str, reason: str | None, worker: str) -> str:
    how = "max(value) - min(value)" if name.endswith(INCREASE) else "avg(value)"
    labelled = "labels['reason'] IS NULL" if reason is None else f"labels['reason'] = {literal(reason)}"
    return f"SELECT {how} AS value FROM sample WHERE {condition} AND worker = {literal(worker)} AND name = {literal(name)} AND {labelled}"


def unattached(store: Store, window: Window, stale: Sequence[Hotspot]) -> Unattached | None:
    """What an index that began with the hotspot could not attach of the blocks stored since; None where no block tells.

    A stored block is attached where it has no parent, or its parent was attached before; a replay of the events, as an index does it.
    """
    if not stale:
        return None
    since, until = (pick(spot.interval[at] for spot in stale) for pick, at in ((min, "start_ns"), (max, "end_ns")))
    condition, params = window_sql(Window(since, until, window.run_id), "at_ns")
    table = store.query(
        f"SELECT block_hash, parent_hash FROM block WHERE {condition} AND change = 'stored' AND {ON_DEVICE} ORDER BY at_ns "
        f"LIMIT {MOST_EVENTS}",
        params,
    )
    if table.num_rows == 0:
        return None
    known: set[int] = set()
    for block, parent in zip(table["block_hash"].to_pylist(), table["parent_hash"].to_pylist(), strict=True):
        if parent is None or parent in known:
            known.add(block)
    stored = table["block_hash"].to_pylist()
    return Unattached(sum(block not in known for block in stored), len(stored))
