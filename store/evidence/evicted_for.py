"""For whom the cache gave up the block at which a request's chain broke: the last eviction of that block before it was asked for.

Everything behind the first missing block had to be computed, so the eviction of that one block is what the request paid for. One look at
the evictions of those blocks alone: the cost follows the requests that lost something, and not the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from store.evidence.chain_breaks import first_missed
from store.evidence.lineage import ON_DEVICE, past_of, window_sql
from store.interface import Store, Window
from store.statements import one_text, rows_of

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Obj = NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class EvictedFor:
    """Of requests, [n] each: who caused the eviction that broke the chain, and its tenant (None: not told); seconds from there to the miss."""

    request_id: Obj
    tenant: Obj
    back_after_s: F64


def evicted_for(
    store: Store, window: Window, asked: pa.Table, at_ns: I64, block_size: int, *, by_worker: bool
) -> EvictedFor:
    """What the evictions' own rows tell; a chain that broke at a block without an eviction has NaN and None.

    asked   [n] rows of the kind `request`: worker, cached_tokens, prompt_blocks    at_ns   [n] when the cache was asked
    """
    nobody = [np.full(asked.num_rows, None, dtype=object) for _ in range(2)]
    found = EvictedFor(nobody[0], nobody[1], np.full(asked.num_rows, np.nan))
    rows, blocks = first_missed(asked, block_size)
    gone = _evictions(store, window, pc.unique(blocks))
    if len(rows) == 0 or gone.num_rows == 0:
        return found
    workers = asked["worker"].combine_chunks().fill_null("").take(pa.array(rows))
    names = pc.unique(pa.concat_arrays([workers, gone["worker"].combine_chunks()]))
    of_asked, of_gone = (np.asarray(pc.index_in(column, names)) * by_worker for column in (workers, gone["worker"]))
    codes = np.unique(np.concatenate([np.asarray(blocks), np.asarray(gone["block_hash"])]), return_inverse=True)[1]
    codes = codes.astype(np.int64) * len(names) + np.concatenate([of_asked, of_gone])
    gone_at = np.asarray(gone["at_ns"])
    times = np.unique(gone_at)
    # one number that rises with the block, the worker and the time, so that the last eviction before a miss is its neighbour
    asked_key = codes[: len(rows)] * (len(times) + 1) + np.searchsorted(times, at_ns[rows], "right")
    gone_key = codes[len(rows) :] * (len(times) + 1) + np.searchsorted(times, gone_at, "right")
    order = np.argsort(gone_key, kind="stable")
    place = np.searchsorted(gone_key[order], asked_key, "right") - 1
    same = (place >= 0) & (codes[len(rows) :][order[np.maximum(place, 0)]] == codes[: len(rows)])
    last, mine = order[place[same]], rows[same]
    found.request_id[mine] = _words(gone["request_id"])[last]
    found.back_after_s[mine] = (at_ns[mine] - gone_at[last]) / 1e9
    tenants = _tenants(store, window, sorted({name for name in found.request_id[mine] if name is not None}))
    found.tenant[mine] = [tenants.get(name) for name in found.request_id[mine]]
    return found


def _evictions(store: Store, window: Window, blocks: pa.Array) -> pa.Table:
    """worker, block_hash, at_ns, request_id of the evictions of these blocks in the window and its past."""
    scope, params = window_sql(past_of(window), "at_ns")
    return store.query(
        f"SELECT coalesce(worker, '') AS worker, block_hash, at_ns, request_id FROM block WHERE {scope} AND change IN ('evicted', 'removed') "
        f"AND {ON_DEVICE} AND block_hash IN (SELECT {rows_of('UBIGINT')}) "
        "ORDER BY at_ns, request_id",
        [*params, one_text(blocks.drop_null().to_pylist())],
    )


def _tenants(store: Store, window: Window, request_ids: list[str]) -> dict[str, str]:
    """Tenant of each of these requests that has one, whoever tells it."""
    scope, params = window_sql(past_of(window), "arrival_ns")
    told = store.query(
        f"SELECT request_id, min(tenant) AS tenant FROM request WHERE {scope} AND tenant IS NOT NULL "
        f"AND request_id IN (SELECT {rows_of('VARCHAR')}) GROUP BY request_id",
        [*params, one_text(request_ids)],
    )
    return dict(zip(told["request_id"].to_pylist(), told["tenant"].to_pylist(), strict=True))


def _words(column: pa.ChunkedArray) -> Obj:
    return np.array(column.to_pylist(), dtype=object)
