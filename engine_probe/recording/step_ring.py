"""Steps of an engine, each a packed row of a preallocated ring: the engine's thread writes, the flush thread reads.

One writer, one reader, no lock: the writer fills a row and then moves `head`, the reader copies rows and then moves
`tail`. A full ring loses the new step and counts it; the writer never waits. A row may stand for a run of steps that decode the
same sequences: `ends` then has the end of each, `forwards` what its forward pass took; each filled a slot a sequence.
Invariant: head - tail <= capacity; rows between them are whole; each row of more than one step has its lists.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from engine_probe.events import KINDS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

UNKNOWN: Final = -(2**63)
"""Stands for null in the integers of the ring; no count can have this value."""
NAN: Final = float("nan")

OWN: Final = ("step", "repeat", "start_ns", "end_ns", "probe_ns")
INTS: Final = tuple(
    c.name for c in KINDS["step"] if c.type == "int64" and c.name not in ("at_ns", "step") and not c.required
)
WAITING_ON: Final = tuple(f"waiting_on_{name}" for c in KINDS["step"] if c.name == "waiting_on" for name, _ in c.fields)
FLOATS: Final = tuple(
    c.name for c in KINDS["step"] if c.type == "float64" and c.name not in ("sample_rate", "duration_s", "probe_s")
)
UNFOLD_STEPS: Final = 1 << 17
"""Steps of one portion at most (but for a single row that stands for more)."""
_NUM_INTS: Final = len(OWN) + len(INTS) + len(WAITING_ON)
_ROW: Final = struct.Struct(f"={_NUM_INTS}q{len(FLOATS)}d")
ROW_BYTES: Final = _ROW.size


class StepRing:
    """`capacity` rows of `ROW_BYTES`, allocated at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Multiplied, not sized: every page is touched now, and not by the engine's first steps.
        self._buffer = bytearray(b"\0") * (capacity * ROW_BYTES)
        self._pack = _ROW.pack_into
        self.head = 0
        self.tail = 0
        self.num_lost = 0
        self._ends: deque[Sequence[int]] = deque()
        self._forwards: deque[Sequence[float]] = deque()

    def append_run(self, ends_ns: Sequence[int], forward_s: Sequence[float], step: int, *values: Any) -> bool:
        """One row for as many steps as there are ends, more than one. values: from start_ns on, as of the last of them."""
        self._ends.append(ends_ns)
        self._forwards.append(forward_s)
        if self.append(step, len(ends_ns), *values):
            return True
        self._ends.pop()
        self._forwards.pop()
        return False

    def append(self, step: int, repeat: int, *values: Any) -> bool:
        """One row: OWN, INTS, WAITING_ON, FLOATS; None is unknown. False where the ring is full, or a value no number."""
        if self.head - self.tail >= self.capacity:
            self.num_lost += repeat
            return False
        position = self.head % self.capacity * ROW_BYTES
        try:
            self._pack(self._buffer, position, step, repeat, *values)
        except struct.error:
            blanks = zip(values, (UNKNOWN,) * (_NUM_INTS - 2) + (NAN,) * len(FLOATS), strict=True)
            mended = [blank if value is None else value for value, blank in blanks]
            try:
                self._pack(self._buffer, position, step, repeat, *mended)
            except struct.error:
                self.num_lost += repeat
                return False
        self.head += 1
        return True

    def drain(self) -> list[Steps]:
        """Copy out what is there, oldest first, in portions that unfold to a bounded number of steps; give the room back."""
        import numpy as np

        head, tail = self.head, self.tail
        if head == tail:
            return []
        rows = np.frombuffer(self._buffer, dtype=row_dtype())
        first, last = tail % self.capacity, (head - 1) % self.capacity + 1
        out = rows[first:last].copy() if first < last else np.concatenate([rows[first:], rows[:last]])
        runs = int((out["repeat"] > 1).sum())
        ends = [self._ends.popleft() for _ in range(runs)]
        forwards = [self._forwards.popleft() for _ in range(runs)]
        self.tail = head
        return _unfolded(out, ends, forwards)


def row_dtype() -> np.dtype[np.void]:
    """The ring's row as numpy sees it."""
    import numpy as np

    whole = [(name, "<i8") for name in (*OWN, *INTS, *WAITING_ON)]
    return np.dtype([*whole, *((name, "<f8") for name in FLOATS)])


