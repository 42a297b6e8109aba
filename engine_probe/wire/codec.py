"""Bodies of `POST /v1/events`: Arrow IPC streams one after another (the fast path), JSON and NDJSON (the easy path).

Invariant: what decodes conforms to `arrow_schema(kind)`, column for column, and holds every value that was sent in a
known column; whatever cannot be so is refused with `InvalidRows`, `UnknownFormat` or `TooLarge` that name the place.
Unknown columns are ignored and counted, so an old collector accepts a new probe. Values are judged by `validate.py`,
shapes here. Source: design section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_probe.errors import TooLarge, UnknownFormat
from engine_probe.events import CONTRACT_VERSION, KINDS
from engine_probe.wire.row_errors import expectation, invalid_rows, unknown_kind

if TYPE_CHECKING:
    import pyarrow as pa

ARROW_CONTENT_TYPE = "application/vnd.apache.arrow.stream"
JSON_CONTENT_TYPE = "application/json"
NDJSON_CONTENT_TYPE = "application/x-ndjson"
MAX_COLUMNS = 1024
"""Columns of one stream: far more than any contract has, few enough to look through."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of one body, by kind, and the identity where the body itself carries one (Arrow has it in headers).

    tables            kind -> table with exactly `arrow_schema(kind)`; a kind without rows may be absent
    ignored_columns   "kind.column" (or the name alone, outside rows) -> rows that carried it
    """

    tables: dict[str, pa.Table]
    source: str | None = None
    epoch: str | None = None
    seq: int | None = None
    sent_ns: int | None = None
    ignored_columns: dict[str, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of all kinds together."""
        return sum(table.num_rows for table in self.tables.values())


def encode_arrow(tables: Mapping[str, pa.Table], compression: str | None = "lz4") -> bytes:
    """Concatenated IPC streams, one a kind, with `kvscope.kind` and `kvscope.contract` in each schema.

    compression   lz4, zstd or None, of the buffers. Columns that are wholly null are left out: absent means null.
    Raises InvalidRows for an unknown kind or a table whose columns are not the contract's.
    """
    import pyarrow as pa

    from engine_probe.schema import arrow_schema

    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    for kind, table in tables.items():
        if kind not in KINDS:
            raise unknown_kind(kind)
        schema = arrow_schema(kind)
        if table.schema.names != schema.names or table.schema.types != schema.types:
            unknown: dict[str, int] = {}
            table = _conform(kind, table, unknown)
            if unknown:
                raise invalid_rows("is no column of this kind", kind=kind, column=next(iter(unknown)).split(".", 1)[1])
        kept = [c.name for c in KINDS[kind] if c.required or table.column(c.name).null_count < table.num_rows]
        stream = pa.schema([schema.field(name) for name in kept], metadata=schema.metadata)
        with pa.ipc.new_stream(out, stream, options=options) as writer:
            writer.write_table(table.select(kept))
    body: bytes = out.getvalue().to_pybytes()
    return body


def decode_arrow(body: bytes | bytearray, max_decoded_bytes: int | None = None) -> Decoded:
    """Tables of concatenated IPC streams; several streams of one kind are joined.

    max_decoded_bytes   refuse a body that would be larger once its buffers are decompressed, or once its rows have
                        every column of their kind (a row of one byte unfolds to hundreds), before doing so
    Raises UnknownFormat (no Arrow, or a newer contract), InvalidRows, TooLarge. Never trusts an offset or a length.
    """
    import pyarrow as pa

    from engine_probe.wire.ipc_frames import split_streams

    ignored: dict[str, int] = {}
    parts: dict[str, list[pa.Table]] = {}
    row_bytes = 0
    buffer = pa.py_buffer(body)
    for index, frame in enumerate(split_streams(body, max_decoded_bytes)):
        place = f"stream {index}, byte {frame.start}"
        try:
            with pa.ipc.open_stream(buffer.slice(frame.start, frame.end - frame.start)) as reader:
                kind = _kind_of(reader.schema, place)
                if len(reader.schema) > MAX_COLUMNS:
                    raise invalid_rows(
                        f"has {len(reader.schema)} columns", kind=kind, place=place, expected=f"at most {MAX_COLUMNS}"
                    )
                row_bytes += frame.num_rows * 8 * len(KINDS[kind])
                if max_decoded_bytes is not None and row_bytes > max_decoded_bytes:
                    raise TooLarge(
                        f"{place}: {frame.num_rows} rows of {kind} are larger than allowed; send fewer rows a batch",
                        limit_bytes=max_decoded_bytes,
                        place=place,
                    )
                table = _conform(kind, reader.read_all(), ignored, place)
        except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            raise invalid_rows(
                f"cannot be read as Arrow: {_first_line(error)}", place=place, expected="a sound Arrow IPC stream"
            ) from error
        parts.setdefault(kind, []).append(table)
    return Decoded({kind: pa.concat_tables(tables) for kind, tables in parts.items()}, ignored_columns=ignored)


