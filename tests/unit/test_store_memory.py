"""When the database's memory is used up: commits go on and reads give way, first those that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb
import pytest

from engine_probe.errors import KvscopeError, OutOfMemory, QueryKilled, StoreBusy
from store import writer as writing
from store.border import translate
from store.duckdb_store import DuckDBStore
from store.interface import Batch, BatchId
from store.open import open_store
from tests.store_rows import batch, numbers, step, steps

HELD = "SELECT list(i) FROM range(800000) t(i) GROUP BY i % 200000"
"""Keeps memory that cannot be spilled until its rows are fetched."""


ENDLESS = "SELECT sum(hash(i)) FROM range(1000000000000) t(i)"
"""Ends by an interrupt alone."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DuckDBStore]:
    with open_store(str(tmp_path / "k.duckdb"), num_readers=3, memory_limit_bytes=64 << 20) as opened:
        yield opened


def use_up(cursor: duckdb.DuckDBPyConnection, store: DuckDBStore) -> None:
    """Hold memory on the cursor, and leave next to nothing beside it."""
    cursor.execute(HELD)
    other = store._database.cursor()
    (used,) = other.execute("SELECT sum(memory_usage_bytes) FROM duckdb_memory()").fetchone() or (0,)
    other.execute(f"SET memory_limit = '{int(used) + (64 << 10)}B'")
    other.close()


class Reading:
    """A read on a thread of its own that holds the store's memory until it is interrupted or let go."""

    def __init__(self, store: DuckDBStore, *, in_background: bool = False, fills: bool = True) -> None:
        self.error: KvscopeError | None = None
        self.let_go = threading.Event()
        self._begun = threading.Event()
        self._store = store.in_background() if in_background else store
        self._fills = fills
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(30)

    def _read(self) -> None:
        holder = self._store._database.cursor()
        try:
            with self._store.reading() as cursor:
                if self._fills:
                    use_up(holder, self._store)
                self._begun.set()
                while not self.let_go.wait(0.005):
                    if any(read.cursor is cursor and read.why_out for read in self._store._database.readers.inside):
                        holder.close()
                        cursor.execute(ENDLESS)
        except KvscopeError as error:
            self.error = error

    def ended(self) -> KvscopeError | None:
        """What it ended with."""
        self.let_go.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error


@contextmanager
def held(store: DuckDBStore) -> Iterator[None]:
    """Memory that is held by no reader, so that nobody can be sent out for it."""
    cursor = store._database.cursor()
    use_up(cursor, store)
    yield
    cursor.close()


def test_a_commit_takes_the_memory_of_a_background_read_and_nobody_else_is_bothered(store: DuckDBStore) -> None:
    """The judge is sent out and told why; a person's read beside it goes on; the batch is there once."""
    person = Reading(store, fills=False)
    judge = Reading(store, in_background=True)
    assert not store.append(batch({"step": [step(n) for n in range(3000)]}, seq=0)).duplicate
    error = judge.ended()
    assert isinstance(error, OutOfMemory)
    assert "a commit needed its memory" in error.message
    assert error.retry_after_s == 5
    assert person.ended() is None
    assert len(numbers(store)) == 3000
    assert store.append(batch({"step": [step(0)]}, seq=0)).duplicate


def test_a_commit_takes_a_persons_memory_where_that_is_what_is_missing(store: DuckDBStore) -> None:
    """Commits come before reads: the person is refused in words, with when to ask again."""
    person = Reading(store)
    store.append(batch({"step": [step(n) for n in range(3000)]}, seq=0))
    assert isinstance(person.ended(), OutOfMemory)
    assert len(numbers(store)) == 3000


def test_a_commit_that_finds_no_memory_at_all_is_refused_whole(store: DuckDBStore) -> None:
    """503 with when to come back; nothing is half written, the identity is free, and the next try is stored."""
    rows = Batch({"step": steps(0, 3000), "mark": steps_as_marks()}, BatchId("probe", "e", 0))
    with held(store):
        with pytest.raises(OutOfMemory, match="Nothing of it was kept") as refused:
            store.append(rows)
        assert (refused.value.http_status, refused.value.retry_after_s) == (503, 2)
        assert store.sources() == []
    assert numbers(store) == []
    assert not store.append(rows).duplicate
    assert len(numbers(store)) == 3000
    assert store.verify() == []


def test_a_transaction_of_ours_takes_memory_as_a_batch_does(store: DuckDBStore) -> None:
    """What is called again is one transaction; other work is told, and nothing of either is half there."""
    table = steps(0, 3000)

    def work(cursor: duckdb.DuckDBPyConnection) -> int:
        cursor.register("incoming_rows", table)
        cursor.execute("BEGIN")
        cursor.execute("INSERT INTO step BY NAME SELECT *, 'us' AS source, 1 AS received_ns FROM incoming_rows")
        cursor.execute("COMMIT")
        return 3000

    judge = Reading(store, in_background=True)
    with pytest.raises(OutOfMemory):
        store.call(work)
    assert store.call(work, is_transaction=True) == 3000
    assert isinstance(judge.ended(), OutOfMemory)
    assert len(numbers(store)) == 3000


