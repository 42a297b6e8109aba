"""What happened to KV blocks, by worker: changes, life, and evictions that came too early.

An eviction was premature where the same worker stores the same block again: it was computed twice. Evicted blocks are
remembered in a table of SLOTS by their hash, so a newer one may push an older one out of its slot: the count is a lower bound
that is tight up to some SLOTS / 4 blocks between eviction and return. One look-up costs a few nanoseconds; a block row is
the cheapest and the most frequent row there is.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from collector.counts.book import Book
from collector.counts.bounded import Names
from collector.counts.columns import Codes, choices, numbers, words
from collector.counts.reuse_gaps import SAMPLE, ReuseGaps
from collector.live.durations import one_array, weights_of
from engine_probe.events import column
from store import metric_catalogue as names

CHANGES: Final = column("block", "change").choices
TIERS: Final = column("block", "tier").choices
SLOTS: Final = 1 << 20
_ENDS: Final = ("evicted", "removed")
_USES: Final = ("stored", "hit", "loaded")
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_NONE: Final = np.uint64(0)
_SCRATCH: Final = 1 << 17
_SCRATCH_BITS: Final = np.uint64(64 - 17)

U64 = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


class Blocks:
    """Counts block rows into a book. Its caller sees to it that one thread at a time comes in."""

    def __init__(self, book: Book, worker: Names, slots: int = SLOTS) -> None:
        self._book = book
        self._worker = worker
        self._shift = np.uint64(64 - (slots - 1).bit_length())
        self._gone: U64 = np.zeros(slots, dtype=np.uint64)
        self._gaps = ReuseGaps()

    def count(self, blocks: pa.Table) -> None:
        """Count live rows of `block`."""
        if blocks.num_rows == 0:
            return
        worker_of, workers = words(blocks, "worker")
        change_of, changes = choices(blocks, "change", CHANGES)
        tier_of, tiers = choices(blocks, "tier", TIERS)
        labels = [(self._worker(name),) for name in workers]
        weights = weights_of(blocks)
        group = change_of if len(tiers) == 1 else change_of * len(tiers) + tier_of
        if len(workers) > 1:
            group = group + worker_of * (len(changes) * len(tiers))
        size = len(workers) * len(changes) * len(tiers)
        tokens = numbers(blocks, "num_tokens")

        def add(family: names.Family, sums: Any, told: Any) -> None:
            self._book.add_all(
                family,
                (
                    ((*labels[w], changes[c], tiers[t]), float(sums[n]))
                    for n in np.flatnonzero(told).tolist()
                    for w, c, t in [np.unravel_index(n, (len(workers), len(changes), len(tiers)))]
                ),
            )

        counts = np.bincount(group, weights, size)
        add(names.BLOCK_CHANGES, counts, counts)
        if tokens is not None:
            is_told, known = counts, tokens
            if blocks.column("num_tokens").null_count:
                is_told, known = np.bincount(group, np.isfinite(tokens), size), np.nan_to_num(tokens)
            sums = np.bincount(group, known if weights is None else known * weights, size)
            add(names.BLOCK_CHANGE_TOKENS, sums, is_told)
        evicted, hit = (change_of == changes.index(c) if c in changes else None for c in ("evicted", "hit"))
        on_device = _on_device(tier_of, tiers)
        if evicted is not None:
            evicted = evicted & on_device
            of_worker = np.bincount(worker_of[evicted], None if weights is None else weights[evicted], len(workers))
            present = np.flatnonzero(of_worker).tolist()
            self._book.add_all(names.BLOCK_EVICTIONS, (((*labels[w], "block"), float(of_worker[w])) for w in present))
            self._spread(names.BLOCK_RESIDENCE, blocks, "age_s", evicted, worker_of, labels, weights)
        own = _is_self(blocks) & hit if hit is not None else np.zeros(0, dtype=np.bool_)
        if hit is not None:
            self._sum(names.BLOCK_SELF_HITS, own, worker_of, labels, None, weights)
        hashes = one_array(blocks.column("block_hash"))
        if hashes.null_count == len(hashes):
            return
        told: Flags | bool = on_device
        if hashes.null_count:
            told = on_device & pc.is_valid(hashes).to_numpy(zero_copy_only=False)
            hashes = pc.fill_null(hashes, 0)
        # two workers' copies of a block stay apart
        salts = np.array([hash(name) & ((1 << 64) - 1) for name in workers], dtype=np.uint64)
        key = hashes.to_numpy() ^ (salts[0] if len(salts) == 1 else salts[worker_of])
        is_gone, stored, used = (_rows(change_of, changes, of, told) for of in (_ENDS, ("stored",), _USES))
        self._count_premature(key, is_gone, stored, worker_of, labels, tokens, weights)
        ends, gaps = self._gaps.observe(key, blocks.column("at_ns").to_numpy(), used)
        if len(own):
            kept = ~own[ends]
            ends, gaps = ends[kept], gaps[kept]
        stands_for = np.full(len(ends), float(SAMPLE)) if weights is None else SAMPLE * weights[ends]
        self._book.spread(names.BLOCK_REUSE_GAP, names.BLOCK_BOUNDS_S, gaps, worker_of[ends], labels, stands_for)

    def _spread(
        self, family: names.Family, blocks: pa.Table, column: str, rows: Flags, of: Codes, labels: Any, weights: Any
    ) -> None:
        values = numbers(blocks, column)
        if values is not None:
            of_rows = None if weights is None else weights[rows]
            self._book.spread(family, names.BLOCK_BOUNDS_S, values[rows], of[rows], labels, of_rows)

    def _sum(self, family: names.Family, rows: Any, of: Codes, labels: Any, values: Any, weights: Any) -> None:
        """Add values (None: rows) of some rows by worker."""
        if not len(of[rows]):
            return
        one = np.ones(len(of)) if values is None else np.nan_to_num(values)
        sums = np.bincount(of[rows], (one if weights is None else one * weights)[rows], len(labels))
        self._book.add_all(family, ((labels[w], float(sums[w])) for w in np.unique(of[rows]).tolist()))

    def _count_premature(
        self,
        key: U64,
        is_gone: Codes,
        stored: Codes,
        worker_of: Codes,
        labels: list[tuple[str]],
        tokens: Any,
        weights: Any,
    ) -> None:
        place, place_of_stored = ((key[rows] * _MIX) >> self._shift for rows in (is_gone, stored))
        returned = self._gone[place_of_stored] == key[stored]
        self._gone[place] = key[is_gone]
        last = np.full(_SCRATCH, -1, dtype=np.int32)  # where this batch evicted the blocks of a slot last
        last[(key[is_gone] * _MIX) >> _SCRATCH_BITS] = is_gone
        before = last[(key[stored] * _MIX) >> _SCRATCH_BITS]
        # evicted and stored again within this batch: the eviction's row has to come first
        is_here = (before >= 0) & (key[before] == key[stored])
        is_over = is_here & (before < stored)
        self._gone[place_of_stored[is_over | (returned & ~is_here)]] = _NONE
        again = stored[returned | is_over]
        # who tells what was stored and evicted, and of no return, has had none
        present = np.flatnonzero(np.bincount(worker_of[stored], minlength=len(labels))).tolist()
        self._book.add_all(names.PREMATURE_EVICTIONS, ((labels[w], 0.0) for w in present))
        if len(again) == 0:
            return
        again = again[np.unique(key[again], return_index=True)[1]]
        self._sum(names.PREMATURE_EVICTIONS, again, worker_of, labels, None, weights)
        if tokens is not None:
            self._sum(names.PREMATURE_EVICTION_TOKENS, again, worker_of, labels, tokens, weights)


def _rows(change_of: Codes, changes: list[str], wanted: tuple[str, ...], told: Flags | bool) -> Codes:
    """Numbers of the rows of these changes, of those told."""
    found = np.zeros(len(change_of), dtype=np.bool_)
    for change in wanted:
        if change in changes:
            found |= change_of == changes.index(change)
    return np.flatnonzero(found & told)


def _on_device(tier_of: Codes, tiers: list[str]) -> Flags | bool:
    """Rows of blocks in device memory, where nobody says otherwise."""
    device = [number for number, tier in enumerate(tiers) if tier in ("", "device")]
    if len(device) == len(tiers):
        return True
    found = np.zeros(len(tier_of), dtype=np.bool_)
    for number in device:
        found |= tier_of == number
    return found


def _is_self(blocks: pa.Table) -> Flags | bool:
    """Hits of preempted requests on blocks of their own."""
    reasons = one_array(blocks.column("reason"))
    if reasons.null_count == len(reasons):
        return np.zeros(len(reasons), dtype=np.bool_)
    return np.asarray(pc.fill_null(pc.equal(reasons, "self"), False).to_numpy(zero_copy_only=False))
