"""Hot rows go to the child in batches: by the deadline, within a bound of bytes, and they are the rows that there are."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_probe.errors import QueryKilled, QueryRefused
from engine_probe.events import column_names
from engine_probe.schema import table_from_rows
from store import duckdb_store
from store.deadline import Deadline, Late
from store.interface import Batch
from store.open import open_store
from store.sandbox.hot import shared
from store.sandbox.sandbox import MIB, SqlLimits, run_sql
from store.sandbox.wanted import Wanted
from tests.store_rows import request

ONE_MIB = pa.record_batch({"at_ns": pa.array(range(MIB // 8), pa.int64())})


class Source(dict[str, pa.Table]):
    """Rows of every kind without end, a MiB a batch; `each` is called with how many went before."""

    def __init__(self, each: Callable[[int], object]) -> None:
        self._each = each
        self.num_batches = 0

    def __contains__(self, kind: object) -> bool:
        return True

    def stream(self, kind: str, wanted: Wanted, into: Callable[..., None], deadline: Deadline) -> None:
        """See `store.sandbox.hot.Streams`."""

        def batches() -> Iterator[pa.RecordBatch]:
            while True:
                self._each(self.num_batches)
                self.num_batches += 1
                yield ONE_MIB

        into(pa.RecordBatchReader.from_batches(ONE_MIB.schema, batches()))


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline(time.monotonic() + seconds)


def handed_over(
    hot: Mapping[str, pa.Table], kinds: Mapping[str, Wanted], most_bytes: int = 64 * MIB
) -> dict[str, pa.Table]:
    """The rows as a child maps them."""
    with shared(hot, kinds, most_bytes, soon()) as (layout, fds):
        if not fds:
            return {}
        whole = pa.py_buffer(mmap.mmap(fds[0], 0, prot=mmap.PROT_READ))
        return {kind: pa.ipc.open_stream(whole.slice(at, size)).read_all() for kind, (at, size) in layout.items()}


def test_a_statement_over_endless_hot_rows_ends_by_its_deadline() -> None:
    """Each batch takes 20 ms, there is no last one: stopped for its time, not when the rows are all there."""
    limits = SqlLimits(timeout_s=0.5, memory_bytes=1024 * MIB)
    with pytest.raises(QueryKilled, match=r"ran longer than 0\.5 s") as killed:
        run_sql("SELECT max(at_ns) FROM step", hot=Source(lambda _: time.sleep(0.02)), limits=limits)
    assert killed.value.facts["reason"] == "time"


def test_a_statement_that_nobody_waits_for_takes_no_further_batch() -> None:
    """The client hangs up before the fourth batch, which is the last one asked for."""
    from store.sandbox.sandbox import SqlRunner

    cancelled = threading.Event()
    source = Source(lambda before: before == 3 and cancelled.set())
    with SqlRunner(max_children=1, prewarm=False) as runner, pytest.raises(QueryKilled) as killed:
        runner.run("SELECT max(at_ns) FROM step", hot=source, cancelled=cancelled)
    assert killed.value.facts["reason"] == "cancelled"
    assert source.num_batches == 4


def test_hot_rows_beyond_the_bound_are_refused_in_words() -> None:
    """Of 4 MiB three batches of a MiB and their headers fit; the fourth is not written, and what to do is said."""
    source = Source(lambda _: None)
    with pytest.raises(QueryRefused, match=r"more than 4 MiB .* rows into step\)\. Name the columns") as refused:
        handed_over(source, {"step": Wanted()}, 4 * MIB)
    assert source.num_batches == 4
    assert refused.value.facts == {"kind": "step", "max_bytes": 4 * MIB}


def test_the_bound_is_that_of_the_statements_memory_for_all_its_kinds_together() -> None:
    """Two kinds of 2 MiB each do not fit into 3 MiB; one does."""
    rows = pa.Table.from_batches([ONE_MIB, ONE_MIB])
    hot = {"step": rows, "mark": rows}
    assert handed_over(hot, {"step": Wanted()}, 3 * MIB)["step"].equals(rows)
    with pytest.raises(QueryRefused) as refused:
        handed_over(hot, {"step": Wanted(), "mark": Wanted()}, 3 * MIB)
    assert refused.value.facts["kind"] == "mark"


def test_rows_whose_reading_fails_midway_are_there_once_after_the_second_try() -> None:
    """A commit may send the read out; what had been written of that kind is written over, other kinds stay."""
    rows = pa.Table.from_batches([ONE_MIB, ONE_MIB])

    class Interrupted(dict[str, pa.Table]):
        def stream(self, kind: str, wanted: Wanted, into: Callable[..., None], _: Deadline) -> None:
            def breaks() -> Iterator[pa.RecordBatch]:
                yield ONE_MIB
                raise InterruptedError

            with suppress(InterruptedError):
                into(pa.RecordBatchReader.from_batches(ONE_MIB.schema, breaks()))
            into(self[kind].to_reader())

    found = handed_over(Interrupted(step=rows, mark=rows), {"step": Wanted(), "mark": Wanted()})
    assert found["step"].equals(rows)
    assert found["mark"].equals(rows)


def test_an_overdue_hand_over_writes_nothing() -> None:
    """The time may have passed while the rows were waited for."""
    with pytest.raises(Late), shared(Source(lambda _: None), {"step": Wanted()}, MIB, soon(-1)):
        pass


@pytest.fixture(scope="module")
def hot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, pa.Table]]:
    """5,000 requests in no sealed file, handed over in batches of 2,048: two full ones and a part."""
    rows = [
        request(f"r{n}", n, labels={"n": str(n)}, token_ns=[n, n + 1], prefix_hash=2**64 - 1 - n) for n in range(5000)
    ]
    folder: Path = tmp_path_factory.mktemp("hot")
    with pytest.MonkeyPatch.context() as patch, open_store(str(folder / "k.duckdb")) as store:
        patch.setattr(duckdb_store, "_STREAM_ROWS", 2048)
        store.append(Batch({"request": table_from_rows("request", rows)}))
        yield store.sql_data().hot


@given(columns=st.none() | st.sets(st.sampled_from(column_names("request")), min_size=1).map(sorted))
def test_what_is_streamed_is_what_is_read_whole(hot: Mapping[str, pa.Table], columns: list[str] | None) -> None:
    """Whichever columns: the same rows in the same order with the contract's types, in more than one batch."""
    whole = hot["request"]
    found = handed_over(hot, {"request": Wanted(columns)})["request"]
    assert found.equals(whole if columns is None else whole.select(columns))
    assert found.schema.equals((whole if columns is None else whole.select(columns)).schema)
    assert [batch.num_rows for batch in found.to_batches()] == [2048, 2048, 904]


def test_asking_whether_a_kind_is_hot_reads_no_row(
    hot: Mapping[str, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fetch all columns of all its rows, only to learn that there is such a kind."""
    monkeypatch.setattr(type(hot), "__getitem__", lambda *_: pytest.fail("rows were read"))
    assert "request" in hot
    assert "nonsense" not in hot


def test_kinds_without_hot_rows_need_no_memory() -> None:
    """Nothing is mapped where there is nothing."""
    assert handed_over({}, {"step": Wanted()}) == {}
