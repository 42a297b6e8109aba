"""One column of decoded JSON values -> one Arrow array, without a dict in between.

Invariant: a None is a null, everything else keeps its value; a number that does not fit is refused with its row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import msgspec
import pyarrow as pa

from engine_probe.events import Column
from engine_probe.wire.row_errors import expectation, invalid_rows

_RANGES = {"int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}


def column_array(
    kind: str, column: Column, values: tuple[Any, ...], target: pa.DataType, first_row: int = 0
) -> pa.Array:
    """`values` (one a row from `first_row`, None where unknown) as an array. Raises InvalidRows naming the row."""
    if values == (None,) * len(values):
        return pa.nulls(len(values), target)
    try:
        return _array(column, values, target)
    except (OverflowError, pa.ArrowInvalid, pa.ArrowTypeError, UnicodeError) as error:
        raise _misfit(kind, column, values, first_row) from error


def _array(column: Column, values: Sequence[Any], target: pa.DataType) -> pa.Array:
    if column.type == "struct":
        return _struct_array(values, target)
    if column.type == "list<struct>":
        return pa.ListArray.from_arrays(
            _offsets(values), _struct_array(list(_flat(values)), target.value_type), type=target
        )
    if column.type == "map<string,string>":
        keys = pa.array(_flat(values), pa.string())
        items = pa.array(chain.from_iterable(v.values() for v in values if v is not None), pa.string())
        return pa.MapArray.from_arrays(_offsets(values), keys, items)
    if column.type.startswith("list<"):
        return pa.ListArray.from_arrays(_offsets(values), pa.array(_flat(values), target.value_type), type=target)
    return pa.array(values, target)


def _flat(values: Sequence[Any]) -> Any:
    return chain.from_iterable(v for v in values if v is not None)


def _offsets(values: Sequence[Any]) -> pa.Array:
    """Offsets of lists; a null offset marks a null list."""
    ends = accumulate((0 if v is None else len(v) for v in values), initial=0)
    starts = [None if v is None else start for v, start in zip(values, ends, strict=False)]
    starts.append(sum(len(v) for v in values if v is not None))
    return pa.array(starts, pa.int32())


def _struct_array(values: Sequence[Any], target: pa.DataType) -> pa.StructArray:
    if not values:
        return pa.array([], target)
    blank = (None,) * target.num_fields
    rows = [blank if value is None else msgspec.structs.astuple(value) for value in values]
    children = [pa.array(child, field.type) for child, field in zip(zip(*rows, strict=True), target, strict=True)]
    mask = pa.array([value is None for value in values]) if None in values else None
    return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)


def _misfit(kind: str, column: Column, values: Sequence[Any], first_row: int) -> Exception:
    """The refusal of the first value that its type cannot hold."""
    for row, value in enumerate(values, start=first_row):
        for scalar, type_ in _scalars(column, value):
            low, high = _RANGES.get(type_, (-math.inf, math.inf))
            if isinstance(scalar, int) and not low <= scalar <= high:
                return invalid_rows(
                    f"is {scalar}, which does not fit {type_}",
                    kind=kind,
                    row=row,
                    column=column.name,
                    value=scalar,
                    expected=expectation(column),
                )
            if isinstance(scalar, str) and not _is_unicode(scalar):
                return invalid_rows(
                    "is no valid Unicode text",
                    kind=kind,
                    row=row,
                    column=column.name,
                    value=ascii(scalar),
                    expected="UTF-8",
                )
    return invalid_rows("does not fit", kind=kind, column=column.name, expected=expectation(column))


def _scalars(column: Column, value: Any) -> list[tuple[Any, str]]:
    if value is None:
        return []
    if column.fields:
        types = [type_ for _, type_ in column.fields]
        structs = value if isinstance(value, list) else [value]
        return [pair for item in structs for pair in zip(msgspec.structs.astuple(item), types, strict=True)]
    if column.type == "map<string,string>":
        return [(text, "string") for text in chain(value, value.values())]
    if column.type.startswith("list<"):
        return [(item, column.type[5:-1]) for item in value]
    return [(value, column.type)]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