def steps_as_marks() -> object:
    """A second kind of the same batch."""
    return batch({"mark": [{"at_ns": 1, "mark": "deployed"}]}).tables["mark"]


def test_a_read_that_was_sent_out_is_asked_again_alone(store: DuckDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """`query` is answered though its first try was interrupted for a commit; nobody reads beside the second."""
    tries: list[bool] = []
    read = store._read

    def first_fails(sql: str, params: list[object], *, alone: bool) -> object:
        tries.append(alone)
        if not alone:
            raise OutOfMemory("sent out")
        return read(sql, params, alone=alone)

    monkeypatch.setattr(store, "_read", first_fails)
    assert store.query("SELECT 42 AS n").column("n").to_pylist() == [42]
    assert tries == [False, True]


def test_a_read_that_finds_no_memory_even_alone_says_so(store: DuckDBStore) -> None:
    """In words, as an error of which somebody can make something, not as a failure of the store."""
    with held(store), pytest.raises(OutOfMemory, match="Ask for a smaller window"):
        store.query(HELD)
    assert store.query("SELECT 1").num_rows == 1


def test_an_overdue_checkpoint_does_not_wait_for_a_long_read(
    store: DuckDBStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits would wait as long as somebody reads; the reader is told, and the log is moved."""
    monkeypatch.setattr(writing, "_GRACE_S", 0.05)
    reader = Reading(store, fills=False)
    store.append(batch({"step": [step(1)]}, seq=0))
    assert reader.error is None
    monkeypatch.setattr(writing, "CHECKPOINT_ROW_BYTES", 1)
    store.append(batch({"step": [step(2)]}, seq=1))
    store.call(lambda _: None)  # the checkpoint is over
    error = reader.ended()
    assert isinstance(error, OutOfMemory)
    assert "the log had to be moved" in error.message
    assert numbers(store) == [1, 2]


def waits(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """`work` on a thread, and what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_who_reads_alone_waits_for_the_others_and_they_for_it(store: DuckDBStore) -> None:
    """A read alone begins when the last other one has left, and who comes meanwhile waits outside."""
    readers = store._database.readers
    order: list[str] = []

    def alone() -> None:
        with store._database.reading(alone=True):
            assert len(readers.inside) == 1
            order.append("alone")

    def later() -> None:
        with store._database.reading():
            order.append("later")

    with store.reading():
        first, raised = waits(alone)
        while not readers._wait_alone:
            threading.Event().wait(0.001)
        second, also = waits(later)
        threading.Event().wait(0.05)
        assert order == []
    for thread in (first, second):
        thread.join(30)
    assert order == ["alone", "later"]
    assert raised == also == []


def test_a_shut_door_is_told_in_words_after_the_wait(store: DuckDBStore) -> None:
    """Background reads are shut out while a commit has their memory; others are not."""
    store._database.readers.wait_s = 0.05
    with store._database.room("of a test", of_all=False):
        assert store.query("SELECT 1").num_rows == 1
        with pytest.raises(StoreBusy, match="readers"):
            store.in_background().query("SELECT 1")
        with store._database.room("of a test", of_all=True), pytest.raises(StoreBusy):
            store.query("SELECT 1")
    assert store.in_background().query("SELECT 1").num_rows == 1


def interrupted(store: DuckDBStore) -> None:
    """A read that is stopped in the middle."""
    with store.reading() as cursor:
        cursor.execute("SELECT i FROM range(100000000) t(i)")
        cursor.interrupt()
        while cursor.fetchmany(100_000):
            pass


def test_a_read_that_somebody_else_interrupts_was_killed(store: DuckDBStore) -> None:
    """Only who was sent out for a commit is told of one; a cursor serves on after an interrupt that came too late."""
    with pytest.raises(QueryKilled):
        interrupted(store)
    with store.reading() as cursor:
        cursor.interrupt()
    assert store.query("SELECT 1").num_rows == 1


@pytest.mark.parametrize(
    "error",
    [
        duckdb.OutOfMemoryException("Out of Memory Error: could not allocate block of size 256.0 KiB"),
        duckdb.TransactionException(
            "TransactionContext Error: Failed to commit: failed to pin block of size 256.0 KiB (511.8 MiB/512.0 MiB used)"
        ),
    ],
)
def test_memory_that_runs_out_at_the_end_of_a_commit_is_known_by_its_text(error: duckdb.Error) -> None:
    """DuckDB has another class for it there."""
    assert isinstance(translate(error, "k.duckdb", writing=True), OutOfMemory)
    with suppress(AssertionError):
        assert isinstance(translate(duckdb.TransactionException("Conflict on update"), "k", writing=True), OutOfMemory)
        pytest.fail("a conflict is no lack of memory")
