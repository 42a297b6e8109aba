"""`kvscope sql`: one SELECT over everything that was recorded, from a store or from the collector that holds it.

Both ways the statement runs in the same jailed child process (`store/sandbox/sandbox.py`) and comes back as the same Arrow table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, emit_bytes, printable, say
from collector.terminal.width import cut, padded, width_of
from engine_probe.errors import CollectorUnreachable, StoreBusy, UsageError

if TYPE_CHECKING:
    from store.sandbox.sandbox import SqlResult

FORMATS: Final = ("table", "json", "csv", "ndjson", "arrow", "parquet")
TABLE_ROWS: Final = 1000
"""Rows shown where nobody said how many."""
CELL_CHARACTERS: Final = 60
"""Longest cell of a table on a terminal; elsewhere cells are whole."""


def register(app: typer.Typer) -> None:
    """Add the verb `sql`."""
    app.command("sql")(sql)


def sql(
    statement: Annotated[
        str | None,
        typer.Argument(metavar="[SQL]", help="SELECT, FROM, DESCRIBE, SHOW TABLES or EXPLAIN; - reads stdin."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the statement from this file.")] = None,
    saved: Annotated[
        str | None, typer.Option(help="Run a saved query of the cookbook (docs/sql-cookbook.md).", metavar="NAME")
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help=f"{', '.join(FORMATS)}.", show_default="table, or the suffix of -o")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    max_rows: Annotated[
        int | None, typer.Option(min=0, help="Most rows.", show_default=f"{TABLE_ROWS} as table, else 1 million")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds the statement may run (without a collector).")
    ] = 30.0,
    store: StoreOption = DEFAULT_STORE,
    url: Annotated[
        str | None, typer.Option(envvar="KVSCOPE_URL", help="Ask the collector at this address instead of the store.")
    ] = None,
    token: Annotated[str | None, typer.Option(envvar="KVSCOPE_TOKEN", help="Token of the collector.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask in SQL: `kvscope sql "SELECT worker, count(*) FROM request GROUP BY worker"`; SHOW TABLES lists the tables."""
    text = _statement(statement, file, saved)
    chosen = _format(format_, output, as_json)
    rows = max_rows if max_rows is not None else TABLE_ROWS if chosen == "table" else None
    result = _ask(text, store, url, token, rows, timeout_s)
    _write(result, chosen, output)
    if result.truncated:
        say(f"only the first {result.table.num_rows:,} rows are shown; more with --max-rows")


def _statement(statement: str | None, file: Path | None, saved: str | None) -> str:
    if sum(given is not None for given in (statement, file, saved)) != 1:
        raise UsageError(
            'Give one statement: kvscope sql "SELECT ...", kvscope sql --file FILE (- is stdin), or --saved NAME.'
        )
    if saved is not None:
        from collector.cookbook import named

        return named(saved).sql
    if statement is not None and statement != "-":
        return statement
    try:
        if file is None or file == Path("-"):
            return sys.stdin.read()
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The statement cannot be read from {file or 'stdin'}: {error}.") from error


def _format(given: str | None, output: Path | None, as_json: bool) -> str:
    """The format asked for, else the one that the file's suffix names, else a table."""
    suffix = output.suffix.lower().lstrip(".") if output else ""
    chosen = given or ("json" if as_json else suffix if suffix in FORMATS else "table")
    if chosen not in FORMATS:
        raise UsageError(f"There is no format {chosen!r}. The formats are {', '.join(FORMATS)}.")
    if as_json and chosen != "json":
        raise UsageError(f"--json and --format {chosen} contradict each other. Give one of them.")
    if chosen in ("arrow", "parquet") and output is None and sys.stdout.isatty():
        raise UsageError(f"{chosen} is binary. Write it to a file with -o result.{chosen}, or pipe it on.")
    return chosen


def _ask(
    text: str, store: str, url: str | None, token: str | None, max_rows: int | None, timeout_s: float
) -> SqlResult:
    """From the collector at `url`, else from the store, else from the collector that holds the store."""
    if url is not None:
        return _from_collector(text, url, token, max_rows)
    try:
        return _from_store(text, store, max_rows, timeout_s)
    except StoreBusy as busy:
        from collector.terminal.client import holder_of

        holder = holder_of(store)
        if holder is None:
            raise busy
        say(f"asking the collector at {holder}, which holds {store}")
        return _from_collector(text, holder, token, max_rows)


