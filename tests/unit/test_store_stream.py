"""Reads with a deadline: they wait for their turn, and read, no longer than somebody waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from engine_probe.errors import QueryKilled, StoreBusy, StoreError
from store.deadline import Deadline, Late
from store.duckdb_store import DuckDBStore
from store.open import open_store
from tests.store_rows import batch, numbers, step

ENDLESS = "SELECT sum(hash(i)) FROM range(1000000000000) t(i)"
"""Its first row never comes: it ends by an interrupt alone."""

LONG = "SELECT i FROM range(10000000) t(i)"
"""Rows by the million, of which the first come at once."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DuckDBStore]:
    """A store that admits one reader."""
    with open_store(str(tmp_path / "k.duckdb"), num_readers=1) as opened:
        yield opened


def within(seconds: float, cancelled: threading.Event | None = None) -> Deadline:
    return Deadline(time.monotonic() + seconds, cancelled)


def whole(reader: pa.RecordBatchReader) -> int:
    return sum(batch.num_rows for batch in reader)


def test_a_stream_has_every_row(store: DuckDBStore) -> None:
    """Ten million rows come in batches."""
    assert store.stream(LONG, whole, within(60)) == 10_000_000


def test_a_query_whose_first_row_never_comes_is_interrupted_at_the_deadline(store: DuckDBStore) -> None:
    """The reader is let go of, so the next read, and the next commit, find their turn."""
    with pytest.raises(Late):
        store.stream(ENDLESS, whole, within(0.2))
    store.append(batch({"step": [step(0)]}))
    assert numbers(store) == [0]


def test_a_query_that_nobody_waits_for_any_more_is_interrupted(store: DuckDBStore) -> None:
    """The caller gives up long before the deadline."""
    cancelled = threading.Event()
    timer = threading.Timer(0.1, cancelled.set)
    timer.start()
    with pytest.raises(Late):
        store.stream(ENDLESS, whole, within(3600, cancelled))
    timer.join()


def test_who_waits_for_a_reader_waits_until_the_deadline_at_most(store: DuckDBStore) -> None:
    """The only reader is taken for longer: told so after 0.2 s and not after the minute of a read."""
    with store.reading():
        with pytest.raises(StoreBusy, match=r"busy for \d(\.\d)? s"):
            store.stream(LONG, whole, within(0.2))
        with pytest.raises(StoreBusy):
            store.sql_data(within(0.2))
    assert store.stream(LONG, whole, within(60)) == 10_000_000


def test_who_gave_up_while_waiting_for_a_reader_waits_no_longer(store: DuckDBStore) -> None:
    """The client hung up meanwhile."""
    cancelled = threading.Event()
    cancelled.set()
    with store.reading(), pytest.raises(Late):
        store.stream(LONG, whole, within(3600, cancelled))


def test_a_stream_that_is_given_up_holds_nothing_back(store: DuckDBStore) -> None:
    """Neither a transaction, for which a checkpoint would wait, nor the reader's place."""

    def gives_up(reader: pa.RecordBatchReader) -> None:
        reader.read_next_batch()
        raise Late

    store.append(batch({"step": [step(0)]}))
    with pytest.raises(Late):
        store.stream("SELECT s.* FROM step s, range(10000000)", gives_up, within(60))
    store.checkpoint()
    assert store._database.log_bytes() == 0
    assert numbers(store) == [0]


def test_a_stream_that_a_commit_sends_out_is_read_again_from_its_start(store: DuckDBStore) -> None:
    """Commits come before reads; the caller gets all rows in the end, and nobody reads beside the second try."""
    tries = 0

    def commit() -> None:
        with store._database.room("a commit needed its memory", of_all=True):
            pass

    writer = threading.Thread(target=commit)

    def into(reader: pa.RecordBatchReader) -> int:
        nonlocal tries
        tries += 1
        first: int = reader.read_next_batch().num_rows
        if tries > 1:
            assert [read.alone for read in store._database.readers.inside] == [True]
            return first + whole(reader)
        writer.start()
        while not any(read.why_out for read in store._database.readers.inside):
            time.sleep(0.001)
        return first + whole(reader)

    assert store.stream(LONG, into, within(60)) == 10_000_000
    writer.join()
    assert tries == 2


def test_an_error_in_the_middle_of_a_stream_is_the_stores(store: DuckDBStore) -> None:
    """Arrow hands on the text alone, as an error of the system; it stays one of ours that names the store."""
    sql = "SELECT CASE WHEN i < 9000000 THEN i ELSE error('broken row') END FROM range(10000000) t(i)"
    with pytest.raises(StoreError, match="broken row") as found:
        store.stream(sql, whole, within(60))
    assert not isinstance(found.value, QueryKilled)
