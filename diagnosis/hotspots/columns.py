"""Arrow columns as arrays: names as codes, numbers with NaN for what is unknown, instants in seconds after an origin."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from diagnosis.facts import F64, I64
from diagnosis.hotspots.observed import F32


def names_in(*columns: pa.ChunkedArray | pa.Array | None) -> tuple[str, ...]:
    """All names in these columns, each once, in natural order."""
    names: set[str] = set()
    for column in columns:
        if column is not None:
            names.update(name for name in pc.unique(column).to_pylist() if name is not None)
    return tuple(sorted(names, key=natural))


def natural(name: str) -> tuple[str, int, str]:
    """w2 before w10."""
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return head, int(digits) if digits else -1, name


def codes(column: pa.ChunkedArray | pa.Array, names: Iterable[str]) -> I64:
    """[n] place of each value among the names, -1 where it is none of them."""
    found = pc.index_in(column, value_set=pa.array(list(names), type=pa.string()))
    found = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    return np.asarray(pc.fill_null(found, -1)).astype(np.int64)


def numbers(column: pa.ChunkedArray | pa.Array) -> F64:
    """As float64, unknown NaN; counts beyond 2^53 lose their last digits."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def floats(column: pa.Array) -> F32:
    """As float32, unknown NaN."""
    known = column if column.null_count == 0 else column.cast(pa.float64(), safe=False)
    return np.asarray(known.to_numpy(zero_copy_only=False)).astype(np.float32)


def seconds_after(column: pa.ChunkedArray, origin: int) -> F64:
    """Seconds after the origin; the difference is taken in whole nanoseconds."""
    return numbers(pc.subtract(column, pa.scalar(origin, pa.int64()))) / 1e9
