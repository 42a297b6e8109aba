"""The child that runs one statement of a person and ends: a DuckDB of its own, in a jail, answering over one socket.

Order, and why: imports and an empty DuckDB of one thread (both read system files) -> wait for the job -> jail, while
there is one thread -> DuckDB gets its threads, loses everything else, and its configuration is locked -> the text is
parsed and checked -> the kinds it names are asked for and mapped -> views -> memory limit -> the statement. The
collector never parses nor runs a person's text.

Invariant: nothing of the parent's environment, and no file but what the job names, is ever visible here.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import select
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.sandbox import wire
from store.sandbox.narrow import narrow
from store.sandbox.told import Column, End, Failure, Needs, say
from store.sandbox.wanted import Wanted, column_types
from store.sql_json import json_rows

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from store.sandbox.check import Checked
    from store.sandbox.jail import Jail

ATTACHED = "store"
"""Name under which a database file is attached in direct mode."""

STORE_COLUMNS = ("source", "received_ns")
"""Columns that the store adds to each kind. Typed again here: `store.tables` would pull SQLAlchemy into the child."""

BATCH_ROWS = 2048  # DuckDB's own vector: rows may be wide


def main(descriptor: int) -> None:
    """Serve one job over the socket `descriptor`, then return; the process has no second use."""
    import pyarrow as pa
    import pyarrow.dataset  # DuckDB imports it when Arrow tables are registered, which the jail forbids

    from engine_probe.events import KINDS
    from engine_probe.schema import arrow_schema
    from store.sandbox.check import Refused
    from store.sandbox.jail import Jail

    warnings.simplefilter("ignore")
    arrow_schema("request")
    pa.set_cpu_count(1)
    connection = _connect()
    sock = socket.socket(fileno=descriptor)
    jail = Jail()
    try:
        wire.send(sock, wire.READY)
        _, body, _ = wire.receive(sock, limit=16 << 20)
    except wire.Gone:
        return  # a spare child whose parent needs it no more
    job = json.loads(bytes(body))
    try:
        _serve(sock, job, jail, connection)
    except Refused as error:
        _fail(sock, "refused", str(error))
    except wire.Gone:
        pass
    except MemoryError:
        _fail(sock, "memory", "out of memory")
    except Exception as error:
        what, message = _verdict(error)
        if re.match(r"Catalog Error: Table with name", message):
            message += "\nThe tables and views are " + ", ".join([*KINDS, *(name for name, *_ in job["views"])])
        _fail(sock, what, message)


def _serve(sock: socket.socket, job: dict[str, Any], jail: Jail, connection: duckdb.DuckDBPyConnection) -> None:
    import duckdb

    from store.sandbox.check import Refused, check

    if job["parquet_dir"]:
        os.chdir(
            job["parquet_dir"]
        )  # files are named from here, so that no view and no plan tells where the store lies
    walls = jail.enter([Path(p) for p in job["readable"]], job["cpu_s"], job["wall_s"])
    threading.Thread(target=_end_with_parent, args=(sock,), daemon=True).start()
    _lock(connection, job)
    checked = check(connection, job["sql"])
    connection.execute(
        "BEGIN TRANSACTION"
    )  # so that now() is the same for the rows that are asked for and in the statement
    plan = _plan(connection, {name.lower(): text for name, text, _ in job["views"]}, checked, job["max_rows"])
    wire.send(sock, wire.NEEDS, say(Needs(plan.hot, list(walls))))
    started = time.monotonic()
    hot, mapped = _receive_hot(sock)
    _create_views(connection, job, plan.names, hot)
    jail.limit_memory(job["memory_bytes"])
    statements = connection.extract_statements(checked.sql)
    expected = duckdb.StatementType.EXPLAIN if checked.explain else duckdb.StatementType.SELECT
    if [statement.type for statement in statements] != [expected]:
        raise Refused("The text is not one SELECT or EXPLAIN.")
    connection.execute(statements[0])
    encode = _encode_json if job["form"] == "json" else _encode_arrow
    truncated = _stream(sock, connection, encode, job["max_rows"], job["max_result_bytes"])
    wire.send(sock, wire.END, say(End(truncated, time.monotonic() - started)))
    del mapped


def _connect() -> duckdb.DuckDBPyConnection:
    """An empty in-memory DuckDB that looks for nothing on its own. No thread but this one runs afterwards."""
    import duckdb

    duckdb.default_connection().close()  # made by the import, with worker threads of its own
    return duckdb.connect(
        ":memory:",
        config={
            "python_enable_replacements": "false",
            "python_scan_all_frames": "false",
            "autoload_known_extensions": "false",
            "autoinstall_known_extensions": "false",
            "allow_community_extensions": "false",
            "allow_persistent_secrets": "false",
            "temp_directory": "",
            "threads": "1",
        },
    )


def _lock(connection: duckdb.DuckDBPyConnection, job: dict[str, Any]) -> None:
    """Let DuckDB reach what the job names and nothing else, and lock its configuration."""
    connection.execute(f"SET memory_limit = '{int(job['memory_bytes'])}B'")
    connection.execute(f"SET threads = {int(job['threads'])}")
    connection.execute("SET TimeZone = 'UTC'")
    if job["database"]:
        connection.execute(f"ATTACH {_text(job['database'])} AS {ATTACHED} (READ_ONLY)")
    if job["parquet_dir"]:
        connection.execute(f"SET allowed_directories = [{_text(job['parquet_dir'])}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


@dataclass(frozen=True, slots=True)
class Plan:
    """What must be there for a statement.

    hot     kind -> the hot rows of it that are read
    names   kinds and views to create
    """

    hot: dict[str, Wanted]
    names: frozenset[str]


def _plan(connection: duckdb.DuckDBPyConnection, views: Mapping[str, str], checked: Checked, max_rows: int) -> Plan:
    """Follow the views that a statement reads down to the kinds."""
    from engine_probe.events import KINDS, column_names
    from store.sandbox.check import reads_of

    reads = checked.reads
    seen: set[str] = set()
    while todo := [name for name in reads.tables - seen if name in views]:
        for name in todo:
            reads |= reads_of(connection, views[name])
        seen.update(todo)
    known = {kind: (*column_names(kind), *STORE_COLUMNS) for kind in KINDS if kind in reads.tables}
    if reads.catalog:
        return Plan({kind: Wanted() for kind in known}, frozenset(KINDS) | frozenset(views))
    named = reads.columns
    narrowed = narrow(connection, checked.statement, {kind: column_types(kind) for kind in known}, max_rows)
    hot = {
        kind: replace(
            narrowed.get(kind, Wanted()),
            columns=None if named is None else [name for name in names if name in named] or ["at_ns"],
        )
        for kind, names in known.items()
    }
    return Plan(hot, frozenset(known) | seen)


def _receive_hot(sock: socket.socket) -> tuple[dict[str, pa.Table], mmap.mmap | None]:
    """Hot rows by kind, mapped from the descriptor that came with the frame (no copy)."""
    import pyarrow as pa

    _, body, fds = wire.receive(sock, limit=1 << 20, max_fds=1)
    layout: dict[str, tuple[int, int]] = json.loads(bytes(body))
    if not fds:
        return {}, None
    mapped = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
    os.close(fds[0])
    whole = pa.py_buffer(mapped)
    tables = {kind: pa.ipc.open_stream(whole.slice(at, size)).read_all() for kind, (at, size) in layout.items()}
    return tables, mapped


def _create_views(
    connection: duckdb.DuckDBPyConnection, job: dict[str, Any], names: Set[str], hot: Mapping[str, pa.Table]
) -> None:
    """One view a kind over hot rows, database and sealed Parquet, then the store's own views on top."""
    from engine_probe.events import KIND_DOC, KINDS
    from engine_probe.schema import arrow_schema

    for kind in (kind for kind in KINDS if kind in names):
        parts = []
        if kind in hot or not job["database"]:
            connection.register(f"hot_{kind}", hot[kind] if kind in hot else _empty(arrow_schema(kind)))
            parts.append(f'SELECT * FROM "hot_{kind}"')
        if job["database"]:
            through = job["sealed_through_ns"].get(kind)
            only_unsealed = f" WHERE received_ns > {int(through)}" if through is not None else ""
            parts.append(f'SELECT * FROM {ATTACHED}.main."{kind}"{only_unsealed}')
        if files := job["files"].get(kind):
            listed = ", ".join(_text(os.path.relpath(path, job["parquet_dir"])) for path in files)
            parts.append(f"SELECT * FROM read_parquet([{listed}], union_by_name = true, hive_partitioning = false)")
        connection.execute(f'CREATE VIEW "{kind}" AS ' + " UNION ALL BY NAME ".join(parts))
        connection.execute(f'COMMENT ON VIEW "{kind}" IS {_text(KIND_DOC[kind])}')
    for name, select_text, doc in job["views"]:
        if name.lower() in names:
            connection.execute(f'CREATE VIEW "{name}" AS {select_text}')
            connection.execute(f'COMMENT ON VIEW "{name}" IS {_text(doc)}')


