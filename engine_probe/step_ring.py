"""Steps of an engine, each a packed row of a preallocated ring: the engine's thread writes, the flush thread reads.

One writer, one reader, no lock: the writer fills a row and then moves `head`, the reader copies rows and then moves
`tail`. A full ring loses the new step and counts it; the writer never waits. A row may stand for a run of equal steps.
Invariant: head - tail <= capacity; rows between them are whole.
"""

from __future__ import annotations

import struct
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

    def drain(self) -> npt.NDArray[np.void]:
        """Copy out what is there, oldest first, as a structured array, and give the room back."""
        import numpy as np

        head, tail = self.head, self.tail
        rows = np.frombuffer(self._buffer, dtype=row_dtype())
        first, last = tail % self.capacity, (head - 1) % self.capacity + 1
        if head == tail:
            out = rows[:0].copy()
        elif first < last:
            out = rows[first:last].copy()
        else:
            out = np.concatenate([rows[first:], rows[:last]])
        self.tail = head
        return out


def row_dtype() -> np.dtype[np.void]:
    """The ring's row as numpy sees it."""
    import numpy as np

    whole = [(name, "<i8") for name in (*OWN, *INTS, *WAITING_ON)]
    return np.dtype([*whole, *((name, "<f8") for name in FLOATS)])


def steps_table(rows: npt.NDArray[np.void], offset_ns: int, constants: dict[str, Any]) -> pa.Table:
    """Ring rows as a `step` table; runs of steps are unfolded.

    offset_ns   monotonic -> UTC
    constants   columns that are the same in every row (worker, run_id, policy, ...); a value that is None stays null
    """
    import numpy as np
    import pyarrow as pa

    from engine_probe.schema import arrow_schema

    repeat = np.maximum(rows["repeat"], 1)
    index = np.repeat(np.arange(len(rows)), repeat)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    # A run's steps share its span equally; integer division first, so that the last one ends where the run ends.
    span = (rows["end_ns"] - rows["start_ns"])[index]
    start = rows["start_ns"][index] + span * nth // repeat[index]
    end = rows["start_ns"][index] + span * (nth + 1) // repeat[index]
    columns: dict[str, Any] = {
        "at_ns": pa.array(end + offset_ns),
        "step": pa.array(rows["step"][index] + nth),
        "duration_s": pa.array((end - start) / 1e9),
        "probe_s": pa.array(rows["probe_ns"][index] / 1e9 / repeat[index]),
        "waiting_on": _waiting_on(rows, index),
    }
    for name in INTS:
        columns[name] = _ints(rows[name][index])
    for name in FLOATS:
        values = rows[name][index]
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


def _ints(values: npt.NDArray[np.int64]) -> pa.Array:
    import pyarrow as pa

    return pa.array(values, mask=values == UNKNOWN)


def _waiting_on(rows: npt.NDArray[np.void], index: npt.NDArray[np.int64]) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    from engine_probe.schema import arrow_schema

    values = [rows[name][index] for name in WAITING_ON]
    unknown = np.logical_and.reduce([column == UNKNOWN for column in values])
    fields = list(arrow_schema("step").field("waiting_on").type)
    return pa.StructArray.from_arrays([_ints(column) for column in values], fields=fields, mask=pa.array(unknown))
