"""Arrow schemas of the nine kinds, derived from `events.py`.

pyarrow is imported inside the functions: importing the probe must stay cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from engine_probe.events import CONTRACT_VERSION, KINDS, Column

if TYPE_CHECKING:
    import pyarrow as pa


@cache
def arrow_schema(kind: str) -> pa.Schema:
    """Schema of one kind, with `kvscope.kind` and `kvscope.contract` in its metadata."""
    import pyarrow as pa

    metadata = {"kvscope.kind": kind, "kvscope.contract": str(CONTRACT_VERSION)}
    return pa.schema([pa.field(c.name, arrow_type(c), nullable=True) for c in KINDS[kind]], metadata=metadata)


def arrow_type(column: Column) -> pa.DataType:
    """Arrow type of one column."""
    import pyarrow as pa

    scalars = {
        "string": pa.string(),
        "int64": pa.int64(),
        "uint64": pa.uint64(),
        "float64": pa.float64(),
        "bool": pa.bool_(),
    }
    if column.type in scalars:
        return scalars[column.type]
    if column.type == "map<string,string>":
        return pa.map_(pa.string(), pa.string())
    if column.type in ("struct", "list<struct>"):
        struct = pa.struct([pa.field(name, scalars[type_]) for name, type_ in column.fields])
        return struct if column.type == "struct" else pa.list_(struct)
    if column.type.startswith("list<"):
        return pa.list_(scalars[column.type[5:-1]])
    raise ValueError(f"column {column.name} has unknown type {column.type}")


def table_from_rows(kind: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows (dicts, missing keys are null) -> Arrow table with the full schema of `kind`."""
    kept = list(rows)
    told = set().union(*kept)
    columns = {name: [row.get(name) for row in kept] for name in arrow_schema(kind).names if name in told}
    return table_from_columns(kind, columns, len(kept))


def table_from_columns(kind: str, columns: Mapping[str, Any], num_rows: int) -> pa.Table:
    """Columns (anything that Arrow takes as an array) -> table with the full schema of `kind`; absent ones are null.

    Raises InvalidRows naming the column where a value does not fit its type (an instant after the year 2262).
    """
    import pyarrow as pa

    from engine_probe.errors import InvalidRows

    arrays = []
    for field in arrow_schema(kind):
        if field.name not in columns:
            arrays.append(pa.nulls(num_rows, field.type))
            continue
        try:
            arrays.append(pa.array(columns[field.name], field.type))
        except (OverflowError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InvalidRows(
                f"A value of {kind}.{field.name} does not fit {field.type}: {str(error).splitlines()[0]}.",
                kind=kind,
                column=field.name,
                expected=str(field.type),
            ) from error
    return pa.table(arrays, schema=arrow_schema(kind))


def conform(kind: str, table: pa.Table) -> pa.Table:
    """Bring a table to the full schema of `kind`: absent columns become null, unknown ones are left out.

    Raises pyarrow.ArrowInvalid where a column cannot be cast without loss.
    """
    import pyarrow as pa

    schema = arrow_schema(kind)
    columns = []
    for field in schema:
        position = table.schema.get_field_index(field.name)
        if position < 0:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            columns.append(table.column(position).cast(field.type))
    return pa.table(columns, schema=schema)
