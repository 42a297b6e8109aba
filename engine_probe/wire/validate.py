"""Judges the values of rows that already have the right shape: whole columns at a time, so that ingest stays fast.

Every rule is derived from a column's type, name and unit in `events.py`: required columns are not null, closed
vocabularies hold, a name is not empty, instants are UTC nanoseconds and at most a day ahead, durations are finite and not negative, counts
not below 0, ratios within 0..1, parallel lists are parallel. Columns without any value are not looked at.
Invariant: a table that passes can be stored and joined; one that does not is refused with its first bad row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pyarrow as pa
import pyarrow.compute as pc

from engine_probe.events import KINDS, Column
from engine_probe.wire.row_errors import expectation
from engine_probe.wire.validate_nested import check_list, check_map, check_structs, check_token_lists
from engine_probe.wire.validate_scalars import check_counts, check_floats, check_instants, refuse

Check = Callable[[str, Column, pa.ChunkedArray, int], None]


def validate(kind: str, table: pa.Table, now_ns: int) -> None:
    """Refuse a table of `kind` (which conforms to its Arrow schema) whose values break the contract.

    now_ns   the receiver's clock, ns since 1970-01-01 UTC: instants more than a day later are refused
    Raises InvalidRows with the facts kind, row, column, value, expected.
    """
    if table.num_rows == 0:
        return
    for column, check in _checks(kind):
        array = table.column(column.name)
        if array.null_count:
            if column.required:
                raise refuse(kind, column, array, pc.is_null(array), "is null")
            if array.null_count == len(array):
                continue
        if check is not None:
            check(kind, column, array, now_ns)
    if kind == "request":
        check_token_lists(table.column("token_ns"), table.column("token_counts"))


@cache
def _checks(kind: str) -> tuple[tuple[Column, Check | None], ...]:
    pairs = [(column, _check_of(column)) for column in KINDS[kind]]
    return tuple((column, check) for column, check in pairs if column.required or check is not None)


def _check_of(column: Column) -> Check | None:
    if column.choices:
        return _check_choices
    if column.type == "string" and (column.required or column.name == "run_id"):
        return _check_named
    if column.type == "int64":
        if column.name.endswith("_ns"):
            return check_instants
        return None if column.signed else check_counts
    if column.type == "float64":
        return check_floats
    if column.fields:
        return check_structs
    if column.type.startswith("map<"):
        return check_map
    return check_list if column.type.startswith("list<") else None


def _check_named(kind: str, column: Column, array: pa.ChunkedArray, now_ns: int) -> None:
    """An empty name names nothing; rows of a run called '' could not be told from live ones."""
    if pc.any(empty := pc.equal(array, "")).as_py():
        raise refuse(
            kind, column, array, empty, "is empty", f"a text with at least one character: {expectation(column)}"
        )


def _check_choices(kind: str, column: Column, array: pa.ChunkedArray, now_ns: int) -> None:
    known = pc.is_in(array, value_set=pa.array([*column.choices, None], pa.string()))
    if not pc.all(known).as_py():
        raise refuse(kind, column, array, pc.invert(known))
