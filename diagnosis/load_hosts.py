"""What was measured beside a hotspot: the GPU and host of a straggler, and block events that a router which began late cannot attach.

Read only where there is such a hotspot. Each number comes with the SQL that gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from diagnosis.facts import HostMeasure, Unattached
from diagnosis.hotspots.finding import Hotspot
from diagnosis.straggler_reason import MEASURES
from store.interface import Store, Window
from store.lineage import ON_DEVICE, past_of, window_sql
from store.statements import literal

INCREASE: Final = "_total"


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
    """Of the blocks stored since the index went wrong, those whose parent was announced before; None where no block tells."""
    if not stale:
        return None
    since = min(spot.interval["start_ns"] for spot in stale)
    until = max(spot.interval["end_ns"] for spot in stale)
    past, params = window_sql(past_of(Window(window.start_ns, until, window.run_id)), "at_ns")
    stored = (
        f"SELECT worker, block_hash, parent_hash, at_ns FROM block WHERE {past} AND change = 'stored' AND {ON_DEVICE}"
    )
    before = f"SELECT DISTINCT worker, block_hash AS parent_hash FROM ({stored}) WHERE at_ns < {since}"
    both = (
        f"FROM ({stored}) n LEFT JOIN (SELECT *, true AS is_old FROM ({before})) o ON n.parent_hash = o.parent_hash "
        f"AND n.worker IS NOT DISTINCT FROM o.worker WHERE n.at_ns >= {since} AND n.parent_hash IS NOT NULL"
    )
    row = store.query(f"SELECT count(*) FILTER (is_old) AS orphans, count(*) AS stored {both}", params * 2).to_pylist()[
        0
    ]
    if not row["stored"]:
        return None
    return Unattached(row["orphans"], row["stored"], f"SELECT count(*) FILTER (is_old) / count(*) AS share {both}")
