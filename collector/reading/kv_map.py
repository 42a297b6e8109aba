"""The KV map: which blocks a worker's cache held when, whose they were, and whether a request used them at that moment.

Blocks have no place of their own in the rows, so each life of a block (stored until evicted, removed or cleared) gets a slot that is
free at the time: the picture is as high as the most blocks that lay there at once. Of many blocks a fixed share is drawn, chosen by hash,
so that a block is either drawn with its whole life or not at all.

Invariant: a cell shows one life, that which began last at or before the middle of its stretch of time; no cell is guessed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from store.evidence.lineage import ON_DEVICE, PAST_NS, window_sql
from store.interface import Store, Window

Colour = Literal["tenant", "prefix", "state"]
I64 = npt.NDArray[np.int64]

COLUMNS: Final = 240
MOST_EVENTS: Final = 150_000
MOST_OWNERS: Final = 8
OTHERS: Final = "others"
UNKNOWN: Final = "not told"
IN_USE: Final = "in use"
CACHED: Final = "cached, unused"
EMPTY: Final = -1


@dataclass(frozen=True, slots=True)
class Lives:
    """Lives of blocks on one worker, one a position, in order of their start.

    start_ns, end_ns   [lives]; end_ns is the end of the window where nothing ended a life
    owner              [lives] position in `owners` of whom the block was stored for
    """

    start_ns: I64
    end_ns: I64
    block: npt.NDArray[np.uint64]
    owner: I64
    owners: list[str]
    drawn_share: float


def kv_map(store: Store, worker: str, window: Window, colour: Colour) -> dict[str, Any]:
    """`cells` [slots][columns] with positions in `legend`, EMPTY where no block lay; no `cells` where the worker told nothing."""
    start_ns, end_ns = _span(store, worker, window)
    lives = _lives(store, worker, window, start_ns, end_ns, "prefix" if colour == "prefix" else "tenant")
    slots = slots_of(lives.start_ns, lives.end_ns)
    edges = np.linspace(start_ns, end_ns, COLUMNS + 1)
    middle = ((edges[:-1] + edges[1:]) / 2).astype(np.int64)
    cells = np.full((int(slots.max(initial=-1)) + 1, COLUMNS), EMPTY, dtype=np.int64)
    first, last = np.searchsorted(middle, lives.start_ns), np.searchsorted(middle, lives.end_ns)
    legend = lives.owners
    values = lives.owner
    if colour == "state":
        legend, values = [CACHED, IN_USE], np.zeros(lives.owner.size, dtype=np.int64)
    for slot, begin, end, value in zip(slots, first, last, values, strict=True):
        cells[slot, begin:end] = value
    if colour == "state":
        _mark_use(store, worker, window, lives, slots, middle, cells, start_ns, end_ns)
    return {
        "worker": worker,
        "window": str(window),
        "colour": colour,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "at_ns": middle.tolist(),
        "legend": legend,
        "cells": cells.tolist(),
        "gaps": _gaps(store, worker, window),
        "blocks_drawn": int(cells.shape[0]),
        "drawn_share": lives.drawn_share,
    }


def _gaps(store: Store, worker: str, window: Window) -> dict[str, list[float] | None]:
    """How long blocks had been unused when they were hit (the reuse gap) and when they were evicted: 0, 5 ... 100 % of them, s.

    What a preempted request finds of its own again is no reuse and is left out.
    """
    condition, params = window_sql(window, "at_ns")
    steps = [round(0.05 * step, 2) for step in range(21)]
    sql = (
        f"SELECT change, quantile_disc(idle_s, {steps}) AS idle_s FROM block WHERE worker = ? AND {condition} AND {ON_DEVICE} "
        "AND change IN ('hit', 'evicted') AND reason IS DISTINCT FROM 'self' AND idle_s IS NOT NULL GROUP BY change"
    )
    told = {row["change"]: row["idle_s"] for row in store.query(sql, [worker, *params]).to_pylist()}
    return {change: told.get(change) for change in ("hit", "evicted")}


def slots_of(start_ns: I64, end_ns: I64) -> I64:
    """A slot for each life (given in order of start): the lowest that is free, so that no two lives share one at a time."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    slots = np.empty(start_ns.size, dtype=np.int64)
    used = 0
    for position, (start, end) in enumerate(zip(start_ns.tolist(), end_ns.tolist(), strict=True)):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, used = used, used + 1
        slots[position] = slot
        heapq.heappush(busy, (end, slot))
    return slots


def _span(store: Store, worker: str, window: Window) -> tuple[int, int]:
    condition, params = window_sql(window, "at_ns")
    sql = f"SELECT min(at_ns) AS first_ns, max(at_ns) AS last_ns FROM block WHERE worker = ? AND {condition} AND {ON_DEVICE}"
    row = store.query(sql, [worker, *params]).to_pylist()[0]
    start = window.start_ns if window.start_ns is not None else row["first_ns"] or 0
    end = window.end_ns if window.end_ns is not None else (row["last_ns"] or 0) + 1
    return int(start), int(max(end, start + COLUMNS))


