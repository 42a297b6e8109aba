"""Rows that a sender delivered twice: a batch without an identity is stored at least once, so its repeat is stored as well."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import I64, Bool


def again(table: pa.Table, at: str, says: Sequence[str], order: I64 | None = None) -> Bool:
    """[n] the row says what the one in front of it in this order says: the same instant `at`, and the same in all of `says` (null too).

    Rows of one instant stand beside each other in the order; None: that of the table.
    """
    order = np.arange(table.num_rows) if order is None else order
    found = np.zeros(len(order), dtype=np.bool_)
    at_ns = np.asarray(table[at])[order]
    same = np.flatnonzero(at_ns[1:] == at_ns[:-1])  # few have the instant of another
    for name in says:
        one, other = (_taken(table[name], order[rows]) for rows in (same + 1, same))
        both_null = pc.and_(pc.is_null(one), pc.is_null(other))
        same = same[np.asarray(pc.or_(pc.fill_null(pc.equal(one, other), False), both_null))]
    found[same + 1] = True
    return found


def _taken(column: pa.ChunkedArray, rows: I64) -> pa.Array:
    taken = column.take(pa.array(rows))
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken
