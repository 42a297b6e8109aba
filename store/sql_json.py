"""Arrow rows as JSON that loses nothing a number can say: the form in which SQL results leave over HTTP and `--json`.

Integers and decimals are number literals with all their digits, whatever their size (a reader in JavaScript must parse
those beyond 2^53 itself); NaN and infinities, which JSON does not have, are null; instants are ISO 8601, with `Z`
where the type knows its zone; binary is base64; a struct is an object, a map an object where its keys are texts, else a
list of [key, value].

Invariant: what comes out is for `msgspec.json`: plain values, and `msgspec.Raw` for numbers beyond 64 bits.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

_I64 = range(-(2**63), 2**64)


def json_rows(table: pa.Table) -> list[list[Any]]:
    """Rows of the table, each a list in the order of the columns."""
    columns = [json_column(column) for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def json_objects(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of the table, each an object by column name; of columns of the same name the last one counts."""
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in json_rows(table)]


def json_column(column: pa.ChunkedArray) -> list[Any]:
    """Values of one column."""
    import pyarrow as pa

    texts = _texts_for(column.type)
    if texts != column.type:
        column = pa.chunked_array([_cast(chunk, texts) for chunk in column.chunks], type=texts)
    values = column.to_pylist()
    convert = _converter(column.type)
    return values if convert is None else [None if value is None else convert(value) for value in values]


def _texts_for(type_: pa.DataType) -> pa.DataType:
    """The type with instants, intervals and dictionaries replaced by what their JSON form is made of."""
    import pyarrow as pa

    t = pa.types
    if t.is_timestamp(type_) or t.is_date(type_) or t.is_time(type_) or t.is_duration(type_) or t.is_interval(type_):
        return pa.string()
    if t.is_dictionary(type_):
        return _texts_for(type_.value_type)
    if t.is_map(type_):
        return pa.map_(_texts_for(type_.key_type), _texts_for(type_.item_type))
    if t.is_fixed_size_list(type_):
        return pa.list_(_texts_for(type_.value_type), type_.list_size)
    if t.is_list(type_):
        return pa.list_(_texts_for(type_.value_type))
    if t.is_struct(type_):
        return pa.struct([pa.field(f.name, _texts_for(f.type)) for f in type_])
    return type_


def _cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Bring an array to the type `_texts_for` gave, level by level."""
    import pyarrow as pa

    t, have = pa.types, array.type
    if have == wanted:
        return array
    if t.is_dictionary(have):
        return _cast(array.dictionary_decode(), wanted)
    if t.is_timestamp(have) or t.is_date(have):
        return _iso(array)
    if t.is_interval(have):
        return pa.array([None if v is None else _interval(v) for v in array.to_pylist()], pa.string())
    if t.is_map(have):
        entries = pa.StructArray.from_arrays(
            [_cast(array.keys, wanted.key_type), _cast(array.items, wanted.item_type)],
            fields=[pa.field("key", wanted.key_type, nullable=False), pa.field("value", wanted.item_type)],
        )
        return pa.Array.from_buffers(
            wanted,
            len(array),
            array.buffers()[:2],
            null_count=array.null_count,
            offset=array.offset,
            children=[entries],
        )
    if t.is_list(have):
        return pa.Array.from_buffers(
            wanted,
            len(array),
            array.buffers()[:2],
            null_count=array.null_count,
            offset=array.offset,
            children=[_cast(array.values, wanted.value_type)],
        )
    if t.is_fixed_size_list(have):
        return pa.Array.from_buffers(
            wanted,
            len(array),
            array.buffers()[:1],
            null_count=array.null_count,
            offset=array.offset,
            children=[_cast(array.values, wanted.value_type)],
        )
    if t.is_struct(have):
        children = [_cast(array.field(i), wanted.field(i).type) for i in range(have.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(wanted), mask=array.is_null())
    return array.cast(wanted)


def _iso(array: pa.Array) -> pa.Array:
    """Timestamps and dates as ISO 8601; DuckDB's infinities (the ends of the integer below) become null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    zoned = pa.types.is_timestamp(array.type) and array.type.tz is not None
    if zoned:  # read as UTC, which it counts in: Arrow would look for a database of zones, which the jail hides
        array = array.view(pa.timestamp(array.type.unit))
    raw = array.view(pa.int64() if array.type.bit_width == 64 else pa.int32())
    finite = pc.less(pc.abs(raw), pa.scalar(2 ** (array.type.bit_width - 1) - 1, raw.type))
    text = pc.if_else(finite, array, pa.scalar(None, array.type)).cast(pa.string())
    text = pc.replace_substring(text, " ", "T")
    return pc.binary_join_element_wise(text, "Z", "") if zoned else text


def _interval(value: Any) -> str:
    """An interval as ISO 8601 duration: months, days and seconds stay apart, as they are of different kinds."""
    seconds = Decimal(value.nanoseconds) / 1_000_000_000
    text = "P" + (f"{value.months}M" if value.months else "") + (f"{value.days}D" if value.days else "")
    return text + (f"T{seconds.normalize():f}S" if seconds or text == "P" else "")


def _converter(type_: pa.DataType) -> Callable[[Any], Any] | None:
    """What makes a Python value of this type fit for JSON; None where it is already."""
    import pyarrow as pa

    t = pa.types
    if t.is_floating(type_):
        return lambda v: v if math.isfinite(v) else None
    if t.is_decimal(type_):
        return _decimal
    if t.is_binary(type_) or t.is_large_binary(type_) or t.is_fixed_size_binary(type_):
        return lambda v: base64.b64encode(v).decode()
    if t.is_map(type_):
        return _map_converter(type_)
    if t.is_list(type_) or t.is_large_list(type_) or t.is_fixed_size_list(type_):
        inner = _converter(type_.value_type)
        return None if inner is None else lambda v: [None if x is None else inner(x) for x in v]
    if t.is_struct(type_):
        inners = [(f.name, _converter(f.type)) for f in type_]
        if all(convert is None for _, convert in inners):
            return None
        return lambda v: {name: _apply(convert, v[name]) for name, convert in inners}
    if t.is_union(type_):
        return _any
    return None


def _map_converter(type_: pa.DataType) -> Callable[[Any], Any]:
    import pyarrow as pa

    key, item = _converter(type_.key_type), _converter(type_.item_type)
    if pa.types.is_string(type_.key_type) or pa.types.is_large_string(type_.key_type):
        return lambda pairs: {k: _apply(item, v) for k, v in pairs}
    return lambda pairs: [[_apply(key, k), _apply(item, v)] for k, v in pairs]


def _apply(convert: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _decimal(value: Decimal) -> Any:
    exponent = value.as_tuple().exponent
    if isinstance(exponent, int) and exponent >= 0:
        whole = int(value)
        return whole if whole in _I64 else msgspec.Raw(str(whole).encode())
    return msgspec.Raw(f"{value:f}".encode())


def _any(value: Any) -> Any:
    """A value of a union, whose type is known only now."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if isinstance(value, int | str | bool) else str(value)
