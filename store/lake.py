"""The lake, as far as the spike goes: the `Store` verbs over DuckLake, its catalog on PostgreSQL, its data in Parquet.

`ducklake:postgres:host=... dbname=...?data_path=/shared/folder` is one lake for many collectors: each attaches it to a
DuckDB of its own and commits through `lake_commit.py`. What the spike does not do raises a StoreError that names it.

Invariant: the same tables and the same SQL as the DuckDB store; a batch is applied once, whoever sends it to whom.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final

import duckdb
import psycopg
import pyarrow as pa

from engine_probe.errors import StoreBusy, StoreError, StoreMisuse
from engine_probe.events import KINDS
from store.border import border
from store.conform import check_batch, contract_types
from store.interface import Batch, Problem, Receipt, SourceInfo, StoreStats, Window
from store.lake_commit import Committed, LakeCommitter, alone, install
from store.statements import create_statement, instant_column, render, select_rows
from store.tables import TABLES

ALIAS: Final = "lake"
PATIENCE: Final = r"connect_timeout=10 options=-c\ lock_timeout=10s\ -c\ statement_timeout=120s"
"""A catalog that hangs must not hang its collectors: a commit that waits so long for a lock is undone and tried again."""
_URL = re.compile(r"ducklake:postgres:(?P<dsn>[^?]*)(?:\?data_path=(?P<data_path>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LakeUrl:
    """`ducklake:postgres:DSN[?data_path=FOLDER]`. `data_path` makes a lake; an existing one knows its own."""

    dsn: str
    data_path: str | None

    @classmethod
    def parse(cls, url: str) -> LakeUrl:
        """Raises StoreMisuse where `url` is none."""
        found = _URL.fullmatch(url)
        if found is None or not found["dsn"].strip():
            raise StoreMisuse(
                f"{_hidden(url)} is no lake URL. Write ducklake:postgres:host=... dbname=...?data_path=/folder.",
                url=_hidden(url),
            )
        return cls(found["dsn"], found["data_path"])

    def __str__(self) -> str:
        return _hidden(f"ducklake:postgres:{self.dsn}")


class LakeStore:
    """A lake seen by one collector. One commit at a time a process; reads have cursors of their own."""

    def __init__(self, url: str, *, clock: Callable[[], int] = time.time_ns, inline_rows: int = 0) -> None:
        """Attach the lake, make its tables and the trigger where they are absent.

        inline_rows   commits of at most so many rows a table go into the catalog instead of a Parquet file
        """
        self.location = LakeUrl.parse(url)
        self.url = str(self.location)
        self._clock = clock
        self._writing = Lock()
        self._catalog = _connect_catalog(self.location)
        try:
            with border(self.url), alone(self._catalog):
                self._connection = _attach(self.location, inline_rows)
                self._make_tables()
                install(self._catalog)
        except BaseException:
            self._catalog.close()
            raise
        self._committer = LakeCommitter(self._connection, self._catalog, self._insert, ALIAS)

    def append(self, batch: Batch, timeout_s: float = 30.0) -> Receipt:
        """Commit one batch as one snapshot; see `Store.append`."""
        return self.append_all([batch], timeout_s)[0]

    def append_all(self, batches: Sequence[Batch], timeout_s: float = 30.0) -> list[Receipt]:
        """Commit several batches in one snapshot, as a collector should: every commit competes for one snapshot id."""
        received = [self._clock() if b.received_ns is None else b.received_ns for b in batches]
        done = self.commit(batches, timeout_s)
        receipts = []
        for position, (batch, received_ns) in enumerate(zip(batches, received, strict=True)):
            duplicate = position in done.duplicates
            accepted = {kind: 0 if duplicate else table.num_rows for kind, table in batch.tables.items()}
            receipts.append(Receipt(accepted, duplicate, received_ns))
        return receipts

    def commit(self, batches: Sequence[Batch], timeout_s: float = 30.0) -> Committed:
        """As `append_all`, and say how many tries it took."""
        for batch in batches:
            check_batch(batch)
        if not self._writing.acquire(timeout=timeout_s):
            raise StoreBusy(f"Another commit to {self.url} is still running. Send the batch again.", retry_after_s=5)
        try:
            with border(self.url, writing=True):
                return self._committer.commit(batches, timeout_s)
        finally:
            self._writing.release()

    def rows(
        self,
        kind: str,
        window: Window,
        columns: Sequence[str] | None = None,
        *,
        where: str | None = None,
        params: Sequence[Any] = (),
        order_by: str | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Rows of one kind in a window. See `Store.rows`."""
        statement = select_rows(kind, window, columns, where=where, params=params, order_by=order_by, limit=limit)
        return contract_types(kind, self.query(*render(statement)))

    def query(self, sql: str, params: Sequence[Any] = ()) -> pa.Table:
        """Our own SQL over the kinds' tables. See `Store.query`. The views are not in the lake yet."""
        with self._reading() as cursor:
            return cursor.execute(sql, list(params)).to_arrow_table()

    def sharing(self) -> AbstractContextManager[None]:
        """Nothing changes: reading files of the lake takes all cores."""
        return nullcontext()

    def runs(self) -> Sequence[str]:
        """Names of the imported runs, in alphabetical order."""
        union = " UNION ".join(f'SELECT DISTINCT run_id FROM "{kind}" WHERE run_id IS NOT NULL' for kind in KINDS)
        return [str(name) for name in self.query(f"{union} ORDER BY 1").column(0).to_pylist()]

    def sources(self) -> Sequence[SourceInfo]:
        """Not in the spike: the catalog keeps identities, not clocks."""
        raise self._absent("the list of senders with their clocks (sources)")

    def stats(self) -> StoreStats:
        """Size and content."""
        parts = [
            f"SELECT '{kind}' AS kind, count(*) AS n, min({instant_column(kind)}) AS oldest, "
            f'max({instant_column(kind)}) AS newest FROM "{kind}"'
            for kind in KINDS
        ]
        found = self.query(" UNION ALL ".join(parts)).to_pylist()
        oldest = [row["oldest"] for row in found if row["oldest"] is not None]
        newest = [row["newest"] for row in found if row["newest"] is not None]
        size = self.query(f"SELECT coalesce(sum(file_size_bytes), 0)::BIGINT AS n FROM ducklake_table_info('{ALIAS}')")
        return StoreStats(
            url=self.url,
            bytes=int(size.column(0)[0].as_py()),
            rows={row["kind"]: row["n"] for row in found},
            oldest_ns=min(oldest, default=None),
            newest_ns=max(newest, default=None),
        )

    def verify(self) -> Sequence[Problem]:
        """Not in the spike."""
        raise self._absent("the check of the whole lake (verify)")

    def close(self) -> None:
        """Let go of the lake. A second call does nothing."""
        self._connection.close()
        self._catalog.close()

    def __enter__(self) -> LakeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _absent(self, what: str) -> StoreError:
        return StoreMisuse(
            f"The lake does not have {what} yet. Use a DuckDB store (--store PATH) for it.", url=self.url, absent=what
        )

    @contextmanager
    def _reading(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with border(self.url):
            cursor = self._connection.cursor()
            try:
                cursor.execute(f"USE {ALIAS}")
                yield cursor
            finally:
                cursor.close()

    def _make_tables(self) -> None:
        found = self._connection.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = ?", [ALIAS])
        have = {name for (name,) in found.fetchall()}
        if missing := [create_statement(TABLES[kind]) for kind in KINDS if kind not in have]:
            self._connection.execute("BEGIN;" + "".join(missing) + "COMMIT")

    def _insert(self, batches: Sequence[Batch]) -> None:
        """Insert the rows of the batches, one statement a kind. Runs inside the committer's transaction."""
        tables: dict[str, list[pa.Table]] = {}
        for batch in batches:
            received_ns = self._clock() if batch.received_ns is None else batch.received_ns
            source = batch.identity.source if batch.identity else batch.source
            for kind, table in batch.tables.items():
                if table.num_rows:
                    tables.setdefault(kind, []).append(_with_store_columns(table, source, received_ns))
        for kind, parts in tables.items():
            self._connection.register("lake_rows", pa.concat_tables(parts))
            try:
                self._connection.execute(f'INSERT INTO "{kind}" BY NAME SELECT * FROM lake_rows')
            finally:
                self._connection.unregister("lake_rows")


def extension_path(name: str) -> Path:
    """The DuckDB extension `name` from its wheel (`duckdb-extension-...`); StoreMisuse where it is not installed."""
    try:
        module = importlib.import_module(f"duckdb_extension_{name}")
    except ImportError:
        raise StoreMisuse(
            f"The lake needs DuckDB's extension {name}, which is not installed. pip install '.[lake]' in "
            "kvscope's folder.",
            extension=name,
        ) from None
    folder = Path(str(module.__file__)).parent / "extensions" / f"v{duckdb.__version__}"
    path = folder / f"{name}.duckdb_extension"
    if not path.exists():
        raise StoreMisuse(
            f"The installed extension {name} is not made for DuckDB {duckdb.__version__}. Reinstall: "
            "pip install '.[lake]' in kvscope's folder.",
            extension=name,
        )
    return path


def _connect_catalog(location: LakeUrl) -> psycopg.Connection[Any]:
    try:
        return psycopg.connect(location.dsn, autocommit=True, connect_timeout=10)
    except psycopg.Error as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise StoreError(
            f"The catalog of {location} cannot be reached: {reason}. Check that PostgreSQL runs, and host, port, "
            "dbname and user in the URL.",
            url=str(location),
        ) from error


def _attach(location: LakeUrl, inline_rows: int) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
        },
    )
    for name in ("postgres_scanner", "ducklake"):
        connection.execute(f"LOAD {_text(str(extension_path(name)))}")
    # Another collector's commit takes milliseconds, not DuckLake's default wait of 100. Few retries, as a refusal that
    # quotes data with one of DuckLake's words ("unique" in a source's name) is retried in vain; then it is our turn.
    connection.execute("SET ducklake_retry_wait_ms = 5")
    connection.execute("SET ducklake_max_retry_count = 6")
    options = [f"DATA_INLINING_ROW_LIMIT {int(inline_rows)}"]
    if location.data_path is not None:
        Path(location.data_path).mkdir(parents=True, exist_ok=True)
        options.append(f"DATA_PATH {_text(location.data_path)}")
    dsn = f"{location.dsn} {PATIENCE}" if "options=" not in location.dsn else location.dsn
    connection.execute(f"ATTACH {_text('ducklake:postgres:' + dsn)} AS {ALIAS} ({', '.join(options)})")
    connection.execute(f"USE {ALIAS}")
    return connection


def _with_store_columns(table: pa.Table, source: str, received_ns: int) -> pa.Table:
    sources = pa.repeat(pa.scalar(source, pa.string()), table.num_rows)
    instants = pa.repeat(pa.scalar(received_ns, pa.int64()), table.num_rows)
    return table.append_column("source", sources).append_column("received_ns", instants)


def _hidden(url: str) -> str:
    """The URL without a password."""
    return re.sub(r"(password=)('(?:[^'\\]|\\.)*'|\S+)|(?<=:)[^:@/\s]+(?=@)", lambda m: (m[1] or "") + "***", url)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
