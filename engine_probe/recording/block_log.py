"""Block events, taken over as whole arrays: a call costs the same for one block and for a thousand.

One writer, one reader: calls are queued as they came, the flush thread makes columns of them. When more events wait than
`capacity`, new ones are lost and counted: under overload block events go first. Invariant: events in = events drained
+ events waiting + `num_lost`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from engine_probe.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

Values: TypeAlias = "Sequence[Any] | npt.NDArray[Any]"
_BY_BLOCK = frozenset(("block_hash", "parent_hash", "num_tokens", "idle_s", "age_s", "reuse_count"))


class BlockEvents(NamedTuple):
    """What one call told. It waits as a plain tuple in this order, which costs the garbage collector nothing.

    Lists and arrays have one value a block, [num_events]; other values hold for all of them; None is unknown.
    """

    at_ns: int
    num_events: int
    change: str
    tier: str | None
    reason: str | None
    request_id: str | None
    block_hash: Values
    parent_hash: Values | None
    num_tokens: int | Values | None
    idle_s: Values | None
    age_s: Values | None
    reuse_count: Values | None


class BlockLog:
    """Waiting events, at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._calls: deque[tuple[Any, ...]] = deque()
        self._num_in = 0
        self._num_out = 0
        self.num_lost = 0

    @property
    def num_waiting(self) -> int:
        """Events that wait to be drained."""
        return self._num_in - self._num_out

    def append(self, events: tuple[Any, ...]) -> bool:
        """Take one call's events (a `BlockEvents` as a plain tuple), or lose them all. False where they were lost."""
        num_events: int = events[1]
        if self._num_in - self._num_out + num_events > self.capacity:
            self.num_lost += num_events
            return False
        self._calls.append(events)
        self._num_in += num_events
        return True

    def drain(self) -> list[BlockEvents]:
        """Take out what is there, oldest first."""
        calls = [BlockEvents(*self._calls.popleft()) for _ in range(len(self._calls))]
        self._num_out += sum(call.num_events for call in calls)
        return calls


def blocks_table(
    calls: Sequence[BlockEvents], offset_ns: int, constants: dict[str, Any], sampling: Sampling
) -> tuple[pa.Table, int]:
    """Queued calls as a `block` table, and how many events sampling left out (their block is not in the sample).

    offset_ns   monotonic -> UTC
    constants   columns that are the same in every row; one that is None stays null
    Raises ValueError, TypeError or OverflowError where a call's values do not fit the contract.
    """
    import numpy as np
    import pyarrow as pa

    from engine_probe.schema import arrow_schema

    sizes = np.array([call.num_events for call in calls], dtype=np.int64)
    num_rows = int(sizes.sum())
    owner = np.repeat(np.arange(len(calls)), sizes)
    columns = {name: [call[number] for call in calls] for number, name in enumerate(BlockEvents._fields)}
    schema = arrow_schema("block")
    arrays = []
    for field in schema:
        if field.name == "at_ns":
            arrays.append(pa.array(np.array(columns["at_ns"], dtype=np.int64)[owner] + offset_ns))
        elif constants.get(field.name) is not None:
            arrays.append(pa.repeat(pa.scalar(constants[field.name], field.type), num_rows))
        elif all(value is None for value in columns.get(field.name, ())):
            arrays.append(pa.nulls(num_rows, field.type))
        elif field.name in _BY_BLOCK:
            arrays.append(_numbers(columns[field.name], sizes, field))
        elif len(set(columns[field.name])) == 1:
            arrays.append(pa.repeat(pa.scalar(columns[field.name][0], field.type), num_rows))
        else:
            arrays.append(pa.array(columns[field.name], field.type).take(pa.array(owner)))
    table = pa.table(arrays, schema=schema)
    if sampling.rate == 1.0:
        return table, 0
    hashes = table.column("block_hash")
    kept = sampling.keeps_blocks(hashes.fill_null(0).to_numpy()) | hashes.is_null().to_numpy()
    return table.filter(pa.array(kept)), int(num_rows - kept.sum())


def _numbers(given: Sequence[Any], sizes: npt.NDArray[np.int64], field: pa.Field) -> pa.Array:
    """One column that some calls give block by block; others give one value for all, or none."""
    import numpy as np
    import pyarrow as pa

    from engine_probe.chain_hash import ROOT

    values = np.zeros(int(sizes.sum()), dtype=field.type.to_pandas_dtype())
    unknown = np.zeros(len(values), dtype=bool)
    start = 0
    for size, part in zip(sizes.tolist(), given, strict=True):
        stop = start + size
        if not isinstance(part, int | None) and len(part) != size:
            raise ValueError(f"{field.name} has {len(part)} values for {size} blocks")
        if part is None:
            unknown[start:stop] = True
        elif isinstance(part, list) and None in part:
            unknown[start:stop] = [value is None for value in part]
            values[start:stop] = [0 if value is None else value for value in part]
        else:
            values[start:stop] = part
        start = stop
    if field.name == "parent_hash":
        unknown |= values == ROOT  # a first block's parent is the root of the chain, which is no block
    if values.dtype.kind == "f":
        unknown |= np.isnan(values)
    return pa.array(values, mask=unknown if unknown.any() else None)
