"""What a statement reads, in the child: the kinds and views behind its text, their hot rows, and the views that hold them.

A kind is hot rows, a database's rows and sealed Parquet under one name; nothing is there that the statement does not name.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from store.sandbox import wire
from store.sandbox.narrow import narrow
from store.sandbox.wanted import Wanted, column_types

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

    from store.sandbox.check import Checked

ATTACHED = "store"
"""Name under which a database file is attached in direct mode."""

STORE_COLUMNS = ("source", "received_ns")
"""Columns that the store adds to each kind. Typed again here: `store.tables` would pull SQLAlchemy into the child."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What must be there for a statement.

    hot     kind -> the hot rows of it that are read
    names   kinds and views to create
    """

    hot: dict[str, Wanted]
    names: frozenset[str]


def plan_of(connection: duckdb.DuckDBPyConnection, views: Mapping[str, str], checked: Checked, max_rows: int) -> Plan:
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


def receive_hot(sock: socket.socket) -> tuple[dict[str, pa.Table], mmap.mmap | None]:
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


def create_views(
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
            listed = ", ".join(literal(os.path.relpath(path, job["parquet_dir"])) for path in files)
            parts.append(f"SELECT * FROM read_parquet([{listed}], union_by_name = true, hive_partitioning = false)")
        connection.execute(f'CREATE VIEW "{kind}" AS ' + " UNION ALL BY NAME ".join(parts))
        connection.execute(f'COMMENT ON VIEW "{kind}" IS {literal(KIND_DOC[kind])}')
    for name, select_text, doc in job["views"]:
        if name.lower() in names:
            connection.execute(f'CREATE VIEW "{name}" AS {select_text}')
            connection.execute(f'COMMENT ON VIEW "{name}" IS {literal(doc)}')


def _empty(schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    return pa.schema([*schema, ("source", pa.string()), ("received_ns", pa.int64())]).empty_table()


def literal(value: str) -> str:
    """As a text of SQL."""
    return "'" + str(value).replace("'", "''") + "'"
