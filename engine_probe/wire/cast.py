"""Brings a column as it came over the wire to the type of the contract, without loss or with a clear refusal.

Writers differ: polars sends large strings, pandas dictionaries and timestamps, other languages small integers. What
keeps every value is cast; what would round, wrap or cut is refused, naming the row. Only listed wire types are taken:
a run-length or view type of a few bytes can stand for terabytes (`at_ns` of one run, 2**60 long).
Invariant: the result has exactly the contract's type, and every value equals the one sent.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from engine_probe.errors import TooLarge
from engine_probe.events import Column
from engine_probe.wire.row_errors import expectation, invalid_rows

MAX_DICTIONARY_BYTES = 1 << 30
"""Most bytes a dictionary-encoded text column may unfold to."""


def cast_column(kind: str, column: Column, wire: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    """`wire` as `target`, the contract's type of `column`.

    Raises InvalidRows where a value would be lost, TooLarge for a dictionary that unfolds to very much.
    """
    if wire.type == target:
        return wire
    if pa.types.is_null(wire.type):
        return pa.chunked_array([pa.nulls(len(wire), target)])
    if not _is_castable(wire.type, target, column.name):
        raise invalid_rows(
            f"has the type {wire.type}", kind=kind, column=column.name, expected=f"{target}: {expectation(column)}"
        )
    if pa.types.is_dictionary(wire.type):
        _check_dictionary(kind, column, wire)
    try:
        return pa.chunked_array([_cast(chunk, target) for chunk in wire.chunks], type=target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError) as error:
        row = _first_bad_row(wire, target)
        raise invalid_rows(
            "does not fit",
            kind=kind,
            row=row,
            column=column.name,
            value=None if row is None else _value(wire, row),
            expected=expectation(column),
        ) from error


def _is_castable(wire: pa.DataType, target: pa.DataType, name: str) -> bool:
    if pa.types.is_null(wire) or wire == target:
        return True
    if pa.types.is_integer(target):
        instant = pa.types.is_timestamp(wire) and name.endswith("_ns")
        return bool(pa.types.is_integer(wire) or pa.types.is_floating(wire) or instant)
    if pa.types.is_floating(target):
        return bool(pa.types.is_integer(wire) or pa.types.is_floating(wire))
    if pa.types.is_string(target):
        return _is_text(wire.value_type if pa.types.is_dictionary(wire) else wire)
    if pa.types.is_map(target):
        return pa.types.is_map(wire) and _is_text(wire.key_type) and _is_text(wire.item_type)
    if pa.types.is_list(target):
        listed = pa.types.is_list(wire) or pa.types.is_large_list(wire) or pa.types.is_fixed_size_list(wire)
        return (
            listed and not pa.types.is_null(wire.value_type) and _is_castable(wire.value_type, target.value_type, name)
        )
    if pa.types.is_struct(target) and pa.types.is_struct(wire):
        known = {field.name: field.type for field in target}
        named = [field for field in wire if field.name in known]
        unique = len({field.name for field in named}) == len(named)
        return bool(named) and unique and all(_is_castable(f.type, known[f.name], f.name) for f in named)
    return False


def _is_text(wire: pa.DataType) -> bool:
    return bool(pa.types.is_string(wire) or pa.types.is_large_string(wire) or pa.types.is_string_view(wire))


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type == target:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), target)
    if pa.types.is_timestamp(array.type):
        return array.cast(pa.timestamp("ns", array.type.tz)).cast(target)
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode().cast(target)
    if pa.types.is_struct(target):
        return _cast_struct(array, target)
    if pa.types.is_list(target):
        return _cast_list(array, target)
    return array.cast(target)


def _cast_struct(array: pa.StructArray, target: pa.DataType) -> pa.StructArray:
    """By name: fields not sent become null, unknown ones are left out."""
    children = []
    for field in target:
        position = array.type.get_field_index(field.name)
        if position < 0:
            children.append(pa.nulls(len(array), field.type))
        else:
            children.append(_cast(pc.struct_field(array, [position]), field.type))
    return pa.StructArray.from_arrays(children, fields=list(target), mask=array.is_null())


def _cast_list(array: pa.Array, target: pa.DataType) -> pa.ListArray:
    values = _cast(array.flatten(), target.value_type)
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=target, mask=array.is_null())


def _check_dictionary(kind: str, column: Column, wire: pa.ChunkedArray) -> None:
    total = 0
    for chunk in wire.chunks:
        longest = pc.max(pc.binary_length(chunk.dictionary.cast(pa.large_string()))).as_py() or 0
        total += longest * len(chunk)
    if total > MAX_DICTIONARY_BYTES:
        raise TooLarge(
            f"{kind}, column {column.name}: the dictionary may unfold to {total} bytes; send fewer rows a batch",
            limit_bytes=MAX_DICTIONARY_BYTES,
        )


def _first_bad_row(wire: pa.ChunkedArray, target: pa.DataType) -> int | None:
    """Row of the first value that cannot be cast, by halving; None where no single row is to blame."""
    low, high = 0, len(wire)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fails(wire.slice(low, middle - low), target) else (middle, high)
    return low if high > low and _fails(wire.slice(low, 1), target) else None


def _fails(wire: pa.ChunkedArray, target: pa.DataType) -> bool:
    try:
        for chunk in wire.chunks:
            _cast(chunk, target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError):
        return True
    return False


def _value(wire: pa.ChunkedArray, row: int) -> Any:
    try:
        return wire[row].as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        return str(wire[row])