def _lives(store: Store, worker: str, window: Window, start_ns: int, end_ns: int, owned_by: str) -> Lives:
    """Lives that touch the window. A block that was there before is known if its storing lies at most an hour back."""
    reach = Window(start_ns - PAST_NS, end_ns, window.run_id)
    condition, params = window_sql(reach, "b.at_ns", "")
    condition = condition.replace("run_id", "b.run_id")
    where = f"b.worker = ? AND {condition} AND {ON_DEVICE.replace('tier', 'b.tier')}"
    number = int(
        store.query(f"SELECT count(*) AS n FROM block b WHERE {where}", [worker, *params]).column(0)[0].as_py()
    )
    one_of = max(1, -(-number // MOST_EVENTS))
    owner = "r.tenant" if owned_by == "tenant" else "r.prefix_hash::VARCHAR"
    sql = f"""
        WITH event AS (
            SELECT b.block_hash, b.at_ns, b.change, b.request_id FROM block b
            WHERE {where} AND b.change IN ('stored', 'loaded', 'evicted', 'removed') AND b.block_hash % {one_of} = 0
        ), reset AS (SELECT list(b.at_ns ORDER BY b.at_ns) AS at FROM block b WHERE {where} AND b.change = 'cleared'),
        life AS (
            SELECT block_hash, at_ns AS start_ns, change, request_id,
                lead(at_ns) OVER (PARTITION BY block_hash ORDER BY at_ns) AS next_ns
            FROM event
        ), owned AS (SELECT request_id, any_value({owner}) AS owner FROM request r WHERE {_run(window)} GROUP BY request_id)
        SELECT life.block_hash, life.start_ns, least(coalesce(next_ns, {end_ns}),
            coalesce(list_filter(reset.at, x -> x > life.start_ns)[1], {end_ns})) AS end_ns, owned.owner
        FROM life CROSS JOIN reset LEFT JOIN owned ON owned.request_id = life.request_id
        WHERE life.change IN ('stored', 'loaded') ORDER BY life.start_ns
    """
    found = store.query(sql, [worker, *params, worker, *params])
    begin, end = (found.column(name).to_numpy().astype(np.int64) for name in ("start_ns", "end_ns"))
    told = found.column("owner").to_pylist()
    kept = (end > start_ns) & (begin < end_ns)
    names, owners = _owners([UNKNOWN if name is None else str(name) for name in told], kept)
    blocks = found.column("block_hash").to_numpy().astype(np.uint64)
    return Lives(np.maximum(begin[kept], start_ns), end[kept], blocks[kept], owners[kept], names, 1 / one_of)


def _run(window: Window) -> str:
    condition, params = window_sql(Window(run_id=window.run_id), "arrival_ns")
    return condition if not params else "true"


def _owners(told: Sequence[str], kept: npt.NDArray[np.bool_]) -> tuple[list[str], I64]:
    """The names with most lives, the rest as one; and the position of each life's name."""
    values = np.array(told, dtype=object)
    names, counts = (
        np.unique(values[kept].astype(str), return_counts=True) if kept.any() else (np.array([]), np.array([]))
    )
    most = [str(name) for name in names[np.argsort(-counts, kind="stable")][:MOST_OWNERS]]
    legend = [*most, *([OTHERS] if len(names) > len(most) else [])]
    place = {name: position for position, name in enumerate(most)}
    return legend, np.array([place.get(name, len(most)) for name in told], dtype=np.int64)


def _mark_use(
    store: Store,
    worker: str,
    window: Window,
    lives: Lives,
    slots: I64,
    middle: I64,
    cells: npt.NDArray[np.int64],
    start_ns: int,
    end_ns: int,
) -> None:
    """Cells of blocks that a running request stored or hit become IN_USE."""
    condition, params = window_sql(Window(start_ns - PAST_NS, end_ns, window.run_id), "at_ns")
    sql = f"""
        SELECT b.block_hash, b.at_ns, r.end_ns FROM
            (SELECT block_hash, at_ns, request_id FROM block WHERE worker = ? AND {condition} AND {ON_DEVICE}
                AND change IN ('stored', 'loaded', 'hit') AND request_id IS NOT NULL) b
        JOIN (SELECT request_id, max(coalesce(end_ns, last_token_ns)) AS end_ns FROM request
            WHERE vantage = 'engine' AND {_run(window)} GROUP BY request_id) r USING (request_id)
        WHERE r.end_ns > {start_ns}
    """
    touched = store.query(sql, [worker, *params])
    block = touched.column("block_hash").to_numpy().astype(np.uint64)
    at, until = (touched.column(name).to_numpy().astype(np.int64) for name in ("at_ns", "end_ns"))
    by_block: dict[int, list[int]] = {}
    for position, name in enumerate(lives.block.tolist()):
        by_block.setdefault(name, []).append(position)
    first, last = np.searchsorted(middle, at), np.searchsorted(middle, until)
    life_first, life_last = np.searchsorted(middle, lives.start_ns), np.searchsorted(middle, lives.end_ns)
    for name, moment, begin, end in zip(block.tolist(), at.tolist(), first.tolist(), last.tolist(), strict=True):
        for position in by_block.get(name, ()):
            if moment < lives.end_ns[position] and max(moment, start_ns) >= lives.start_ns[position]:
                cells[slots[position], max(begin, life_first[position]) : min(end, life_last[position])] = 1
