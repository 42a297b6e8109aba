"""The nested half of `validate.py`: lists, structs and maps, scanned through their flat children.

Invariant: no check unpacks a list into Python; a child is looked at only where its column has any value.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine_probe.errors import InvalidRows
from engine_probe.events import Column
from engine_probe.wire.row_errors import expectation, invalid_rows
from engine_probe.wire.validate_scalars import check_counts, check_floats, check_instants


def check_list(kind: str, column: Column, array: pa.ChunkedArray, now_ns: int) -> None:
    """Entries of a list of numbers or texts: none is null, instants are instants, counts are not below 0."""
    for base, chunk in _chunks(array):
        _check_entries(kind, column, chunk, base, chunk.flatten(), column.name, column.type[5:-1], now_ns)


def check_structs(kind: str, column: Column, array: pa.ChunkedArray, now_ns: int) -> None:
    """Fields of a struct, or of every struct in a list: the rules of columns; an end is not before its start."""
    for base, chunk in _chunks(array):
        structs = chunk.flatten() if column.type == "list<struct>" else chunk
        if column.type == "list<struct>" and structs.null_count:
            raise _refuse(kind, column, chunk, base, pc.is_null(structs), "holds a null entry", None)
        children = {name: pc.struct_field(structs, [index]) for index, (name, _) in enumerate(column.fields)}
        for name, type_ in column.fields:
            if children[name].null_count < len(structs):
                _check_scalars(kind, column, chunk, base, children[name], name, type_, now_ns)
        if "start_ns" in children and "end_ns" in children:
            backwards = pc.less(children["end_ns"], children["start_ns"])
            if pc.any(backwards).as_py():
                raise _refuse(kind, column, chunk, base, backwards, "has an entry that ends before it starts", None)


def check_map(kind: str, column: Column, array: pa.ChunkedArray, now_ns: int) -> None:
    """Keys of a map are unique in their row, as the store requires."""
    for base, chunk in _chunks(array):
        if chunk.keys.null_count:
            raise invalid_rows("has a null key", kind=kind, column=column.name, expected="every key a text")
        codes = chunk.keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        offsets = chunk.offsets.to_numpy()
        lengths = np.diff(offsets)
        if len(lengths) == 0 or lengths.max() < 2:
            continue
        width = int(lengths[0])
        if (lengths == width).all():
            # Rows of one sender mostly have the same keys in the same order: then one row speaks for all.
            grid = codes[offsets[0] : offsets[-1]].reshape(-1, width)
            if (grid == grid[0]).all() and len(set(grid[0].tolist())) == width:
                continue
        rows = np.repeat(np.arange(len(lengths)), lengths)
        pairs = np.sort(rows * (int(codes.max()) + 1) + codes[offsets[0] : offsets[-1]].astype(np.int64))
        twice = np.flatnonzero(pairs[1:] == pairs[:-1])
        if len(twice):
            row = int(pairs[twice[0]] // (int(codes.max()) + 1))
            keys = [key for key, _ in chunk[row].as_py()]
            key = next(key for key in keys if keys.count(key) > 1)
            raise invalid_rows(
                f"has the key {key!r} twice",
                kind=kind,
                row=base + row,
                column=column.name,
                value=key,
                expected="every key once",
            )


def check_token_lists(token_ns: pa.ChunkedArray, token_counts: pa.ChunkedArray) -> None:
    """`token_ns` ascends within each request, and `token_counts`, where present, is parallel to it."""
    for base, chunk in _chunks(token_ns):
        _check_ascending(chunk, base)
    if token_counts.null_count == len(token_counts):
        return
    unequal = pc.not_equal(pc.list_value_length(token_ns), pc.list_value_length(token_counts))
    orphan = pc.and_(pc.is_null(token_ns), pc.is_valid(token_counts))
    bad = pc.or_(pc.fill_null(unequal, False), orphan)
    if pc.any(bad).as_py():
        row = int(np.argmax(bad.to_numpy()))
        instants, counts = token_ns[row].as_py(), token_counts[row].as_py()
        have = "null" if instants is None else f"{len(instants)} entries"
        raise invalid_rows(
            f"has {len(counts)} entries where token_ns has {have}",
            kind="request",
            row=row,
            column="token_counts",
            value=len(counts),
            expected="one count for each instant of token_ns",
        )


def _check_ascending(chunk: pa.ListArray, base: int) -> None:
    flat = chunk.flatten()
    if flat.null_count or len(flat) < 2:
        return
    values = flat.to_numpy()
    lower = np.flatnonzero(values[1:] < values[:-1]) + 1
    if len(lower) == 0:
        return
    lengths = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    # A smaller instant is right where the next request's list begins.
    inside = lower[~np.isin(lower, ends, assume_unique=False)]
    if len(inside):
        row = int(np.searchsorted(ends, inside[0], side="right"))
        raise invalid_rows(
            f"goes back from {int(values[inside[0] - 1])} to {int(values[inside[0]])}",
            kind="request",
            row=base + row,
            column="token_ns",
            value=int(values[inside[0]]),
            expected="ascending instants",
        )


def _check_entries(
    kind: str, column: Column, chunk: pa.Array, base: int, flat: pa.Array, name: str, type_: str, now_ns: int
) -> None:
    if flat.null_count:
        raise _refuse(kind, column, chunk, base, pc.is_null(flat), "holds a null entry", None)
    _check_scalars(kind, column, chunk, base, flat, name, type_, now_ns)


def _check_scalars(
    kind: str, column: Column, chunk: pa.Array, base: int, flat: pa.Array, name: str, type_: str, now_ns: int
) -> None:
    """The flat rule of `validate.py`, its refusal told by the row that owns the entry."""
    if type_ == "int64":
        check = check_instants if name.endswith("_ns") else None if column.signed else check_counts
    else:
        check = check_floats if type_ == "float64" else None
    if check is None or len(flat) == 0:
        return
    # What a router scores may be negative: nested floats need only be finite.
    entry = Column(name, type_, column.doc, signed=type_ == "float64")
    try:
        check(kind, entry, pa.chunked_array([flat]), now_ns)
    except InvalidRows as error:
        where = "" if name == column.name else f" at .{name}"
        raise invalid_rows(
            f"has an entry{where} that {error.problem}",
            kind=kind,
            row=base + _owner(column, chunk, error.row),
            column=column.name,
            value=error.value,
            expected=error.expected,
        ) from error


def _refuse(
    kind: str, column: Column, chunk: pa.Array, base: int, bad: pa.Array, problem: str, value: object
) -> InvalidRows:
    position = int(np.argmax(pc.fill_null(bad, False).to_numpy(zero_copy_only=False)))
    row = base + _owner(column, chunk, position)
    return invalid_rows(problem, kind=kind, row=row, column=column.name, value=value, expected=expectation(column))


def _owner(column: Column, chunk: pa.Array, position: int) -> int:
    """Row of the chunk that holds the entry at `position` of the flattened child."""
    if not column.type.startswith("list<"):
        return position
    lengths = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy()
    return int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), position, side="right"))


def _chunks(array: pa.ChunkedArray) -> Iterator[tuple[int, pa.Array]]:
    base = 0
    for chunk in array.chunks:
        if chunk.null_count < len(chunk):
            yield base, chunk
        base += len(chunk)
