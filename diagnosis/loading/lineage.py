"""What became of the prompt blocks that a window's requests missed: evicted, cleared by a reset, or never stored."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, I64, Bool, LineageFacts, Obj, RequestFacts, WorkerFacts
from diagnosis.ledger.spent import COLD_PERIOD_S
from diagnosis.sampled import half_interval, rate_of, within
from store.evidence.chain_breaks import EXPIRED, PRESENT, chain_breaks, may_be_split
from store.evidence.evicted_for import evicted_for
from store.evidence.lineage import block_rate, cache_resets, past_of
from store.evidence.lost_blocks import Stored, evictions_of, lost_blocks, stored_twice, what_rows_tell
from store.interface import Store, Window

ASKED = ["worker", "arrival_ns", "cached_tokens", "prompt_blocks"]
"""Columns that tell what a request asked of the cache."""
MOST = 0.5
"""Share of the lost tokens from which on blocks that were in the cache and not used are no accident of two clocks."""
SHORTEST = 0.05
"""Share of the hits, the shortest, that do not tell what a cache gives back."""
LOOKED_AT = 50_000
"""Requests of which it is asked for whom their blocks were evicted: shares of tenants need no more."""
WORST, ALL = 10, 1 << 62
"""How many of the blocks lost most often are looked at; all of them where the error of a sample rests on each."""


def names_blocks(table: pa.Table) -> bool:
    """Whether any request says which blocks its prompt has, and what it found of them."""
    return bool(pc.any(pc.and_(pc.is_valid(table["prompt_blocks"]), pc.is_valid(table["cached_tokens"]))).as_py())


def knows_workers(table: pa.Table) -> bool:
    """Whether every request names its worker."""
    return bool(table["worker"].null_count == 0)


class StoredBlocks:
    """Blocks that were stored twice: read beside the requests that miss them, since both take long."""

    def __init__(self, store: Store, window: Window, vantage: str, pool: Executor) -> None:
        self._store, self._window = store, window
        names, self._by_worker = what_rows_tell(store, window, vantage)
        self._early = pool.submit(stored_twice, store, window, by_worker=self._by_worker) if names else None

    def of(self, table: pa.Table) -> Stored:
        """For these requests. Rows that were merged may know their workers where not all rows did: then they are read again."""
        by_worker = knows_workers(table)
        if self._early is None or by_worker != self._by_worker:
            return stored_twice(self._store, self._window, by_worker=by_worker)
        return self._early.result()


def block_size(workers: Sequence[WorkerFacts]) -> int | None:
    """Tokens a block, where all workers that say so say the same."""
    sizes = {w.block_size for w in workers if w.block_size}
    return sizes.pop() if len(sizes) == 1 else None


def lineage(
    store: Store, window: Window, requests: RequestFacts, asked: pa.Table, stored: Stored, size: int
) -> LineageFacts:
    """Missed full blocks by what had become of them. `asked`: rows of the same requests, in their order."""
    rate = block_rate(store, past_of(window)) or 1.0
    counts, misses = lost_blocks(store, stored, asked, size, ALL if rate < 1.0 else WORST)
    seen = counts.astype(np.float64) * size
    full = np.floor(np.nan_to_num(requests.get("prompt_tokens")) / size) * size
    missed = np.clip(full - np.nan_to_num(requests.get("cached_tokens")), 0.0, None)
    lost = seen if rate == 1.0 else within(seen / rate, missed)
    cleared = _lost_by_reset(store, window, requests, lost)
    total = float(np.where(cleared > 0, 0.0, seen).sum()) / rate / rate_of(requests)
    margin = _margin(misses, lost - cleared, size, rate, rate_of(requests))
    misses = _worst(misses) if rate < 1.0 else misses
    details = _worst_blocks(misses, store, window, requests, by_worker=stored.by_worker)
    back = [row["back_after_s"] for row in details if row["back_after_s"] is not None]
    evicted = lost - cleared
    expired = unused = untold = None
    at_s = np.where(np.isfinite(requests.scheduled_s), requests.scheduled_s, requests.arrival_s)
    at_ns = requests.origin_ns + np.round(at_s * 1e9).astype(np.int64)
    if margin is None and evicted.any():
        expired, unused = _by_what_broke(
            store, window, requests, asked, at_ns, evicted, size, by_worker=stored.by_worker
        )
        evicted = evicted - expired - unused
        untold = gone_untold(requests, unused)
        unused = unused - untold
    evicted_by, ago = _evicted_for(store, window, asked, at_ns, evicted, size, by_worker=stored.by_worker)
    return LineageFacts(
        evicted_tokens=evicted,
        new_tokens=np.clip(missed - lost, 0.0, None),
        cleared_tokens=cleared,
        evicted_blocks=int(evicted.sum() / size) if margin is None else round(total / size),
        back_after_s=float(np.median(back)) if back else None,
        worst=details,
        by_worker=stored.by_worker,
        estimated_tokens=None if margin is None else total,
        margin_tokens=margin,
        block_rate=None if rate == 1.0 else rate,
        expired_tokens=expired,
        unused_tokens=unused,
        untold_tokens=untold,
        evicted_by=evicted_by,
        by_evictions=stored.by_evictions,
        evicted_ago_s=ago,
    )


def _evicted_for(
    store: Store, window: Window, asked: pa.Table, at_ns: I64, evicted: F64, size: int, *, by_worker: bool
) -> tuple[Obj | None, float | None]:
    """([n] tenant for which the block was evicted at which each chain broke, of those who lost something; median seconds from there to
    the miss); None where nobody tells. Of many requests that lost something, LOOKED_AT or fewer at even distances are looked at.
    """
    rows = np.flatnonzero(evicted > 0)
    if len(rows) == 0:
        return None, None
    rows = rows[:: -(-len(rows) // LOOKED_AT)]
    found = evicted_for(store, window, asked.take(pa.array(rows)), at_ns[rows], size, by_worker=by_worker)
    out = np.full(len(evicted), None, dtype=object)
    out[rows] = found.tenant
    ago = found.back_after_s[np.isfinite(found.back_after_s)]
    told = any(tenant is not None for tenant in found.tenant)
    return out if told else None, float(np.median(ago)) if len(ago) else None


def _by_what_broke(
    store: Store,
    window: Window,
    requests: RequestFacts,
    asked: pa.Table,
    at_ns: I64,
    lost: F64,
    size: int,
    *,
    by_worker: bool,
) -> tuple[F64, F64]:
    """Of the lost tokens [n] those whose chain broke at a block that was given up by age, and at one that was in the cache.

    A chain is found up to its first missing block, so what became of that one decides over all behind it. Blocks that were there count
    only where an engine tells when it looked, and where they are most of what broke: else a few are the order of two clocks. An eviction
    costs nothing where what it took is too short to be given back. Where nobody was given anything at all, that is asked of any window.
    """
    nothing_given = not np.nan_to_num(requests.get("cached_tokens")).any()
    if not nothing_given and not may_be_split(store, window, float(lost.sum()) / size):
        return np.zeros(len(lost)), np.zeros(len(lost))
    looked = np.isfinite(requests.scheduled_s)
    broke = chain_breaks(store, window, asked, at_ns, size, by_worker=by_worker)
    expired = np.where(broke == EXPIRED, lost, 0.0)
    unused = np.where((broke == PRESENT) & looked, lost, 0.0)
    if unused.sum() < MOST * lost.sum():
        return expired, np.zeros(len(lost))
    return expired, np.where(too_short(requests, lost, unused) & (expired == 0.0), lost, unused)


def too_short(requests: RequestFacts, lost: F64, unused: F64) -> Bool:
    """[n] whether what was lost is no longer than what was there and was not given back: kept, it would not have been used either.

    Where some request was given less than that, length does not decide, and nobody's is too short.
    """
    reach = float(unused.max(initial=0.0))
    given = np.nan_to_num(requests.get("cached_tokens"))
    if ((given > 0.0) & (given <= reach)).any():
        return np.zeros(len(lost), dtype=bool)
    short: Bool = (lost > 0.0) & (lost <= reach) & (given == 0.0)
    return short


def gone_untold(requests: RequestFacts, unused: F64) -> F64:
    """[n] of the tokens that were there by the blocks' events and were not given: those of which others were given as few.

    A cache that gives back so short a piece would have given this one too, so nobody's unit is in the way: it was gone (a reset, a lost
    event), and no event tells. Of those who were given anything the SHORTEST are left out: one short hit may be another layer's.
    """
    given = np.nan_to_num(requests.get("cached_tokens"))
    hits = given[given > 0.0]
    if len(hits) == 0:
        return np.zeros(len(unused))
    return np.where(unused >= float(np.quantile(hits, SHORTEST, method="higher")), unused, 0.0)


def _margin(misses: pa.Table, lost: F64, size: int, block_rate: float, request_rate: float) -> float | None:
    """Half the 95 % interval of the window's lost tokens: which blocks were kept, and which requests. None where all were.

    A block is kept or left out for all who miss it, so it counts with all its misses at once.
    """
    if block_rate == request_rate == 1.0:
        return None
    by_block = 0.0
    if block_rate < 1.0:
        _, times = np.unique(np.asarray(misses["block_hash"]), return_counts=True)
        by_block = half_interval(times.astype(np.float64) * size, block_rate) / request_rate
    return float(np.hypot(by_block, half_interval(lost, request_rate)))


def _worst(misses: pa.Table) -> pa.Table:
    """Misses of the WORST blocks that were lost most often."""
    blocks, times = np.unique(np.asarray(misses["block_hash"]), return_counts=True)
    most = blocks[np.lexsort((blocks, -times))[:WORST]]
    return misses.filter(pa.array(np.isin(np.asarray(misses["block_hash"]), most)))


def _worst_blocks(
    misses: pa.Table, store: Store, window: Window, requests: RequestFacts, *, by_worker: bool
) -> list[dict[str, Any]]:
    """Blocks lost most often: block_hash, times, request_ids (the first five), back_after_s (median eviction to miss, or None)."""
    if misses.num_rows == 0:
        return []
    at, block, row = (np.asarray(misses[name]) for name in ("at_ns", "block_hash", "row"))
    encoded = misses["worker"].combine_chunks().dictionary_encode()
    worker, names = np.asarray(encoded.indices), encoded.dictionary.to_pylist()
    gone = evictions_of(store, window, sorted({int(h) for h in np.unique(block)}))
    gone_at, gone_block = np.asarray(gone["at_ns"]), np.asarray(gone["block_hash"])
    gone_worker = np.asarray(pc.index_in(gone["worker"], value_set=encoded.dictionary).fill_null(-1))
    out = []
    for code, name in enumerate(names):
        for value in np.unique(block[worker == code]):
            mine = np.flatnonzero((worker == code) & (block == value))  # requests are in arrival order
            theirs = (gone_block == value) & ((gone_worker == code) | (not by_worker))
            evicted = np.sort(gone_at[theirs])
            before = np.searchsorted(evicted, at[mine], "left") - 1
            back = (at[mine][before >= 0] - evicted[before[before >= 0]]) / 1e9
            out.append(
                {
                    "block_hash": int(value),
                    "worker": name,
                    "times": len(mine),
                    "request_ids": requests.request_id[row[mine[:5]]].tolist(),
                    "back_after_s": float(np.median(back)) if len(back) else None,
                }
            )
    return sorted(out, key=lambda row: (-row["times"], row["block_hash"]))


def _lost_by_reset(store: Store, window: Window, requests: RequestFacts, lost: F64) -> F64:
    """Lost tokens of requests that came within the cold period of a cache reset: the reset took them, not an eviction."""
    out = np.zeros(len(requests))
    for row in cache_resets(store, window).to_pylist():
        since = requests.arrival_s - (row["at_ns"] - requests.origin_ns) / 1e9
        near: Bool = (since >= 0) & (since <= COLD_PERIOD_S)
        if row["worker"] in requests.worker_names:
            near &= requests.worker == list(requests.worker_names).index(row["worker"])
        out[near] = lost[near]
    return out