class Steps:
    """Drained rows, and the steps that they stand for.

    rows             [num_rows] of `row_dtype`
    index            [num_steps] the row of each step;  step: its number
    start_ns, end_ns, forward_s   [num_steps] monotonic instants of each; NaN where the forward pass is not known
    """

    __slots__ = ("end_ns", "forward_s", "index", "rows", "start_ns", "step")

    def __init__(self, rows: npt.NDArray[np.void], ends: Sequence[Sequence[int]], forwards: Sequence[Sequence[float]]):
        import numpy as np

        repeat = rows["repeat"]
        self.rows = rows
        self.index = np.repeat(np.arange(len(rows)), repeat)
        first = np.cumsum(repeat) - repeat
        nth = np.arange(len(self.index)) - first[self.index]
        self.step = rows["step"][self.index] + nth
        self.end_ns, self.forward_s = rows["end_ns"][self.index], rows["forward_s"][self.index]
        if ends:
            is_of_run = (repeat > 1)[self.index]
            self.end_ns[is_of_run] = np.concatenate(ends)
            self.forward_s[is_of_run] = np.concatenate(forwards)
        self.start_ns = np.empty_like(self.end_ns)
        self.start_ns[1:] = self.end_ns[:-1]
        self.start_ns[first] = rows["start_ns"]

    def __len__(self) -> int:
        return len(self.index)


def _unfolded(rows: npt.NDArray[np.void], ends: list[Sequence[int]], forwards: list[Sequence[float]]) -> list[Steps]:
    import numpy as np

    portion = np.cumsum(rows["repeat"]) // UNFOLD_STEPS
    borders = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(rows)]
    runs_before = np.concatenate([[0], np.cumsum(rows["repeat"] > 1)]).tolist()
    found = []
    for begin, stop in pairwise(borders):
        runs = slice(runs_before[begin], runs_before[stop])
        found.append(Steps(rows[begin:stop], ends[runs], forwards[runs]))
    return found


def steps_table(steps: Steps, offset_ns: int, constants: dict[str, Any]) -> pa.Table:
    """Drained steps as a `step` table.

    offset_ns   monotonic -> UTC
    constants   columns that are the same in every row (worker, run_id, policy, ...); a value that is None stays null
    """
    import numpy as np
    import pyarrow as pa

    from engine_probe.schema import arrow_schema

    rows, index = steps.rows, steps.index
    columns: dict[str, Any] = {
        "at_ns": pa.array(steps.end_ns + offset_ns),
        "step": pa.array(steps.step),
        "duration_s": pa.array((steps.end_ns - steps.start_ns) / 1e9),
        "probe_s": pa.array((rows["probe_ns"] / 1e9)[index]),
        "waiting_on": _waiting_on(rows, index),
    }
    for name in INTS:
        columns[name] = _ints(rows[name], index)
    if len(index) > len(rows):
        columns["wasted_slots"] = _unfilled(steps)
    for name in FLOATS:
        values = rows[name][index]
        if name == "forward_s":
            values = steps.forward_s
        elif name == "oldest_wait_s" and len(index) > len(rows):
            values = _waits(steps, values)
        columns[name] = pa.array(values, mask=np.isnan(values))
    schema = arrow_schema("step")
    arrays = []
    for field in schema:
        if field.name in columns:
            arrays.append(columns[field.name])
        elif constants.get(field.name) is not None:
            arrays.append(pa.repeat(pa.scalar(constants[field.name], field.type), len(index)))
        else:
            arrays.append(pa.nulls(len(index), field.type))
    return pa.table(arrays, schema=schema)


def _waits(steps: Steps, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A wait that is told of the last step of a run was shorter in the steps before it. 0: nobody waits."""
    import numpy as np

    earlier_ns = steps.rows["end_ns"][steps.index] - steps.end_ns
    is_earlier = (earlier_ns > 0) & (values > 0)
    values[is_earlier] = (np.rint(values[is_earlier] * 1e9) - earlier_ns[is_earlier]) / 1e9
    return values


def _unfilled(steps: Steps) -> pa.Array:
    """What is told of the last step of a run was more in the steps before it: each fills a slot of each sequence."""
    import numpy as np
    import pyarrow as pa

    rows, index = steps.rows, steps.index
    to_come = (np.cumsum(rows["repeat"]) - 1)[index] - np.arange(len(index))
    values = rows["wasted_slots"][index]
    is_unknown = (values == UNKNOWN) | ((rows["batch_size"][index] == UNKNOWN) & (to_come > 0))
    return pa.array(np.where(is_unknown, 0, values + rows["batch_size"][index] * to_come), mask=is_unknown)


def _ints(values: npt.NDArray[np.int64], index: npt.NDArray[np.int64]) -> pa.Array:
    import pyarrow as pa

    is_unknown = values == UNKNOWN
    return pa.array(values[index], mask=is_unknown[index] if is_unknown.any() else None)


def _waiting_on(rows: npt.NDArray[np.void], index: npt.NDArray[np.int64]) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    from engine_probe.schema import arrow_schema

    values = [rows[name] for name in WAITING_ON]
    unknown = np.logical_and.reduce([column == UNKNOWN for column in values])[index]
    fields = list(arrow_schema("step").field("waiting_on").type)
    return pa.StructArray.from_arrays(
        [_ints(column, index) for column in values], fields=fields, mask=pa.array(unknown)
    )
