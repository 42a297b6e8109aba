"""Sealing: every row in exactly one Parquet file, files that anybody can read, and crashes made good."""

from __future__ import annotations

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from engine_probe.errors import DiskFull, StoreError
from store.open import open_store
from store.sandbox.sandbox import SqlData
from store.upkeep import seal as sealing
from store.upkeep.seal import seal
from tests.store_rows import START_NS, Clock, S, batch, request, step


@pytest.fixture
def clock():
    """16:00:00 UTC on 2025-11-24, until moved."""
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    """A store in a file."""
    with open_store(str(tmp_path / "k.duckdb"), clock=clock) as opened:
        yield opened


def files_of(store):
    """Paths of the Parquet files below the store's folder, relative to it, without their own names."""
    return sorted(str(path.relative_to(store.parquet_dir).parent) for path in store.parquet_dir.glob("**/*.parquet"))


def sealed_steps(store):
    """Numbers of the steps in all sealed files, sorted, as a reader of Parquet sees them."""
    folder = store.parquet_dir / "kind=step"
    if not list(folder.glob("**/*.parquet")):
        return []
    return sorted(ds.dataset(folder, partitioning="hive").to_table(["step"]).column("step").to_pylist())


def test_rows_lie_by_kind_date_and_hour(store, clock):
    """Steps at 16:00 and 17:00 and a request at 16:00 make three files; the folders name kind, date and hour (UTC)."""
    store.append(batch({"step": [step(0), step(3600)], "request": [request("a")]}, seq=0))
    clock.advance(400)
    report = seal(store, older_than_s=300)
    assert dict(report.rows) == {"request": 1, "step": 2}
    assert files_of(store) == [
        "kind=request/date=2025-11-24/hour=16",
        "kind=step/date=2025-11-24/hour=16",
        "kind=step/date=2025-11-24/hour=17",
    ]


def test_only_what_came_long_enough_ago_is_sealed(store, clock):
    """Age counts from when a row was received: the later batch stays out, until its time comes too."""
    store.append(batch({"step": [step(0)]}, seq=0))
    clock.advance(200)
    store.append(batch({"step": [step(1)]}, seq=1))
    clock.advance(150)
    seal(store, older_than_s=300)
    assert sealed_steps(store) == [0]
    clock.advance(200)
    seal(store, older_than_s=300)
    assert sealed_steps(store) == [0, 1]


def test_a_second_pass_seals_nothing_twice(store, clock):
    """Nothing new, no new file."""
    store.append(batch({"step": [step(0)]}, seq=0))
    clock.advance(400)
    assert seal(store).num_files == 1
    assert seal(store).num_files == 0
    assert sealed_steps(store) == [0]


def test_rows_that_come_late_are_sealed_by_the_next_pass(store, clock):
    """A row of an hour that was sealed already, and one whose batch was received before the cut, are not lost."""
    store.append(batch({"step": [step(0)]}, seq=0))
    clock.advance(400)
    seal(store, older_than_s=0)
    store.append(batch({"step": [step(1)]}, seq=1, received_ns=START_NS))
    assert sealed_steps(store) == [0]
    clock.advance(1)
    seal(store, older_than_s=0)
    assert sealed_steps(store) == [0, 1]
    assert list(store.verify()) == []


def test_the_cut_outlives_the_process(tmp_path, clock):
    """After reopening with a clock that stands still, new rows still come after the cut and are sealed later."""
    path = str(tmp_path / "k.duckdb")
    with open_store(path, clock=clock) as store:
        store.append(batch({"step": [step(0)]}, seq=0))
        seal(store, older_than_s=0)
    with open_store(path, clock=clock) as store:
        store.append(batch({"step": [step(1)]}, seq=1))
        assert store.query("SELECT count(*) AS n FROM step WHERE received_ns > ?", [clock.now_ns]).to_pylist() == [
            {"n": 1}
        ]
        clock.advance(1)
        seal(store, older_than_s=0)
        assert sealed_steps(store) == [0, 1]


def test_runs_have_files_of_their_own(store, clock):
    """A live row and one of a run in the same hour are two files, so a run can be kept or dropped alone."""
    store.append(batch({"step": [step(0), step(1, run_id="it's")]}, seq=0))
    clock.advance(400)
    seal(store)
    assert files_of(store) == ["kind=step/date=2025-11-24/hour=16"] * 2
    assert store.query("SELECT run_id, num_rows FROM seal_log ORDER BY run_id NULLS FIRST").to_pylist() == [
        {"run_id": None, "num_rows": 1},
        {"run_id": "it's", "num_rows": 1},
    ]


