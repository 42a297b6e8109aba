"""The one thread that writes: takes what waits, commits it as a group, answers every batch of it.

Invariant: a batch's rows and its identity are written in one transaction, so a batch is applied once and an answer
means it is on disk. A batch that cannot be stored fails alone: when a group fails, its batches are tried one by one.

Group commit: a lone batch is committed at once. Where several senders are at work (the last group had more than one
batch), the next group begins `gather_s` after the last one began, since a commit costs about 10 ms of CPU whatever it
holds. What arrives while a commit runs is in the next group too, up to `MAX_GROUP_ROWS` rows; from 122,880 rows of a kind
on DuckDB writes them compressed at once and not through its log, and no checkpoint has to do it again.

Checkpoints are made here, between groups and after the answers, not inside a commit. DuckDB logs all lists of the 2,048
rows that a small commit is among (1.5), so its log is several times the rows and says little about what a checkpoint will
take; the bytes of the rows say it. It needs the table for itself, and the writer would wait for a reader as long as that reads:
while somebody reads, a checkpoint waits until there is twice as much, and then for _GRACE_S before the readers are sent out.

A commit that finds no memory is undone, and tried again after those who read in the background were sent out, then after all
who read were (`readers.py`); one that finds none even then is answered OutOfMemory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, Final, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from engine_probe.errors import KvscopeError, StoreError
from store.books import Books
from store.border import is_short_of_memory, translate
from store.database import VACUUM_TASKS, Database
from store.entries import merged
from store.interface import Receipt
from store.queue import Append, Job, WriteQueue

log = logging.getLogger(__name__)

MAX_GROUP_ROWS: Final = 2 * 122_880
CHECKPOINT_ROW_BYTES: Final = 128 << 20
CHECKPOINT_LOG_BYTES: Final = 512 << 20
_SMALL_CHUNK_ROWS: Final = 2048
_GRACE_S: Final = 1.0
"""So long at most commits wait for reads, where a checkpoint is overdue."""

T = TypeVar("T")


class Writer:
    """Owns the writing cursor and the books."""

    def __init__(
        self, database: Database, books: Books, queue: WriteQueue, clock: Callable[[], int], gather_s: float = 0.0
    ) -> None:
        self._database = database
        self._queue = queue
        self._clock = clock
        self._gather_s = gather_s
        self._logged_row_bytes = 0
        self._cursor = database.cursor()
        self.books = books
        self.floor_ns = books.last_received_ns
        self.budget_error: KvscopeError | None = None
        self._thread = Thread(target=self._run, name="kvscope-store-writer", daemon=True)
        self._thread.start()

    def call(
        self,
        work: Callable[[duckdb.DuckDBPyConnection], T],
        timeout_s: float | None = None,
        *,
        is_transaction: bool = False,
    ) -> T:
        """Run `work` between two commits on the writer's cursor and answer with its result. See `Job`."""
        job = Job(work, is_transaction)
        self._queue.put(job)
        result: T = job.answer.result(timeout_s)
        return result

    def close(self) -> None:
        """Write what is queued, then end the thread."""
        self._queue.close()
        self._thread.join()
        self._cursor.close()

    def raise_floor(self, instant_ns: int) -> None:
        """Rows of later commits carry a `received_ns` above `instant_ns`. Call it on the writer's thread only."""
        self.floor_ns = max(self.floor_ns, instant_ns + 1)

    def _run(self) -> None:
        ready_at = 0.0
        while (item := self._queue.take(MAX_GROUP_ROWS, ready_at)) is not None:
            ready_at = time.monotonic() + self._gather_s if isinstance(item, list) and len(item) > 1 else 0.0
            try:
                if isinstance(item, Job):
                    self._run_job(item)
                else:
                    self._write_group(item)
                    if self.books.wants_fold:
                        self._fold()
                    self._checkpoint_if_due()
            except BaseException as error:
                # Whatever happened, the thread goes on and nobody waits in vain.
                log.exception("writer stumbled", extra={"url": self._database.url})
                with suppress(duckdb.Error):
                    self._cursor.execute("ROLLBACK")
                for waiting in [item] if isinstance(item, Job) else item:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)
        self._fold()

    def _run_job(self, job: Job) -> None:
        if not job.answer.set_running_or_notify_cancel():
            return
        found: list[Any] = []

        def work() -> None:
            found[:] = [job.work(self._cursor)]

        error = self._with_room(work) if job.is_transaction else self._attempt(work)
        if error is None:
            job.answer.set_result(found[0])
        else:
            job.answer.set_exception(_chained(error, self._database.url))

    def _fold(self) -> None:
        """Keep the journal short. It can wait: what it holds is on disk."""
        if self._database.degraded:
            return
        try:
            self.books.fold(self._cursor)
        except (duckdb.Error, OSError) as error:
            log.warning("journal not folded", extra={"url": self._database.url, "reason": str(error)})
            self._recover(error)

    def _checkpoint_if_due(self) -> None:
        """Move the log into the file, where it has grown. It can wait: what it holds is on disk."""
        due = max(self._logged_row_bytes / CHECKPOINT_ROW_BYTES, self._database.log_bytes() / CHECKPOINT_LOG_BYTES)
        if due < 1 or (due < 2 and self._database.is_read) or self._database.degraded:
            return
        try:
            self._database.require_space(0)
            # These row groups are large already: making fewer of them would only rewrite what lies on disk.
            self._cursor.execute("SET max_vacuum_tasks = 0")
            with self._database.room("the log had to be moved into the file", of_all=True, grace_s=_GRACE_S):
                self._cursor.execute("CHECKPOINT")
        except (duckdb.Error, OSError, KvscopeError) as error:
            log.warning("checkpoint failed", extra={"url": self._database.url, "reason": str(error)})
            self._recover(error)
        with suppress(duckdb.Error):
            self._cursor.execute(f"SET max_vacuum_tasks = {VACUUM_TASKS}")
        self._logged_row_bytes = 0

    def _write_group(self, group: Sequence[Append]) -> None:
        leaders: list[Append] = []
        followers: dict[int, list[Append]] = {}
        by_identity: dict[Any, Append] = {}
        for item in group:
            if not item.answer.set_running_or_notify_cancel():
                continue
            identity = item.batch.identity
            if identity is not None and self.books.is_applied(identity):
                item.answer.set_result(Receipt({}, True, item.received_ns))
            elif identity is not None and identity in by_identity:
                followers.setdefault(id(by_identity[identity]), []).append(item)
            else:
                leaders.append(item)
                if identity is not None:
                    by_identity[identity] = item
        if leaders:
            self._write_leaders(leaders)
        for leader in leaders:
            for follower in followers.get(id(leader), ()):
                error = leader.answer.exception()
                if error is None:
                    follower.answer.set_result(Receipt({}, True, follower.received_ns))
                else:
                    follower.answer.set_exception(error)

    def _write_leaders(self, batches: Sequence[Append]) -> None:
        """Commit the batches together, or one by one where together fails."""
        started = time.perf_counter()
        error = self._with_room(lambda: self._commit(batches))
        if error is not None and self._was_applied_after_all(batches):
            error = None
        if error is not None:
            if len(batches) > 1 and not isinstance(error, KvscopeError):
                for batch in batches:
                    self._write_leaders([batch])
                return
            failure = _chained(error, self._database.url)
            log.warning("commit failed", extra={"batches": len(batches), "reason": str(failure)})
            for batch in batches:
                batch.answer.set_exception(failure)
            return
        num_bytes = sum(batch.num_bytes for batch in batches)
        self._logged_row_bytes += num_bytes
        self._queue.wrote(num_bytes, time.perf_counter() - started)
        for batch in batches:
            counts = {kind: table.num_rows for kind, table in batch.batch.tables.items()}
            batch.answer.set_result(Receipt(counts, False, batch.received_ns))

    def _with_room(self, work: Callable[[], None]) -> BaseException | None:
        """`_attempt`, and again in the memory of those who read, where there was too little."""
        error = self._attempt(work)
        for of_all in (False, True):
            if error is None or not is_short_of_memory(error):
                break
            log.info("reads give their memory to a commit", extra={"of_all": of_all, "reason": str(error)})
            with self._database.room("a commit needed its memory", of_all=of_all):
                error = self._attempt(work)
        return error

    def _attempt(self, work: Callable[[], None]) -> BaseException | None:
        """Do it; None where it is on disk, else what undid it."""
        try:
            work()
        except BaseException as error:
            self._recover(error)
            return error
        return None

    def _commit(self, batches: Sequence[Append]) -> None:
        """One transaction: rows, identities, books."""
        if self.budget_error is not None:
            raise self.budget_error
        self._database.require_space(sum(batch.num_bytes for batch in batches))
        if self._database.degraded:
            self._cursor.close()
            self._database.revive()
            self._cursor = self._database.cursor()
        parts: dict[str, list[pa.Table]] = {}
        entries = []
        runs: set[str] = set()
        for item in batches:
            batch = item.batch
            self.floor_ns = max(self.floor_ns, min(item.received_ns, self._clock()))
            source = batch.identity.source if batch.identity else batch.source
            rows = {kind: table.num_rows for kind, table in batch.tables.items() if table.num_rows}
            for kind in rows:
                runs |= _runs_of(batch.tables[kind]) - self.books.runs
                parts.setdefault(kind, []).append(_with_arrival(batch.tables[kind], source, self.floor_ns))
            entries.append(
                self.books.entry(
                    batch.identity,
                    source,
                    rows,
                    sent_ns=batch.sent_ns,
                    received_ns=item.received_ns,
                    row_ns=self.floor_ns,
                )
            )
        entries = merged(entries)
        cursor = self._cursor
        self._database.calm(cursor)
        cursor.execute("BEGIN")
        for kind, tables in parts.items():
            _insert(cursor, kind, tables)
        self.books.write(cursor, entries)
        self.books.write_runs(cursor, runs, self.floor_ns)
        cursor.execute("COMMIT")
        self.books.settle(entries, runs)

    def _recover(self, error: BaseException) -> None:
        """Leave no transaction open; open the file again where DuckDB gave its instance up."""
        if isinstance(error, duckdb.FatalException) or "has been invalidated" in str(error):
            log.error("database gave up, opening it again", extra={"url": self._database.url, "reason": str(error)})
            self._cursor.close()
            self._database.revive()
            self._cursor = self._database.cursor()
            self.books = Books.load(self._cursor, clocks_of=self.books)
            return
        try:
            self._cursor.execute("ROLLBACK")
        except duckdb.Error:
            log.debug("no transaction was open")

    def _was_applied_after_all(self, batches: Sequence[Append]) -> bool:
        """After a commit that failed halfway (the file was opened again): the identities tell whether it is on disk."""
        identities = [batch.batch.identity for batch in batches]
        return all(identity is not None and self.books.is_applied(identity) for identity in identities)


