"""Whether the decode worker had blocks enough, and a seat, while a hand-over waited for it: by its steps, else by scraped gauges.

Each wait is looked at LOOKS times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from diagnosis.facts import F64, I64, MAX_SEATS, StepFacts
from diagnosis.hotspots.columns import numbers
from diagnosis.loading.requests import reach, seconds_since
from diagnosis.loading.workers import worker_facts
from engine_probe.digits import whole_number
from store.evidence.lineage import window_sql
from store.interface import Store, Window

LOOKS: Final = 16
"""Instants of a wait at which the decode worker's blocks, and what it runs, are looked at."""
SEATS: Final = ("max_num_seqs", "max_running_requests")
"""vLLM's and SGLang's settings of how many requests run at once."""


@dataclass(frozen=True, slots=True)
class Waits:
    """What [m] hand-overs waited: into worker names[target], from `start` to `end`, s since the origin."""

    names: tuple[str, ...]
    target: I64
    start: F64
    end: F64

    def looks(self, mine: I64) -> F64:
        """[len(mine), LOOKS] instants in the middle of equal parts of these waits."""
        return self.start[mine, None] + (self.end - self.start)[mine, None] * (np.arange(LOOKS) + 0.5) / LOOKS


@dataclass(frozen=True, slots=True)
class Seats:
    """What is known of the decode workers' seats while hand-overs waited.

    num     seats by worker, of those that tell them
    taken   [m] share of each wait in which as many requests ran as there are seats; NaN where the worker does not tell
    busiest [m] share in which as many ran as ever in the window, so that nobody can say whether one more had a seat; 1 where nothing tells
    """

    num: Mapping[str, int]
    taken: F64
    busiest: F64


def seats_taken(store: Store, window: Window, origin_ns: int, steps: StepFacts | None, waits: Waits) -> Seats:
    """The decode workers' seats during these waits."""
    num = _seats(store, window, waits.names)
    taken, busiest = np.full(len(waits.target), np.nan), np.ones(len(waits.target))
    scraped = None
    for code, name in enumerate(waits.names):
        mine = np.flatnonzero(waits.target == code)
        if len(mine) == 0:
            continue
        told = _running(steps, name)
        if told is None:
            scraped = scraped or _scraped(store, window, origin_ns, "requests_running")
            told = scraped.get(name)
        if told is None:
            continue
        at, running = told
        looks = waits.looks(mine)
        after = np.searchsorted(at, looks, "right")
        # a seat that changes hands is free in the step between
        meanwhile = np.maximum(running[np.clip(after - 1, 0, None)], running[np.clip(after, None, len(at) - 1)])
        busiest[mine] = np.mean(meanwhile >= running.max(), axis=1)
        if name in num:
            taken[mine] = np.mean(meanwhile >= num[name], axis=1)
    return Seats(num, taken, busiest)


def without_room(steps: StepFacts | None, waits: Waits, prompt: F64, block_size: int | None) -> F64:
    """[m] share of each wait in which the decode worker had fewer blocks free than the prompt needs; NaN where no step tells.

    When it was let in there was room: it needed no more than was free then, however many of its blocks were there already.
    """
    short = np.full(len(waits.target), np.nan)
    if steps is None or not block_size:
        return short
    needed = np.ceil((prompt + 1) / block_size)
    for code, name in enumerate(waits.names):
        mine = np.flatnonzero((waits.target == code) & np.isfinite(needed))
        free_at = _free(steps, name)
        if free_at is None or len(mine) == 0:
            continue
        at, free = free_at
        looks = waits.looks(mine)
        meanwhile = free[np.clip(np.searchsorted(at, looks, "right") - 1, 0, None)]
        when_let_in = free[np.clip(np.searchsorted(at, waits.end[mine], "right") - 1, 0, None)]
        most = np.minimum(needed[mine], np.maximum(when_let_in, 1.0))
        short[mine] = np.mean(meanwhile < most[:, None], axis=1)
    return short


def without_room_by_gauge(
    store: Store,
    window: Window,
    origin_ns: int,
    waits: Waits,
    prompt: F64,
    block_size: int | None,
) -> F64:
    """The same by the scraped usage of the decode workers' blocks, where they tell how many they have; NaN where nothing tells.

    A scrape is a second old, so what was free when a hand-over was let in is not looked at.
    """
    short = np.full(len(waits.target), np.nan)
    if not block_size:
        return short
    usage = _scraped(store, window, origin_ns, "kv_usage_ratio")
    past, past_params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    pools = store.query(
        f"SELECT worker, arg_max(num_blocks, at_ns) AS size FROM worker WHERE {past} AND num_blocks > 0 GROUP BY worker",
        past_params,
    )
    size = dict(zip(pools["worker"].to_pylist(), pools["size"].to_pylist(), strict=True))
    needed = np.ceil((prompt + 1) / block_size)
    for code, name in enumerate(waits.names):
        mine = np.flatnonzero((waits.target == code) & np.isfinite(needed))
        if name not in size or name not in usage or not len(mine):
            continue
        at, used = usage[name]
        free = (1.0 - used) * size[name]
        looks = waits.looks(mine)
        last = np.clip(np.searchsorted(at, looks, "right") - 1, 0, None)
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


def _scraped(store: Store, window: Window, origin_ns: int, name: str) -> dict[str, tuple[F64, F64]]:
    """(instants, values) of a gauge by worker, in order of time."""
    condition, params = window_sql(reach(window), "at_ns")
    table = store.query(
        f"SELECT worker, at_ns, value FROM sample WHERE {condition} AND name = '{name}' AND worker IS NOT NULL ORDER BY at_ns",
        params,
    )
    of = np.asarray(table["worker"].to_numpy(zero_copy_only=False), dtype=object)
    at, values = seconds_since(table["at_ns"], origin_ns), numbers(table["value"])
    return {worker: (at[of == worker], values[of == worker]) for worker in dict.fromkeys(of)}


def _running(steps: StepFacts | None, worker: str) -> tuple[F64, F64] | None:
    """(end of each step of the worker, requests that ran in it); None where they do not tell."""
    if steps is None or worker not in steps.worker_names:
        return None
    running = steps.get("num_running")
    rows = np.flatnonzero((steps.worker == list(steps.worker_names).index(worker)) & np.isfinite(running))
    return None if len(rows) == 0 else (steps.at_s[rows], running[rows])


def _seats(store: Store, window: Window, names: tuple[str, ...]) -> dict[str, int]:
    """Seats of these workers, of those that tell them."""
    told = {}
    for worker in worker_facts(store, window):
        values = [whole_number(worker.flags[flag], MAX_SEATS) for flag in SEATS if flag in worker.flags]
        if worker.worker in names and values and values[0]:
            told[worker.worker] = values[0]
    return told


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
