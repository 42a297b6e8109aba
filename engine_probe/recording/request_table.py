"""Rows of ended requests -> one Arrow table, and rows of rare kinds likewise.

Invariant: a value that does not fit its column becomes null and is counted, so that one odd value of an engine does not
cost the other rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_probe.recording.request_rows import RequestRow

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


def requests_table(rows: Sequence[RequestRow], offset_ns: int, constants: Mapping[str, Any]) -> tuple[pa.Table, int]:
    """The `request` table, and how many values did not fit.

    offset_ns   monotonic -> UTC, for every instant;  constants   columns where a row tells nothing itself
    """
    import pyarrow as pa

    from engine_probe.schema import arrow_schema

    schema = arrow_schema("request")
    columns = _by_column([row.columns for row in rows], constants)
    columns["at_ns"] = columns["end_ns"]
    arrays, num_misfits = [], 0
    for field in schema:
        if field.name in ("token_ns", "token_counts"):
            array, misfits = _token_lists(rows, field.name, offset_ns), 0
        elif field.name == "spans":
            array, misfits = _spans(rows, field.type, offset_ns), 0
        else:
            array, misfits = _column(columns.get(field.name), len(rows), field, offset_ns)
        arrays.append(array)
        num_misfits += misfits
    return pa.table(arrays, schema=schema), num_misfits


def rows_table(
    kind: str, rows: Sequence[Mapping[str, Any]], offset_ns: int, constants: Mapping[str, Any]
) -> tuple[pa.Table, int]:
    """A table of any kind from dicts whose instants are monotonic, and how many values did not fit."""
    import pyarrow as pa

    from engine_probe.schema import arrow_schema

    schema = arrow_schema(kind)
    columns = _by_column(rows, constants)
    arrays, num_misfits = [], 0
    for field in schema:
        array, misfits = _column(columns.get(field.name), len(rows), field, offset_ns)
        arrays.append(array)
        num_misfits += misfits
    return pa.table(arrays, schema=schema), num_misfits


def _by_column(rows: Sequence[Mapping[str, Any]], constants: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Column name -> one value a row; a row has about a third of the columns, so this goes by what is there."""
    columns = {name: [value] * len(rows) for name, value in constants.items() if value is not None}
    for number, row in enumerate(rows):
        for name, value in row.items():
            if name not in columns:
                columns[name] = [None] * len(rows)
            columns[name][number] = value
    return columns


def _column(values: list[Any] | None, num_rows: int, field: pa.Field, offset_ns: int) -> tuple[pa.Array, int]:
    import pyarrow as pa

    if values is None:
        return pa.nulls(num_rows, field.type), 0
    return values_array(values, field.type, offset_ns if field.name.endswith("_ns") else 0)


def values_array(values: list[Any], type_: pa.DataType, shift: int = 0) -> tuple[pa.Array, int]:
    """Values as an array of this type, numbers moved by `shift`; those that do not fit become null and are counted."""
    import pyarrow as pa

    if all(value is None for value in values):
        return pa.nulls(len(values), type_), 0
    if pa.types.is_map(type_):
        values = [list(value.items()) if isinstance(value, Mapping) else value for value in values]
    if shift:
        values = [value + shift if isinstance(value, int) else value for value in values]
    try:
        return pa.array(values, type_, from_pandas=True), 0
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        fitting = [value if _fits(value, type_) else None for value in values]
        misfits = sum(new is None and old is not None for new, old in zip(fitting, values, strict=True))
        return pa.array(fitting, type_, from_pandas=True), misfits


def _fits(value: Any, type_: pa.DataType) -> bool:
    import pyarrow as pa

    try:
        pa.array([value], type_, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def _token_lists(rows: Sequence[RequestRow], name: str, offset_ns: int) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    lists = [row.token_ns if name == "token_ns" else row.token_counts for row in rows]
    shift = offset_ns if name == "token_ns" else 0
    flat = np.concatenate([values for values in lists if values is not None] or [np.empty(0, np.int64)])
    return pa.ListArray.from_arrays(_offsets([None if v is None else len(v) for v in lists]), pa.array(flat + shift))


def _spans(rows: Sequence[RequestRow], type_: pa.DataType, offset_ns: int) -> pa.Array:
    import pyarrow as pa

    flat = [span for row in rows for span in row.spans]
    children = [
        pa.array([span.phase for span in flat], pa.string()),
        pa.array([span.start_ns + offset_ns for span in flat], pa.int64()),
        pa.array([span.end_ns + offset_ns for span in flat], pa.int64()),
        pa.array([span.tokens for span in flat], pa.int64()),
    ]
    values = pa.StructArray.from_arrays(children, fields=list(type_.value_type))
    return pa.ListArray.from_arrays(_offsets([len(row.spans) or None for row in rows]), values, type=type_)


def _offsets(lengths: Sequence[int | None]) -> pa.Array:
    """Offsets of lists; None is a null list."""
    import pyarrow as pa

    offsets: list[int | None] = []
    end = 0
    for length in lengths:
        offsets.append(None if length is None else end)
        end += length or 0
    return pa.array([*offsets, end], pa.int32())
