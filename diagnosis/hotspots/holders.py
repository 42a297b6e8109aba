"""Who really held how much of a prompt at the instant of a decision, by the life of the blocks: what a perfect index would have said.

A worker holds a block from `stored` or `loaded` until `evicted` or `removed`, and nothing over a `cleared`. A prompt's blocks are a
chain and its end goes first, so the depth to which a worker holds it is found by halving.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import I64
from diagnosis.hotspots.intervals import intervals
from diagnosis.hotspots.observed import F32, Observed
from diagnosis.hotspots.wrong_beliefs import wrong_beliefs, wrong_intervals
from store.evidence.lineage import ON_DEVICE, past_of, window_sql
from store.interface import Store, Window

MOST_CELLS = 20_000_000
"""Decisions times workers that are looked up; of more, every so many-th decision is."""


def truly_matched(store: Store, window: Window, seen: Observed, rows: I64, block_size: int) -> F32:
    """[N, K] as `Decisions.matched`: what the workers held of the prompts of the decisions `rows`; NaN where that is not known."""
    matched = np.full(seen.decisions.matched.shape, np.nan, dtype=np.float32)
    rows = rows[:: -(-len(rows) * seen.num_workers // MOST_CELLS)] if len(rows) else rows
    prompts = _prompts(store, window, seen, rows)
    lives = None if prompts is None else _lives(store, window, seen, prompts.hashes)
    if prompts is None or lives is None:
        return matched
    at_ns = seen.origin_ns + np.round(seen.decisions.at_s[prompts.row] * 1e9).astype(np.int64)
    for worker in range(seen.num_workers):
        low, high = np.zeros(len(prompts.row), dtype=np.int64), prompts.length.copy()
        while (open_ := low < high).any():
            middle = (low + high) // 2
            place = np.minimum(prompts.start + middle, len(prompts.codes) - 1)
            held = lives.holds(worker, prompts.codes[place], at_ns)
            low, high = np.where(open_ & held, middle + 1, low), np.where(open_ & ~held, middle, high)
        matched[prompts.row, worker] = low * block_size
    return matched


def informed(store: Store, window: Window, seen: Observed) -> Observed:
    """The same, where the index seems to be wrong with what the chosen workers held when they were chosen.

    A request that waits finds less than there was: what is evicted meanwhile says nothing about the index.
    """
    of, num = intervals(seen)
    wrong = wrong_intervals(of, *wrong_beliefs(seen), num)
    size = _block_size(store, window) if wrong.any() else None
    if size is None:
        return seen
    rows = np.flatnonzero(wrong[of])
    held = truly_matched(store, window, seen, rows, size)
    return replace(seen, held=held[np.arange(len(of)), seen.decisions.chosen].astype(np.float64))


def _block_size(store: Store, window: Window) -> int | None:
    """Tokens a block, where all workers that say so say the same."""
    past, params = window_sql(Window(None, window.end_ns, window.run_id), "at_ns")
    sizes = store.query(f"SELECT DISTINCT block_size FROM worker WHERE {past} AND block_size > 0 LIMIT 2", params)
    return int(sizes.column(0)[0].as_py()) if sizes.num_rows == 1 else None


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts of decisions: `codes` of their blocks, flat; each begins at `start` and has `length`. `hashes`: by code."""

    row: I64
    start: I64
    length: I64
    codes: I64
    hashes: pa.Array


def _prompts(store: Store, window: Window, seen: Observed, rows: I64) -> _Prompts | None:
    condition, params = window_sql(window, "arrival_ns")
    table = store.query(
        f"SELECT request_id, any_value(prompt_blocks) AS blocks FROM request WHERE {condition} AND len(prompt_blocks) > 0 "
        "GROUP BY request_id",
        params,
    )
    ids = pa.array([seen.decisions.ids[row] for row in rows.tolist()], pa.string())
    found = pc.index_in(ids, value_set=table["request_id"].combine_chunks())
    known = np.asarray(pc.is_valid(found))
    if not known.any():
        return None
    lists = table["blocks"].combine_chunks().take(found.drop_null())
    encoded = pc.list_flatten(lists).dictionary_encode()
    length = np.asarray(pc.list_value_length(lists)).astype(np.int64)
    return _Prompts(
        rows[known],
        np.cumsum(length) - length,
        length,
        np.asarray(encoded.indices).astype(np.int64),
        encoded.dictionary,
    )


@dataclass(frozen=True, slots=True)
class _Lives:
    """Changes of blocks in order of (worker, block, time): `key` [e] sorts them, `there` [e] whether the block is held from then on.

    instants  [m] of all changes, rising; cleared: of each worker's resets
    """

    key: I64
    there: np.ndarray
    place: I64
    instants: I64
    num_blocks: int
    cleared: dict[int, I64]

    def holds(self, worker: int, code: I64, at_ns: I64) -> np.ndarray:
        """Whether the worker held each block at each instant, [n]."""
        before = np.searchsorted(self.instants, at_ns, "right")
        first = (worker * self.num_blocks + code) * (len(self.instants) + 1)
        last = np.searchsorted(self.key, first + before, "left") - 1
        kept = np.maximum(last, 0)
        known = (last >= 0) & (self.key[kept] >= first)
        resets = self.cleared.get(worker)
        if resets is not None:
            begun = np.searchsorted(resets, at_ns, "right") - 1
            since = np.where(begun >= 0, resets[np.maximum(begun, 0)], np.iinfo(np.int64).min)
            known &= self.instants[self.place[kept]] >= since
        held: np.ndarray = known & self.there[kept]
        return held


def _lives(store: Store, window: Window, seen: Observed, hashes: pa.Array) -> _Lives | None:
    condition, params = window_sql(past_of(window), "at_ns")
    table = store.query(
        "SELECT worker, block_hash, at_ns, change IN ('stored', 'loaded') AS there, change = 'cleared' AS is_reset FROM block "
        # of what is loaded the tier is where it came from
        f"WHERE {condition} AND ({ON_DEVICE} OR change = 'loaded') AND change IN ('stored', 'loaded', 'evicted', 'removed', 'cleared') "
        "AND worker IS NOT NULL ORDER BY at_ns",
        params,
    )
    worker = np.asarray(pc.fill_null(pc.index_in(table["worker"], value_set=pa.array(seen.workers)), -1)).astype(
        np.int64
    )
    at, reset = np.asarray(table["at_ns"]), np.asarray(table["is_reset"])
    code = np.asarray(pc.fill_null(pc.index_in(table["block_hash"], value_set=hashes), -1)).astype(np.int64)
    used = (worker >= 0) & (code >= 0) & ~reset
    if not used.any():
        return None
    instants, there = at[used], np.asarray(table["there"])[used]
    place = np.arange(len(instants))
    key = (worker[used] * len(hashes) + code[used]) * (len(instants) + 1) + place
    order = np.argsort(key, kind="stable")
    cleared = {int(w): at[reset & (worker == w)] for w in np.unique(worker[reset]) if w >= 0}
    return _Lives(key[order], there[order], place[order], instants, len(hashes), cleared)
