"""The answer to a statement, in the child: its columns, then its rows batch by batch, as many as were asked for."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from store.sandbox import wire
from store.sandbox.told import Column, say
from store.sql_json import json_rows

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

BATCH_ROWS = 2048  # DuckDB's own vector: rows may be wide
_NO_ARROW = re.compile(r"\b(?:VARIANT|BIGNUM|BIT|TIME WITH TIME ZONE|GEOMETRY)\b")


def stream(
    sock: socket.socket,
    connection: duckdb.DuckDBPyConnection,
    encode: Callable[[pa.RecordBatch], memoryview],
    max_rows: int,
    max_bytes: int,
) -> bool:
    """Send the columns, a batch without rows, and then batches as `encode` makes them; true where rows were left out."""
    import pyarrow as pa

    from store.sandbox.check import Refused

    columns = [Column(str(column[0]), str(column[1])) for column in connection.description or []]
    for column in columns:
        bare = re.sub(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"", "", column.type)
        if found := _NO_ARROW.search(bare):
            raise Refused(
                f'The column {column.name} has the type {found[0]}, which has no Arrow form. Cast it: "{column.name}"::VARCHAR'
            )
    reader = connection.to_arrow_reader(BATCH_ROWS)
    wire.send(sock, wire.COLUMNS, say(columns))
    rows_left, bytes_left = max_rows, max_bytes
    wire.send(sock, wire.BATCH, encode(pa.RecordBatch.from_pylist([], schema=reader.schema)))
    for batch in reader:
        fitting = batch.slice(0, rows_left)
        while fitting.nbytes > bytes_left and fitting.num_rows:
            fitting = fitting.slice(0, fitting.num_rows // 2)
        body = encode(fitting)
        while len(body) > bytes_left and fitting.num_rows:
            fitting = fitting.slice(0, fitting.num_rows // 2)
            body = encode(fitting)
        if fitting.num_rows:
            wire.send(sock, wire.BATCH, body)
        if fitting.num_rows < batch.num_rows:
            return True
        rows_left -= fitting.num_rows
        bytes_left -= len(body)
    return False


def encode_arrow(batch: pa.RecordBatch) -> memoryview:
    """A complete Arrow IPC stream of one batch."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def encode_json(batch: pa.RecordBatch) -> memoryview:
    """The rows as JSON arrays, with commas between them and no bracket around them."""
    import msgspec
    import pyarrow as pa

    return memoryview(msgspec.json.encode(json_rows(pa.Table.from_batches([batch]))))[1:-1]
