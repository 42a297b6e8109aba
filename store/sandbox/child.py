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
import os
import re
import select
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.sandbox import wire
from store.sandbox.answer import encode_arrow, encode_json, stream
from store.sandbox.relations import ATTACHED, create_views, literal, plan_of, receive_hot
from store.sandbox.told import End, Failure, Needs, say

if TYPE_CHECKING:
    import duckdb

    from store.sandbox.jail import Jail


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
    plan = plan_of(connection, {name.lower(): text for name, text, _ in job["views"]}, checked, job["max_rows"])
    wire.send(sock, wire.NEEDS, say(Needs(plan.hot, list(walls))))
    started = time.monotonic()
    hot, mapped = receive_hot(sock)
    create_views(connection, job, plan.names, hot)
    jail.limit_memory(job["memory_bytes"])
    statements = connection.extract_statements(checked.sql)
    expected = duckdb.StatementType.EXPLAIN if checked.explain else duckdb.StatementType.SELECT
    if [statement.type for statement in statements] != [expected]:
        raise Refused("The text is not one SELECT or EXPLAIN.")
    connection.execute(statements[0])
    encode = encode_json if job["form"] == "json" else encode_arrow
    truncated = stream(sock, connection, encode, job["max_rows"], job["max_result_bytes"])
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
        connection.execute(f"ATTACH {literal(job['database'])} AS {ATTACHED} (READ_ONLY)")
    if job["parquet_dir"]:
        connection.execute(f"SET allowed_directories = [{literal(job['parquet_dir'])}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


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


if __name__ == "__main__":
    main(int(sys.argv[1]))