def _with_arrival(table: pa.Table, source: str, received_ns: int) -> pa.Table:
    """The rows with who sent them and when they came; the name is a dictionary of one, so it costs a byte a row."""
    count = table.num_rows
    names = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int8()), count), pa.array([source], pa.string()))
    return table.append_column("source", names).append_column(
        "received_ns", pa.repeat(pa.scalar(received_ns, pa.int64()), count)
    )


def _runs_of(table: pa.Table) -> set[str]:
    """Names of the runs that have rows in the table; live rows have none, and most batches are live."""
    column = table.column("run_id")
    if column.null_count == table.num_rows:
        return set()
    return {str(name) for name in pc.unique(column).to_pylist() if name is not None}


def _insert(cursor: duckdb.DuckDBPyConnection, kind: str, tables: Sequence[pa.Table]) -> None:
    together = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
    if together.column(0).num_chunks > 1 and together.num_rows < _SMALL_CHUNK_ROWS * together.column(0).num_chunks:
        together = together.combine_chunks()
    cursor.register("incoming", together)
    try:
        cursor.execute(f'INSERT INTO "{kind}" BY NAME SELECT * FROM incoming')
    finally:
        cursor.unregister("incoming")


def _chained(error: BaseException, url: str) -> BaseException:
    if isinstance(error, KvscopeError) or not isinstance(error, duckdb.Error | OSError | pa.ArrowException):
        return error
    failure: StoreError = translate(error, url, writing=True)
    failure.__cause__ = error
    return failure
