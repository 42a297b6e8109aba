"""The embedded store: one DuckDB file owned by this process. Implements `store.interface.Store`.

Invariant: one thread writes (`writer.py`), few readers read (`database.py`), nothing else touches the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from engine_probe.errors import BatchRejected, StoreBusy, StoreError
from engine_probe.events import KINDS
from engine_probe.schema import arrow_schema
from store.books import Books
from store.border import border
from store.database import Database
from store.interface import Batch, Problem, Receipt, SourceInfo, StoreStats, Window
from store.migrate import load, migrate, pending
from store.queue import Append, WriteQueue
from store.statements import instant_column, render, select_rows
from store.tables import TABLES
from store.views import install_views
from store.writer import Writer

T = TypeVar("T")


class DuckDBStore:
    """One DuckDB file (or memory), for one process."""

    def __init__(
        self,
        path: str,
        *,
        read_only: bool = False,
        num_readers: int = 2,
        memory_limit_bytes: int | None = None,
        max_queued_batches: int = 1024,
        max_queued_bytes: int = 256 << 20,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._database = Database(
            path, read_only=read_only, num_readers=num_readers, memory_limit_bytes=memory_limit_bytes
        )
        self._clock = clock
        self.url = path
        try:
            with border(path):
                self._prepare(read_only)
                cursor = self._database.cursor()
                books = Books.load(cursor)
                cursor.close()
        except BaseException:
            self._database.close()
            raise
        self._queue = WriteQueue(path, max_queued_batches, max_queued_bytes)
        self._read_only_books = books
        self._writer = None if read_only else Writer(self._database, books, self._queue, clock)

    def append(self, batch: Batch, timeout_s: float = 30.0) -> Receipt:
        """Commit a batch; back when it is on disk. Raises StoreBusy, DiskFull, BatchRejected. See `Store.append`."""
        self._writing()
        check_tables(batch)
        received_ns = self._clock() if batch.received_ns is None else batch.received_ns
        num_rows = sum(table.num_rows for table in batch.tables.values())
        num_bytes = sum(table.nbytes for table in batch.tables.values())
        item = Append(batch, received_ns, num_rows, num_bytes)
        self._queue.put(item)
        try:
            return item.answer.result(timeout_s)
        except (FutureTimeout, CancelledError) as error:
            if item.answer.done() and not item.answer.cancelled():
                return item.answer.result()
            withdrawn = self._queue.withdraw(item)
            fate = "it was withdrawn" if withdrawn else "it may still be applied"
            raise StoreBusy(
                f"The store {self.url} did not commit the batch in {timeout_s:g} s; {fate}. "
                "Send it again under the same identity.",
                url=self.url,
                retry_after_s=5,
            ) from error

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
        """Rows of one kind in a window, with the contract's Arrow types. See `Store.rows`."""
        statement = select_rows(kind, window, columns, where=where, params=params, order_by=order_by, limit=limit)
        return contract_types(kind, self.query(*render(statement)))

    def query(self, sql: str, params: Sequence[Any] = ()) -> pa.Table:
        """Our own SQL over tables and views. See `Store.query`."""
        with self._database.reading() as cursor:
            return cursor.execute(sql, list(params)).to_arrow_table()

    def runs(self) -> Sequence[str]:
        """Names of the imported runs, in alphabetical order."""
        union = " UNION ".join(f'SELECT DISTINCT run_id FROM "{kind}" WHERE run_id IS NOT NULL' for kind in KINDS)
        return [str(name) for name in self.query(f"{union} ORDER BY 1").column(0).to_pylist()]

    def sources(self) -> Sequence[SourceInfo]:
        """Every sender seen, most recently heard first."""
        return self.books.infos()

    def stats(self) -> StoreStats:
        """Size and content. Row counts include rows that wait for nothing: they are committed."""
        parts = [
            f"SELECT '{kind}' AS kind, count(*) AS n, min({instant_column(kind)}) AS oldest, "
            f'max({instant_column(kind)}) AS newest FROM "{kind}"'
            for kind in KINDS
        ]
        found = self.query(" UNION ALL ".join(parts)).to_pylist()
        oldest = [row["oldest"] for row in found if row["oldest"] is not None]
        newest = [row["newest"] for row in found if row["newest"] is not None]
        depth, queued = self._queue.depth
        return StoreStats(
            url=self.url,
            bytes=self._database.file_bytes(),
            rows={row["kind"]: row["n"] for row in found},
            oldest_ns=min(oldest, default=None),
            newest_ns=max(newest, default=None),
            facts={"queued_batches": depth, "queued_bytes": queued, "read_only": self._writer is None},
        )

    def verify(self) -> Sequence[Problem]:
        """Check the store; an empty list means sound."""
        from store.verify import verify

        return verify(self)

    def close(self) -> None:
        """Commit what is queued and let go of the file. A second call does nothing."""
        if self._writer is not None:
            self._writer.close()
        self._queue.close()
        self._database.close()

    def __enter__(self) -> DuckDBStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def books(self) -> Books:
        """Senders, applied batches and row counts as of the last commit."""
        return self._read_only_books if self._writer is None else self._writer.books

    def call(self, work: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        """Run `work` on the writing cursor between two commits (retention, sealing)."""
        with border(self.url):
            return self._writing().call(work)

    def _writing(self) -> Writer:
        if self._writer is None:
            raise StoreError(f"The store {self.url} was opened for reading only. Open it for writing.", url=self.url)
        return self._writer

    def _prepare(self, read_only: bool) -> None:
        """Bring the schema and the views to this release, or say why that cannot be."""
        cursor = self._database.cursor()
        try:
            if not read_only:
                migrate(cursor, self.url)
                install_views(cursor)
            elif todo := pending(cursor, self.url, load()):
                raise StoreError(
                    f"{self.url} has an older schema ({len(todo)} migrations behind) and was opened for reading only. "
                    f"Run `kvscope store migrate --store {self.url}` first.",
                    url=self.url,
                )
        finally:
            cursor.close()


def contract_types(kind: str, table: pa.Table) -> pa.Table:
    """The table with the contract's Arrow types where a column is the contract's (DuckDB names list items its way)."""
    schema = arrow_schema(kind)
    for position, field in enumerate(table.schema):
        wanted = schema.get_field_index(field.name)
        if wanted >= 0 and field.type != schema.field(wanted).type:
            table = table.set_column(
                position, schema.field(wanted), table.column(position).cast(schema.field(wanted).type)
            )
    return table


def check_tables(batch: Batch) -> None:
    """BatchRejected where a table is of no known kind or does not have exactly the contract's columns."""
    for kind, table in batch.tables.items():
        if kind not in TABLES:
            raise BatchRejected(f"There is no kind {kind!r}. The kinds are {', '.join(TABLES)}.", kind=kind)
        wanted = arrow_schema(kind)
        if not table.schema.equals(wanted, check_metadata=False):
            raise BatchRejected(
                f"The {kind} table does not have the contract's columns: {_difference(table.schema, wanted)}. "
                "Bring it there with engine_probe.schema.conform.",
                kind=kind,
            )


def _difference(found: pa.Schema, wanted: pa.Schema) -> str:
    """First difference of two schemas, in words."""
    for field in wanted:
        position = found.get_field_index(field.name)
        if position < 0:
            return f"{field.name} is absent"
        if found.field(position).type != field.type:
            return f"{field.name} is {found.field(position).type} and must be {field.type}"
    extra = [name for name in found.names if name not in wanted.names]
    return f"{extra[0]} is not in the contract" if extra else "their order differs"


def summary(receipts: Mapping[str, int]) -> str:
    """`3 request, 5 step rows` for people."""
    return ", ".join(f"{count} {kind}" for kind, count in receipts.items() if count) + " rows"