def _from_store(text: str, url: str, max_rows: int | None, timeout_s: float) -> SqlResult:
    from store.open import open_store
    from store.sandbox.sandbox import SqlLimits, SqlRunner

    with SqlRunner(SqlLimits(timeout_s=timeout_s), max_children=1, prewarm=False) as runner:
        runner.warm()  # the child comes up while the store opens
        with open_store(url, read_only=True) as opened:
            return runner.run(text, data=opened.sql_data(direct=True), max_rows=max_rows)


def _from_collector(text: str, url: str, token: str | None, max_rows: int | None) -> SqlResult:
    from collector.api.sql import ARROW
    from collector.terminal.client import CollectorClient
    from store.sandbox.sandbox import SqlResult

    body = CollectorClient(url, token).post("/api/v1/sql", {"sql": text, "max_rows": max_rows}, ARROW)
    try:
        return SqlResult.from_ipc(body)
    except ValueError as error:
        raise CollectorUnreachable(f"The answer of the collector at {url} is damaged: {error}.", url=url) from error


def _write(result: SqlResult, chosen: str, output: Path | None) -> None:
    """Write the rows; a file appears whole or not at all."""
    body = _WRITERS[chosen](result)
    if output is None:
        emit_bytes(body)
        return
    partial = output.with_name(output.name + ".part")
    try:
        partial.write_bytes(body)
        partial.replace(output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(
            f"{output} cannot be written: {error.strerror or error}. Give another path with -o."
        ) from error
    rows = result.table.num_rows
    say(f"{rows:,} {'row' if rows == 1 else 'rows'} written to {output}")


def _json(result: SqlResult) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(result.to_dict()), indent=2) + b"\n"


def _ndjson(result: SqlResult) -> bytes:
    import msgspec

    from store.sql_json import json_objects

    return b"".join(msgspec.json.encode(row) + b"\n" for row in json_objects(result.table))


def _csv(result: SqlResult) -> bytes:
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column["name"] for column in result.columns])
    writer.writerows([_plain(value) for value in row] for row in result.to_dict()["rows"])
    return text.getvalue().encode()


def _arrow(result: SqlResult) -> bytes:
    return result.to_ipc()


def _parquet(result: SqlResult) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    try:
        pq.write_table(result.table, sink, compression="zstd")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(
            f"Parquet cannot hold this result: {error}. Cast the column (::VARCHAR), or choose --format arrow."
        ) from error
    return bytes(sink.getvalue())


def _table(result: SqlResult) -> bytes:
    names = [column["name"] for column in result.columns]
    rows = result.to_dict()["rows"]
    if names == ["explain_key", "explain_value"]:
        return "".join(f"{value}\n" for _, value in rows).encode()
    most = CELL_CHARACTERS if sys.stdout.isatty() else None
    lines = [[_cell(name, most) for name in names]]
    lines += [["-" if value is None else _cell(_plain(value), most) for value in row] for row in rows]
    widths = [max(width_of(line[i]) for line in lines) for i in range(len(names))]
    is_number = [column["type"].partition("(")[0] in _NUMBERS for column in result.columns]
    lines.insert(1, ["-" * width for width in widths])
    text = ""
    for line in lines:
        cells = [padded(cell, width, right=right) for cell, width, right in zip(line, widths, is_number, strict=True)]
        text += "  ".join(cells).rstrip() + "\n"
    return text.encode()


def _cell(text: str, most: int | None) -> str:
    safe = printable(text)
    return safe if most is None else cut(safe, most)


_NUMBERS: Final = frozenset(
    [
        "TINYINT",
        "SMALLINT",
        "INTEGER",
        "BIGINT",
        "HUGEINT",
        "UTINYINT",
        "USMALLINT",
        "UINTEGER",
        "UBIGINT",
        "UHUGEINT",
        "FLOAT",
        "DOUBLE",
        "DECIMAL",
    ]
)
_WRITERS: Final[dict[str, Callable[[SqlResult], bytes]]] = {
    "table": _table,
    "json": _json,
    "csv": _csv,
    "ndjson": _ndjson,
    "arrow": _arrow,
    "parquet": _parquet,
}


def _plain(value: Any) -> str:
    """A value as text: nested ones as JSON, nothing for null."""
    import msgspec

    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