def test_every_column_survives(store, clock):
    """Lists, maps, structs and hashes above 2^63 are in the file as they were sent, beside source and received_ns."""
    facts = {"labels": {"a": "b"}, "token_ns": [1, 2], "prompt_blocks": [2**64 - 1], "prefix_hash": 2**63}
    store.append(batch({"request": [request("a", **facts)]}, seq=0))
    clock.advance(400)
    seal(store)
    (path,) = store.parquet_dir.glob("**/*.parquet")
    (row,) = pq.read_table(path, partitioning=None).to_pylist()
    assert (row["labels"], row["token_ns"], row["prompt_blocks"], row["prefix_hash"]) == (
        [("a", "b")],
        [1, 2],
        [2**64 - 1],
        2**63,
    )
    assert (row["source"], row["received_ns"]) == ("probe", START_NS)
    assert pq.read_metadata(path).row_group(0).column(0).compression == "ZSTD"


def test_odd_instants_have_a_place(store, clock):
    """Rows before 1970 and at the ends of int64 are sealed like others, rounded down to their hour."""
    odd = [-1, -(2**63), 2**63 - 1, 0, -3600 * S, 3600 * S - 1]
    store.append(batch({"step": [step(n, at_ns=at_ns) for n, at_ns in enumerate(odd)]}, seq=0))
    clock.advance(400)
    seal(store)
    assert sealed_steps(store) == [0, 1, 2, 3, 4, 5]
    assert files_of(store)[1:3] == ["kind=step/date=1969-12-31/hour=23", "kind=step/date=1970-01-01/hour=00"]


def test_a_store_in_memory_cannot_be_sealed():
    """There is no folder; the message says to open a file."""
    with open_store(":memory:") as store, pytest.raises(StoreError, match="Open a file"):
        seal(store)


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("moment", ["while writing", "before the rename", "before the log"])
def test_a_crash_leaves_no_row_twice_and_none_out(tmp_path, clock, monkeypatch, moment):
    """Wherever a pass is cut off, the next opening cleans up and the next pass seals each row once."""
    path = str(tmp_path / "k.duckdb")
    with open_store(path, clock=clock) as store:
        store.append(batch({"step": [step(0), step(3600), step(7200)]}, seq=0))
        clock.advance(400)
        calls = []

        def crash(*_, **__):
            calls.append(1)
            if len(calls) == (1 if moment == "before the log" else 2):
                raise Crash

        if moment == "while writing":
            monkeypatch.setattr(sealing.pq, "read_metadata", crash)
        elif moment == "before the rename":
            real = sealing._sync
            monkeypatch.setattr(sealing, "_sync", lambda p: crash() if p.suffix == ".tmp" else real(p))
        else:
            monkeypatch.setattr(sealing, "_finish", crash)
        monkeypatch.setattr(sealing, "recover", lambda *_: None)  # a process that is gone does not clean up
        with pytest.raises((Crash, StoreError, AttributeError)):
            seal(store)
        monkeypatch.undo()
    with open_store(path, clock=clock) as store:
        assert sealed_steps(store) == []
        assert not list(store.parquet_dir.glob("**/*.tmp"))
        seal(store)
        assert sealed_steps(store) == [0, 3600, 7200]
        assert list(store.verify()) == []


def test_a_pass_that_fails_cleans_up_at_once(store, clock, monkeypatch):
    """A full disk in the middle is DiskFull, leaves no file behind, and the next pass begins afresh."""
    store.append(batch({"step": [step(0), step(3600)]}, seq=0))
    clock.advance(400)
    monkeypatch.setattr(sealing, "_sync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DiskFull, match="No space left"):
        seal(store)
    monkeypatch.undo()
    assert sealed_steps(store) == []
    assert store.query("SELECT count(*) AS n FROM seal_log").to_pylist() == [{"n": 0}]
    seal(store)
    assert sealed_steps(store) == [0, 3600]


def test_sql_for_people_sees_each_row_once(store, clock):
    """Sealed files and the rest together are all rows, each once, before, between and after passes."""

    def seen(data: SqlData):
        hot = data.hot["step"].column("step").to_pylist()
        return sorted(hot + [n for path in data.files["step"] for n in pq.read_table(path).column("step").to_pylist()])

    store.append(batch({"step": [step(0)]}, seq=0))
    assert seen(store.sql_data()) == [0]
    clock.advance(400)
    seal(store)
    store.append(batch({"step": [step(1)]}, seq=1))
    assert seen(store.sql_data()) == [0, 1]
    early = store.sql_data()
    clock.advance(400)
    seal(store)
    assert seen(early) == [0, 1]
    assert seen(store.sql_data()) == [0, 1]
    direct = store.sql_data(direct=True)
    assert direct.hot == {}
    assert direct.database == store.parquet_dir.with_suffix(".duckdb")
    assert direct.sealed_through_ns["step"] == clock.now_ns - 300 * S
    assert "evidence_batch" in [name for name, *_ in direct.views]
