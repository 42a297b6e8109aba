"""The embedded store: one DuckDB file owned by this process. Implements `store.interface.Store`.

Invariant: one thread writes (`writer.py`), few readers read (`database.py`), nothing else touches the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, TypeVar

import duckdb
import pyarrow as pa

from engine_probe.errors import KvscopeError, OutOfMemory, StoreBusy, StoreError, StoreMisuse
from engine_probe.events import KINDS
from store.books import Books
from store.border import border
from store.conform import check_batch, contract_types
from store.database import Database
from store.deadline import Deadline
from store.interface import Batch, Problem, Receipt, SourceInfo, StoreStats, Window
from store.migrate import Migration, load, migrate, pending
from store.queue import Append, WriteQueue
from store.statements import can_be_literal, instant_column, render, render_literal, select_rows
from store.upkeep.seal import recover
from store.views import install_views
from store.writer import Writer

if TYPE_CHECKING:
    from store.sandbox.sandbox import SqlData

T = TypeVar("T")

_REVIVAL_S = 0.2
_STREAM_ROWS: Final = 64 * 1024
"""Rows of a batch of a stream: a few megabytes, and some ten milliseconds between two looks at its deadline."""


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
        gather_s: float = 0.0,
        clock: Callable[[], int] = time.time_ns,
        max_threads: int | None = None,
    ) -> None:
        self._database = Database(
            path,
            read_only=read_only,
            num_readers=num_readers,
            memory_limit_bytes=memory_limit_bytes,
            max_threads=max_threads,
        )
        self._clock = clock
        self.url = path
        self.upkeep = RLock()
        self._in_background = False
        self.migrated: Sequence[Migration] = ()
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
        self._writer = None if read_only else Writer(self._database, books, self._queue, clock, gather_s)

    def append(self, batch: Batch, timeout_s: float = 30.0) -> Receipt:
        """Commit a batch; back when it is on disk. Raises StoreBusy, DiskFull, BatchRejected. See `Store.append`."""
        self._writing()
        check_batch(batch)
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
        plain = all(can_be_literal(value) for value in (window.run_id or "", *params))
        return contract_types(kind, self.query(*((render_literal(statement),) if plain else render(statement))))

    def query(self, sql: str, params: Sequence[Any] = ()) -> pa.Table:
        """Our own SQL over tables and views. See `Store.query`. What finds no memory is tried again with no read beside it."""
        return _again(lambda alone: self._read(sql, params, alone=alone))

    def stream(self, sql: str, into: Callable[[pa.RecordBatchReader], T], deadline: Deadline) -> T:
        """As `query` without values, but `into` takes the answer in batches while it is read, and may have to once more, from its start.

        Raises StoreBusy where no reader is free in time, Late where the deadline passes (the query is interrupted).
        """

        def once(alone: bool) -> T:
            reading = self._database.reading(in_background=self._in_background, alone=alone, deadline=deadline)
            # An answer that was not read to its end would hold the cursor's transaction, so the reader is closed.
            with reading as cursor, cursor.sql(sql).to_arrow_reader(_STREAM_ROWS) as reader:
                return into(reader)

        return _again(once)

    def _read(self, sql: str, params: Sequence[Any], *, alone: bool) -> pa.Table:
        with self._database.reading(in_background=self._in_background, alone=alone) as cursor:
            if not params and sql.lstrip()[:6].upper() == "SELECT":
                # As a relation the answer is made into Arrow by all threads, and in half the time. With parameters DuckDB
                # (1.5) would make a relation of the answer's values, which takes a hundred times as long.
                return cursor.sql(sql).to_arrow_table()
            return cursor.execute(sql, list(params)).to_arrow_table()

    def in_background(self) -> DuckDBStore:
        """The same store for work that nobody waits for: its reads are the first to give their memory to a commit."""
        made = copy(self)
        made._in_background = True
        return made

    def sharing(self) -> AbstractContextManager[None]:
        """Meanwhile the caller reads several things at once. See `Store.sharing`."""
        return self._database.sharing()

    def runs(self) -> Sequence[str]:
        """Names of the imported runs, in alphabetical order."""
        return self.books.run_names()

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
        from store.upkeep.verify import verify

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
    def is_read_only(self) -> bool:
        """Opened for reading only."""
        return self._writer is None

    @property
    def books(self) -> Books:
        """Senders, applied batches and row counts as of the last commit."""
        return self._read_only_books if self._writer is None else self._writer.books

    @property
    def parquet_dir(self) -> Path | None:
        """Folder of the sealed files: beside the database, `kvscope.duckdb` -> `kvscope.parquet`. None in memory."""
        path = self._database.path
        return None if path is None else path.with_name(f"{path.stem}.parquet")

    def sql_data(self, deadline: Deadline | None = None, *, direct: bool = False) -> SqlData:
        """What SQL for people may read: sealed files, the rows that are in no file, the views; one consistent picture.

        deadline   until when it may be waited for; Late past it
        direct     name the database file in place of the rows, for a child that opens it once this store is closed
        """
        from store.sql_data import sql_data

        return sql_data(self, deadline, direct=direct)

    @property
    def path(self) -> Path | None:
        """The database file; None in memory."""
        return self._database.path

    def now_ns(self) -> int:
        """The store's clock."""
        return self._clock()

    def reading(self, deadline: Deadline | None = None) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
        """A cursor for one longer read, behind the same semaphore as every other read; see `Readers.read`."""
        return self._database.reading(in_background=self._in_background, deadline=deadline)

    def fence(self, instant_ns: int) -> None:
        """From now on rows get a `received_ns` above `instant_ns`, and those at or below it are all committed."""
        writer = self._writing()
        self.call(lambda _: writer.raise_floor(instant_ns))

    def checkpoint(self) -> None:
        """Move the log into the database file and give the room of deleted rows free for new ones."""

        def work(cursor: duckdb.DuckDBPyConnection) -> None:
            self._database.require_space(0)
            cursor.execute("CHECKPOINT")

        self.call(work)

    def data_bytes(self) -> int:
        """Bytes in use in the database file (free room left out) and in its log."""
        if self._database.path is None:
            return 0
        size = self.query("PRAGMA database_size").to_pylist()[0]
        return int(size["used_blocks"]) * int(size["block_size"]) + self._database.log_bytes()

    def refuse_batches(self, error: KvscopeError | None) -> None:
        """From now on every append raises `error`; None takes batches again."""
        self._writing().budget_error = error

    def call(self, work: Callable[[duckdb.DuckDBPyConnection], T], *, is_transaction: bool = False) -> T:
        """Run `work` on the writing cursor between two commits (retention, sealing).

        is_transaction   it is one transaction, which reads give their memory to as they do to a batch
        """
        with border(self.url):
            return self._writing().call(work, is_transaction=is_transaction)

    def _writing(self) -> Writer:
        if self._writer is None:
            raise StoreMisuse(f"The store {self.url} was opened for reading only. Open it for writing.", url=self.url)
        return self._writer

    def _prepare(self, read_only: bool) -> None:
        """Bring the schema and the views to this release, or say why that cannot be."""
        cursor = self._database.cursor()
        try:
            if not read_only:
                self.migrated = migrate(cursor, self.url)
                install_views(cursor)
                recover(cursor, self.parquet_dir)
            elif todo := pending(cursor, self.url, load()):
                raise StoreMisuse(
                    f"{self.url} has an older schema ({len(todo)} migrations behind) and was opened for reading only. "
                    f"Run `kvscope store migrate --store {self.url}` first.",
                    url=self.url,
                )
        finally:
            cursor.close()


def _again(read: Callable[[bool], T]) -> T:
    """What `read(alone)` answers, tried again where it found no memory, or the store was opened again under it."""

    def once() -> T:
        try:
            return read(False)
        except OutOfMemory:  # beside others, or sent out by a commit
            return read(True)

    try:
        return once()
    except StoreError as error:
        if error.facts.get("error") != "FatalException":
            raise
        # The writer's checkpoint failed and took DuckDB's instance down; the writer opens the file again.
        time.sleep(_REVIVAL_S)
        return once()
