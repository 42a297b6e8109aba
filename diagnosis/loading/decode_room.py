"""Whether the decode worker had blocks enough while a hand-over waited for it: by its steps, else by its scraped usage.

Each wait is looked at LOOKS times.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from diagnosis.facts import F64, I64, StepFacts
from diagnosis.hotspots.columns import numbers
from diagnosis.loading.requests import reach, seconds_since
from store.evidence.lineage import window_sql
from store.interface import Store, Window

LOOKS: Final = 16
"""Instants of a wait at which the decode worker's blocks are looked at."""


def without_room(
    steps: StepFacts | None,
    names: tuple[str, ...],
    target: I64,
    start: F64,
    end: F64,
    prompt: F64,
    block_size: int | None,
) -> F64:
    """[m] share of each wait in which the decode worker had fewer blocks free than the prompt needs; NaN where no step tells.

    When it was let in there was room: it needed no more than was free then, however many of its blocks were there already.
    """
    short = np.full(len(target), np.nan)
    if steps is None or not block_size:
        return short
    needed = np.ceil((prompt + 1) / block_size)
    for code, name in enumerate(names):
        mine = np.flatnonzero((target == code) & np.isfinite(needed))
        free_at = _free(steps, name)
        if free_at is None or len(mine) == 0:
            continue
        at, free = free_at
        looks = start[mine, None] + (end - start)[mine, None] * (np.arange(LOOKS) + 0.5) / LOOKS
        meanwhile = free[np.clip(np.searchsorted(at, looks, "right") - 1, 0, None)]
        when_let_in = free[np.clip(np.searchsorted(at, end[mine], "right") - 1, 0, None)]
        most = np.minimum(needed[mine], np.maximum(when_let_in, 1.0))
        short[mine] = np.mean(meanwhile < most[:, None], axis=1)
    return short


def without_room_by_gauge(
    store: Store,
    window: Window,
    origin_ns: int,
    names: tuple[str, ...],
    target: I64,
    start: F64,
    end: F64,
    prompt: F64,
    block_size: int | None,
) -> F64:
    """The same by the scraped usage of the decode workers' blocks, where they tell how many they have; NaN where nothing tells.

    A scrape is a second old, so what was free when a hand-over was let in is not looked at.
    """
    short = np.full(len(target), np.nan)
    if not block_size:
        return short
    condition, params = window_sql(reach(window), "at_ns")
    table = store.query(
        f"SELECT worker, at_ns, value FROM sample WHERE {condition} AND name = 'kv_usage_ratio' AND worker IS NOT NULL ORDER BY at_ns",
        params,
    )
    past, past_params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    pools = store.query(
        f"SELECT worker, arg_max(num_blocks, at_ns) AS size FROM worker WHERE {past} AND num_blocks > 0 GROUP BY worker",
        past_params,
    )
    size = dict(zip(pools["worker"].to_pylist(), pools["size"].to_pylist(), strict=True))
    of = np.asarray(table["worker"].to_numpy(zero_copy_only=False), dtype=object)
    at, used = seconds_since(table["at_ns"], origin_ns), numbers(table["value"])
    needed = np.ceil((prompt + 1) / block_size)
    for code, name in enumerate(names):
        mine = np.flatnonzero((target == code) & np.isfinite(needed))
        scraped = np.flatnonzero(of == name)
        if name not in size or not len(scraped) or not len(mine):
            continue
        free = (1.0 - used[scraped]) * size[name]
        looks = start[mine, None] + (end - start)[mine, None] * (np.arange(LOOKS) + 0.5) / LOOKS
        last = np.clip(np.searchsorted(at[scraped], looks, "right") - 1, 0, None)
        short[mine] = np.mean(free[last] < needed[mine, None], axis=1)
    return short


def _free(steps: StepFacts, worker: str) -> tuple[F64, F64] | None:
    """(end of each step of the worker, blocks free after it); None where they do not tell."""
    if worker not in steps.worker_names:
        return None
    total, used = steps.get("blocks_total"), steps.get("blocks_used")
    known = (steps.worker == list(steps.worker_names).index(worker)) & np.isfinite(total) & np.isfinite(used)
    rows = np.flatnonzero(known)
    return None if len(rows) == 0 else (steps.at_s[rows], total[rows] - used[rows])


def queued(steps: StepFacts | None, names: tuple[str, ...], target: I64, end: F64, begun: F64) -> tuple[F64, F64]:
    """[m] seconds from the KV's arrival to the first step, and those of them in which the worker's queue waited for blocks."""
    queue = np.nan_to_num(np.clip(begun - end, 0.0, None))
    short = np.zeros(len(queue))
    waiting = None if steps is None else steps.get("waiting_on_blocks")
    if steps is None or waiting is None or not np.isfinite(waiting).any():
        return queue, short
    for code, name in enumerate(names):
        mine = np.flatnonzero((target == code) & (queue > 0))
        if name not in steps.worker_names or len(mine) == 0:
            continue
        rows = np.flatnonzero(steps.worker == list(steps.worker_names).index(name))
        looks = end[mine, None] + queue[mine, None] * (np.arange(LOOKS) + 0.5) / LOOKS
        step = np.clip(np.searchsorted(steps.at_s[rows], looks, "left"), 0, len(rows) - 1)
        short[mine] = np.mean(np.nan_to_num(waiting[rows])[step] > 0, axis=1) * queue[mine]
    return queue, short
