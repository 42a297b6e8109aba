"""Columns of a table as arrays: numbers with NaN for unknown, and words as numbers of a short list."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from collector.live.durations import one_array

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[Any]


def numbers(table: pa.Table, name: str) -> Floats | None:
    """[rows] NaN where null; None where no row knows it."""
    column = table.column(name)
    if column.null_count == len(column):
        return None
    if column.null_count == 0:
        return np.asarray(column.to_numpy(), dtype=np.float64)
    return np.asarray(pc.cast(column, pa.float64(), safe=False).to_numpy(), dtype=np.float64)


def words(table: pa.Table, name: str) -> tuple[Codes, list[str]]:
    """[rows] numbers, and the words that they stand for; a null is the empty word."""
    column = table.column(name)
    if column.null_count == len(column):
        return np.zeros(len(column), dtype=np.int64), [""]
    array = one_array(column)
    only = _only_word(array)
    if only is not None:
        return np.zeros(len(array), dtype=np.int64), [only]
    encoded = pc.dictionary_encode(array if array.null_count == 0 else pc.fill_null(array, ""))
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def choices(table: pa.Table, name: str, known: tuple[str, ...]) -> tuple[Codes, list[str]]:
    """As `words`, of a column whose vocabulary is closed: a word is told by its first letter and its length, without a look at it.

    Some five times as fast as looking words up, which is what most of the cost of a block row would be.
    """
    column = table.column(name)
    marks = {_mark(ord(word[0]), len(word)): number for number, word in enumerate(known, 1)}
    if column.null_count == len(column) or len(marks) < len(known):
        return words(table, name)
    array = one_array(column)
    only = _only_word(array)
    if only is not None:
        return np.zeros(len(array), dtype=np.int32), [only]
    starts, data = _bytes_of(array)
    lengths = np.diff(starts)
    first = data[np.minimum(starts[:-1], len(data) - 1)]
    numbers_of = np.zeros(_MARKS, dtype=np.int32)
    numbers_of[list(marks)] = list(marks.values())
    of_row = numbers_of[_mark(first.astype(np.int32), lengths)]
    if array.null_count:
        of_row[~pc.is_valid(array).to_numpy(zero_copy_only=False)] = 0
    return of_row, ["", *known]


_MARKS: Final = 256 * 16


def _mark(first: Any, length: Any) -> Any:
    return first * 16 + (length & 15)


def _bytes_of(array: pa.StringArray) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Where each text begins (and the last ends), and the bytes of all."""
    _, starts, data = array.buffers()
    offsets = np.frombuffer(starts, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    return offsets, np.frombuffer(data or b"\0", dtype=np.uint8)


def _only_word(array: pa.StringArray) -> str | None:
    """The word that every row has; None where rows differ or some are null."""
    if array.null_count or not len(array) or not pa.types.is_string(array.type):
        return None
    starts, data = _bytes_of(array)
    length = int(starts[1] - starts[0])
    if length == 0 or starts[-1] - starts[0] != length * len(array) or (np.diff(starts) != length).any():
        return None
    text = data[starts[0] : starts[-1]]
    # each letter is that of the row before: one pass over neighbouring bytes, which is as fast as memory
    return array[0].as_py() if (text[length:] == text[:-length]).all() else None


def live_rows(table: pa.Table) -> pa.Table:
    """Without the rows of imported runs, which are history."""
    runs = table.column("run_id")
    return table if runs.null_count == len(runs) else table.filter(pc.is_null(runs))
