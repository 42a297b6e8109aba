"""Bytes that requests loaded from a slower tier, from `transfer` rows; nothing is read where no request loaded anything."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, RequestFacts
from store.evidence.lineage import window_sql
from store.interface import Store, Window


def loaded_bytes(store: Store, window: Window, requests: RequestFacts) -> F64 | None:
    """[n] bytes; NaN where it is not told. None where no request waited for a load."""
    if not (requests.get("kv_load_s") > 0).any():
        return None
    condition, params = window_sql(window, "at_ns")
    told = store.query(
        f"SELECT request_id, sum(num_bytes)::DOUBLE AS num_bytes FROM transfer WHERE {condition} "
        "AND request_id IS NOT NULL GROUP BY request_id",
        params,
    )
    out = np.full(len(requests), np.nan)
    if told.num_rows:
        place = pc.index_in(pa.array(requests.request_id, pa.string()), told["request_id"].combine_chunks())
        at = np.asarray(pc.fill_null(place, -1)).astype(np.int64)
        out[at >= 0] = np.asarray(told["num_bytes"])[at[at >= 0]]
    if requests.num_shared_ids:  # the sum under such an id is nobody's
        _, of_id, times = np.unique(requests.request_id.astype(str), return_inverse=True, return_counts=True)
        out[times[of_id] > 1] = np.nan
    return out