def decode_json(body: bytes) -> Decoded:
    """Tables of `{"source", "epoch", "seq", "sent_ns", "events": {kind: [row, ...]}}`. Raises InvalidRows."""
    from engine_probe.wire.json_codec import decode_document

    return decode_document(body)


def decode_ndjson(body: bytes) -> Decoded:
    """Tables of a header line (optional) and a row a line, each with its `kind`. Raises InvalidRows."""
    from engine_probe.wire.json_codec import decode_lines

    return decode_lines(body)


def encode_ndjson(tables: Mapping[str, pa.Table], header: Mapping[str, object] | None = None) -> bytes:
    """A row a line with its `kind`, nulls left out; `header` (source, epoch, ...) becomes the first line."""
    from engine_probe.wire.json_codec import encode_lines

    return encode_lines(tables, header)


def _kind_of(schema: pa.Schema, place: str) -> str:
    metadata = schema.metadata or {}
    kind: str = metadata.get(b"kvscope.kind", b"").decode("utf-8", "replace")
    contract: str = metadata.get(b"kvscope.contract", b"").decode("utf-8", "replace")
    if not kind or not contract:
        missing = "kvscope.kind" if not kind else "kvscope.contract"
        raise invalid_rows(
            f"has no {missing} in its schema's metadata",
            place=place,
            expected=f"kvscope.kind (a kind of row) and kvscope.contract (up to {CONTRACT_VERSION})",
        )
    if kind not in KINDS:
        raise unknown_kind(kind, place)
    if not contract.isascii() or not contract.isdigit() or int(contract[:9]) < 1:
        raise invalid_rows(
            f"has kvscope.contract {contract[:40]!r}", kind=kind, place=place, expected="a version from 1"
        )
    if int(contract[:9]) > CONTRACT_VERSION:
        raise UnknownFormat(
            f"{place}: the sender speaks event contract {contract[:9]}, this kvscope knows up to {CONTRACT_VERSION}; "
            "upgrade the receiver, or let the sender speak an older contract",
            contract=contract[:9],
            known=CONTRACT_VERSION,
            place=place,
        )
    return kind


def _conform(kind: str, table: pa.Table, ignored: dict[str, int], place: str | None = None) -> pa.Table:
    """The contract's columns of `table`, cast without loss; the others counted into `ignored`."""
    import pyarrow as pa

    from engine_probe.schema import arrow_schema
    from engine_probe.wire.cast import cast_column

    names = table.schema.names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise invalid_rows("occurs twice in the schema", kind=kind, column=twice[:120], place=place)
    columns = {c.name: c for c in KINDS[kind]}
    for column in columns.values():
        if column.required and (column.name not in names or pa.types.is_null(table.schema.field(column.name).type)):
            raise invalid_rows("is missing", kind=kind, column=column.name, place=place, expected=expectation(column))
    known = table.select([name for name in names if name in columns])
    try:
        known.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise invalid_rows(
            f"is damaged: {_first_line(error)}", kind=kind, place=place, expected="a sound Arrow IPC stream"
        ) from error
    for name in names:
        if name not in columns:
            ignored[f"{kind}.{name[:120]}"] = ignored.get(f"{kind}.{name[:120]}", 0) + table.num_rows
    schema = arrow_schema(kind)
    present = set(names)
    arrays = [
        cast_column(kind, columns[f.name], known.column(f.name), f.type)
        if f.name in present
        else pa.nulls(table.num_rows, f.type)
        for f in schema
    ]
    return pa.table(arrays, schema=schema)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