def _empty(schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    return pa.schema([*schema, ("source", pa.string()), ("received_ns", pa.int64())]).empty_table()


_NO_ARROW = re.compile(r"\b(?:VARIANT|BIGNUM|BIT|TIME WITH TIME ZONE|GEOMETRY)\b")


def _stream(
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


def _encode_arrow(batch: pa.RecordBatch) -> memoryview:
    """A complete Arrow IPC stream of one batch."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _encode_json(batch: pa.RecordBatch) -> memoryview:
    """The rows as JSON arrays, with commas between them and no bracket around them."""
    import msgspec
    import pyarrow as pa

    return memoryview(msgspec.json.encode(json_rows(pa.Table.from_batches([batch]))))[1:-1]


def _verdict(error: Exception) -> tuple[str, str]:
    """(what happened, message) for an error of DuckDB or Arrow."""
    import duckdb

    from store.sandbox.check import message_of

    text = message_of(error)
    if isinstance(error, duckdb.OutOfMemoryException) or re.search(
        r"out of memory|bad_alloc|realloc|malloc", text, re.I
    ):
        return "memory", text.splitlines()[0] if text else "out of memory"
    if re.search(r"could not set lock|conflicting lock", text, re.I):
        return "locked", text
    if isinstance(error, duckdb.InternalException):
        return "failed", f"DuckDB failed inside: {text}"
    if isinstance(error, duckdb.Error | OSError):
        return "refused", text
    return "failed", f"{type(error).__name__}: {text}"


def _fail(sock: socket.socket, what: str, message: str) -> None:
    printable = message[:8000].encode("utf-8", errors="replace").decode()  # a name of a file may be no UTF-8
    with contextlib.suppress(wire.Gone):
        wire.send(sock, wire.ERROR, say(Failure(what, printable)))


def _end_with_parent(sock: socket.socket) -> None:
    """A query must not outlive the collector: the socket's other end closes when its process ends, however it ends."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))
    while True:
        for _, event in poll.poll():
            if event & (select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)):
                os._exit(3)


def _text(value: str) -> str:
    return "'" + str(value).replace("'", "''") + "'"


if __name__ == "__main__":
    main(int(sys.argv[1]))
