"""JSON and NDJSON bodies: msgspec decodes structs derived from `events.py`, which become Arrow column by column.

Idea: a first pass forbids unknown columns, which costs nothing; only a body that has some is decoded a second time
without that rule and its unknown columns are counted. Every refusal is slow to make and says kind, row, column, value
and what was expected. Invariant: the same rows as Arrow and as JSON give the same tables.
Source: design section 5; msgspec 0.19 or newer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import pyarrow as pa

from engine_probe.errors import InvalidRows
from engine_probe.events import KINDS, Column
from engine_probe.schema import arrow_schema
from engine_probe.wire.codec import Decoded
from engine_probe.wire.json_columns import column_array
from engine_probe.wire.json_errors import document_error, line_error
from engine_probe.wire.row_errors import invalid_rows

RUN_ROWS = 512
"""Rows turned at a time: their values stay in the processor's cache between the two passes over them."""

_TYPES: dict[str, Any] = {
    "string": str,
    "int64": int,
    "uint64": int,
    "float64": float,
    "bool": bool,
    "map<string,string>": dict[str, str | None],
}


def decode_document(body: bytes) -> Decoded:
    """Tables of one JSON document. Raises InvalidRows naming kind, row, column, value and what was expected."""
    try:
        envelope = _document_decoder(True).decode(body)
        ignored: dict[str, int] = {}
    except (msgspec.DecodeError, RecursionError) as error:
        if "unknown field" not in str(error):
            raise document_error(body, error) from error
        try:
            envelope = _document_decoder(False).decode(body)
        except (msgspec.DecodeError, RecursionError) as again:
            raise document_error(body, again) from again
        ignored = _count_unknown(_row_maps(body))
    groups = {kind: getattr(envelope.events, kind) for kind in KINDS}
    tables = {kind: rows_to_table(kind, rows) for kind, rows in groups.items() if rows is not None}
    return Decoded(tables, envelope.source, envelope.epoch, envelope.seq, envelope.sent_ns, ignored)


def decode_lines(body: bytes) -> Decoded:
    """Tables of NDJSON: an optional header line, then a row a line. Raises InvalidRows naming the line too."""
    body = body.lstrip()
    first, _, rest = body.partition(b"\n")
    try:
        header = _header_decoder().decode(first)
    except (msgspec.DecodeError, RecursionError) as error:
        raise line_error(body, error) from error
    is_row = header.kind is not None
    if not is_row and header == type(header)():
        raise line_error(first, msgspec.ValidationError("Object missing required field `kind` - at `$[0]`"))
    lines, skipped = (body, 0) if is_row else (rest, 1)
    try:
        rows = _line_decoder(True).decode_lines(lines)
        ignored: dict[str, int] = {}
    except (msgspec.DecodeError, RecursionError) as error:
        if "unknown field" not in str(error):
            raise line_error(lines, error, skipped) from error
        try:
            rows = _line_decoder(False).decode_lines(lines)
        except (msgspec.DecodeError, RecursionError) as again:
            raise line_error(lines, again, skipped) from again
        ignored = _count_unknown(_line_maps(lines))
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(type(row).__name__, []).append(row)
    tables = {kind: rows_to_table(kind, groups[kind]) for kind in KINDS if kind in groups}
    if is_row:
        return Decoded(tables, ignored_columns=ignored)
    return Decoded(tables, header.source, header.epoch, header.seq, header.sent_ns, ignored)


def encode_lines(tables: Mapping[str, pa.Table], header: Mapping[str, object] | None = None) -> bytes:
    """A row a line with its `kind` first, nulls left out; `header` becomes the first line."""
    encoder = msgspec.json.Encoder()
    out = [encoder.encode(header) + b"\n"] if header is not None else []
    for kind, table in tables.items():
        out.append(encoder.encode_lines([{"kind": kind, **row} for row in table_to_rows(kind, table)]))
    return b"".join(out)


def table_to_rows(kind: str, table: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows as dicts: nulls left out, maps as dicts."""
    maps = {c.name for c in KINDS[kind] if c.type == "map<string,string>"}
    for batch in table.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            yield {name: dict(value) if name in maps else value for name, value in row.items() if value is not None}


def rows_to_table(kind: str, rows: Sequence[msgspec.Struct]) -> pa.Table:
    """Structs of one kind -> Arrow table with the full schema. Raises InvalidRows for a number that does not fit."""
    schema = arrow_schema(kind)
    if not rows:
        return schema.empty_table()
    runs = []
    for start in range(0, len(rows), RUN_ROWS):
        columns = zip(*map(msgspec.structs.astuple, rows[start : start + RUN_ROWS]), strict=True)
        arrays = [
            column_array(kind, column, values, field.type, start)
            for column, values, field in zip(KINDS[kind], columns, schema, strict=True)
        ]
        runs.append(pa.record_batch(arrays, schema=schema))
    return pa.Table.from_batches(runs).combine_chunks()


@cache
def row_struct(kind: str, strict: bool, tagged: bool) -> type[msgspec.Struct]:
    """The struct of one row, fields in the contract's order. strict: no unknown columns; tagged: `kind` tells which."""
    fields: list[Any] = [_field(kind, column, strict) for column in KINDS[kind]]
    options: dict[str, Any] = {"tag_field": "kind", "tag": kind} if tagged else {}
    return msgspec.defstruct(kind, fields, kw_only=True, forbid_unknown_fields=strict, gc=False, **options)


def _field(kind: str, column: Column, strict: bool) -> tuple[str, Any] | tuple[str, Any, None]:
    if column.fields:
        parts: list[Any] = [(name, _TYPES[type_] | None, None) for name, type_ in column.fields]
        inner: Any = msgspec.defstruct(f"{kind}_{column.name}", parts, forbid_unknown_fields=strict, gc=False)
        type_ = list[inner] if column.type == "list<struct>" else inner
    elif column.type.startswith("list<"):
        type_ = list[_TYPES[column.type[5:-1]]]  # type: ignore[misc]  # a type made at run time
    else:
        type_ = _TYPES[column.type]
    return (column.name, type_) if column.required else (column.name, type_ | None, None)


@cache
def _document_decoder(strict: bool) -> msgspec.json.Decoder[Any]:
    kinds: list[Any] = [(kind, list[row_struct(kind, strict, False)] | None, None) for kind in KINDS]  # type: ignore[misc]  # likewise
    events = msgspec.defstruct("events", kinds, forbid_unknown_fields=True, gc=False)
    envelope = msgspec.defstruct("envelope", [("events", events), *_HEADER_FIELDS], kw_only=True, gc=False)
    return msgspec.json.Decoder(envelope)


_HEADER_FIELDS: list[Any] = [
    ("source", str | None, None),
    ("epoch", str | None, None),
    ("seq", int | None, None),
    ("sent_ns", int | None, None),
]


@cache
def _header_decoder() -> msgspec.json.Decoder[Any]:
    fields: list[Any] = [("kind", str | None, None), *_HEADER_FIELDS]
    return msgspec.json.Decoder(msgspec.defstruct("header", fields, gc=False))


@cache
def _line_decoder(strict: bool) -> msgspec.json.Decoder[Any]:
    union: Any = row_struct(next(iter(KINDS)), strict, True)
    for kind in list(KINDS)[1:]:
        union = union | row_struct(kind, strict, True)
    return msgspec.json.Decoder(union)


def _count_unknown(rows: Iterator[tuple[str, dict[str, Any]]]) -> dict[str, int]:
    columns = {kind: {c.name: c for c in cs} for kind, cs in KINDS.items()}
    counts: dict[str, int] = {}
    for kind, row in rows:
        for name, value in row.items():
            column = columns[kind].get(name)
            if column is None:
                unknown = {name}
            elif column.fields and value is not None:
                fields = {field for field, _ in column.fields}
                items = value if isinstance(value, list) else [value]
                unknown = {f"{name}.{key}" for item in items for key in item if key not in fields}
            else:
                continue
            for path in unknown:
                key = f"{kind}.{path[:120]}"
                counts[key] = counts.get(key, 0) + 1
    return counts


def _row_maps(body: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        events = msgspec.json.decode(body)["events"]
    except RecursionError as error:
        raise _too_deep() from error
    except msgspec.DecodeError as error:  # texts in columns that are ignored are looked at here for the first time
        raise document_error(body, error) from error
    for kind, rows in events.items():
        for row in rows or ():
            yield kind, row


def _line_maps(lines: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = msgspec.json.Decoder(dict[str, Any]).decode_lines(lines)
    except RecursionError as error:
        raise _too_deep() from error
    except msgspec.DecodeError as error:
        raise line_error(lines, error) from error
    for row in rows:
        yield row.pop("kind"), row


def _too_deep() -> InvalidRows:
    return invalid_rows("the body is nested too deeply", expected="rows of plain columns")
