"""Retention: what is too old or too much goes, runs stay, and the books still add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from engine_probe.errors import DiskFull, StoreError
from engine_probe.schema import conform
from store.interface import KEY_EPOCH, Batch, BatchId
from store.open import open_store
from store.upkeep import deletion
from store.upkeep.maintenance import Maintenance
from store.upkeep.retention import RetentionPolicy, drop_run, prune
from store.upkeep.seal import seal
from tests.store_rows import Clock, batch, numbers, request, step, steps

HOUR = 3600.0
PLAIN = RetentionPolicy(seal_after_s=None, max_age_s=HOUR, max_bytes=None, parquet_max_age_s=None)


@pytest.fixture
def clock():
    """A clock that is moved by hand."""
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    """A store in a file."""
    with open_store(str(tmp_path / "k.duckdb"), clock=clock) as opened:
        yield opened


def test_old_live_rows_go_and_young_ones_stay(store, clock):
    """Two hours and half an hour old under a limit of one hour: the first goes."""
    store.append(batch({"step": [step(0)], "request": [request("a")]}, seq=0))
    clock.advance(1.5 * HOUR)
    store.append(batch({"step": [step(1)]}, seq=1))
    clock.advance(0.5 * HOUR)
    report = prune(store, PLAIN)
    assert dict(report.rows) == {"request": 1, "step": 1}
    assert numbers(store) == [1]
    assert list(store.verify()) == []


def test_age_counts_from_when_a_row_came(store, clock):
    """Rows of last year that arrived just now, from a spool, are kept as long as others."""
    store.append(batch({"step": [step(0, at_ns=1)]}, seq=0))
    clock.advance(0.5 * HOUR)
    assert prune(store, PLAIN).rows == {}
    assert numbers(store) == [0]


def test_rows_of_a_run_stay_whatever_their_age(store, clock):
    """Retention by age and by size leaves imported runs alone."""
    store.append(batch({"step": [step(0, run_id="exp"), step(1)]}, seq=0))
    clock.advance(100 * HOUR)
    prune(store, RetentionPolicy(seal_after_s=None, max_age_s=HOUR, max_bytes=0, parquet_max_age_s=None))
    assert numbers(store) == [0]
    assert list(store.verify()) == []


def test_identities_outlive_the_rows(store, clock):
    """A batch whose rows were deleted is still a duplicate."""
    store.append(batch({"step": [step(0)]}, seq=0))
    clock.advance(2 * HOUR)
    prune(store, PLAIN)
    assert store.append(batch({"step": [step(0)]}, seq=0)).duplicate
    assert numbers(store) == []


def test_idempotency_keys_are_forgotten_after_a_while(store, clock):
    """A key is one identity each, so they would pile up: old ones go, young ones and senders' numbers stay."""

    def keyed(key):
        return store.append(Batch({"step": steps(0, 1)}, BatchId("curl", f"{KEY_EPOCH}{key}", 0))).duplicate

    assert [keyed("a"), keyed("b")] == [False, False]
    store.append(batch({"step": [step(1)]}, seq=0))
    clock.advance(2 * HOUR)
    assert [keyed("c"), keyed("b")] == [False, True]
    prune(store, replace(PLAIN, max_age_s=None, key_age_s=HOUR))
    assert list(store.verify()) == []
    assert [keyed("a"), keyed("b"), keyed("c")] == [False, False, True]
    assert store.append(batch({"step": [step(1)]}, seq=0)).duplicate
    assert list(store.verify()) == []


def test_the_newest_facts_of_a_worker_stay(store, clock):
    """Later questions need a worker's geometry, so its last facts stay whatever their age; older ones go."""
    facts = [{"worker": "w", "at_ns": n, "num_blocks": n} for n in range(1, 25)]
    store.append(batch({"worker": facts, "step": [step(0)]}, seq=0))
    clock.advance(100 * HOUR)
    assert dict(prune(store, PLAIN).rows) == {"step": 1, "worker": 4}
    assert store.query("SELECT min(num_blocks) AS first, count(*) AS n FROM worker").to_pylist() == [
        {"first": 5, "n": 20}
    ]


def test_nothing_goes_before_it_is_sealed(store, clock):
    """With sealing, a pass seals first and deletes only what is in Parquet."""
    policy = RetentionPolicy(seal_after_s=300, max_age_s=HOUR, max_bytes=None, parquet_max_age_s=None)
    store.append(batch({"step": [step(0)]}, seq=0))
    clock.advance(2 * HOUR)
    report = prune(store, policy)
    assert dict(report.sealed.rows) == {"step": 1}
    assert dict(report.rows) == {"step": 1}
    assert numbers(store) == []
    assert store.query("SELECT sum(num_rows)::BIGINT AS n FROM seal_log").to_pylist() == [{"n": 1}]
    assert list(store.verify()) == []


def test_old_sealed_files_go_and_their_folders(store, clock):
    """Files of live rows older than the limit are deleted, empty folders too; a run's file stays."""
    store.append(batch({"step": [step(0), step(7200, run_id="exp")]}, seq=0))
    clock.advance(400)
    seal(store)
    clock.advance(10 * HOUR)
    report = prune(store, RetentionPolicy(seal_after_s=300, max_age_s=None, max_bytes=None, parquet_max_age_s=HOUR))
    assert report.num_files == 1
    left = [str(path.relative_to(store.parquet_dir).parent) for path in store.parquet_dir.glob("**/*.parquet")]
    assert left == ["kind=step/date=2025-11-24/hour=18"]
    assert not (store.parquet_dir / "kind=step/date=2025-11-24/hour=16").exists()
    assert list(store.verify()) == []


def test_the_oldest_rows_go_first_when_it_is_too_much(store, clock):
    """A database above its bytes loses its oldest live rows until it fits; the youngest are still there.

    400,000 block events are four row groups of DuckDB, the least that can be freed one by one.
    """
    for seq in range(8):
        clock.advance(60)
        store.append(Batch({"block": incompressible_blocks(seq * 50_000, 50_000)}, BatchId("probe", "e", seq)))
    store.checkpoint()
    limit = int(store.data_bytes() * 0.6)
    report = prune(store, RetentionPolicy(seal_after_s=None, max_age_s=None, max_bytes=limit, parquet_max_age_s=None))
    assert report.database_bytes <= limit
    left = store.query("SELECT at_ns FROM block").column(0).to_pylist()
    assert left == list(range(left[0], 400_000))
    assert 100_000 <= left[0] <= 350_000
    assert list(store.verify()) == []


def test_rows_are_not_deleted_in_vain(store, clock):
    """A small database above a tiny limit loses some rows, sees that nothing came free, and stops."""
    for seq in range(4):
        clock.advance(60)
        store.append(Batch({"step": steps(seq * 100, 100)}, BatchId("probe", "e", seq)))
    store.checkpoint()
    limit = int(store.data_bytes() * 0.8)
    prune(store, RetentionPolicy(seal_after_s=None, max_age_s=None, max_bytes=limit, parquet_max_age_s=None))
    assert numbers(store)[-1] == 399


def incompressible_blocks(first, count):
    """Block events at `first`, `first` + 1, ... ns with hashes that do not compress."""
    hashes = np.random.default_rng(first).integers(0, 2**64, (2, count), dtype=np.uint64)
    columns = {
        "at_ns": np.arange(first, first + count),
        "change": pa.DictionaryArray.from_arrays(np.zeros(count, np.int8), ["stored"]).cast(pa.string()),
        "block_hash": hashes[0],
        "parent_hash": hashes[1],
    }
    return conform("block", pa.table(columns))


def test_a_fitting_database_is_left_alone(store):
    """Below every limit nothing happens."""
    store.append(batch({"step": [step(0)]}, seq=0))
    report = prune(store, RetentionPolicy(seal_after_s=None))
    assert (dict(report.rows), report.num_files, report.over_budget) == ({}, 0, False)


def test_deleting_goes_in_slices(store, clock, monkeypatch):
    """Many old rows are deleted in several transactions, so batches can come in between; all of them go."""
    monkeypatch.setattr(deletion, "SLICE_ROWS", 10)
    jobs = []
    for seq in range(7):
        clock.advance(1)
        store.append(batch({"step": [step(10 * seq + n) for n in range(10)]}, seq=seq))
    clock.advance(2 * HOUR)
    real = store.call
    monkeypatch.setattr(store, "call", lambda work: (jobs.append(1), real(work))[1])
    assert dict(prune(store, PLAIN).rows) == {"step": 70}
    assert len(jobs) > 7
    assert numbers(store) == []


def test_a_budget_that_runs_alone_exceed_refuses_batches(store, clock):
    """What may not be deleted is over the budget: batches get DiskFull with both numbers, reads go on; raised, it ends."""
    store.append(batch({"step": [step(n, run_id="exp", batch_id=f"{n}") for n in range(3000)]}, seq=0))
    store.checkpoint()
    tight = RetentionPolicy(seal_after_s=None, disk_budget_bytes=1000)
    assert prune(store, tight).over_budget
    with pytest.raises(DiskFull, match="budget") as full:
        store.append(batch({"step": [step(1)]}, seq=1))
    assert full.value.used_bytes > full.value.budget_bytes == 1000
    assert len(numbers(store)) == 3000
    assert not prune(store, RetentionPolicy(seal_after_s=None, disk_budget_bytes=10**9)).over_budget
    assert not store.append(batch({"step": [step(1)]}, seq=1)).duplicate


def test_the_budget_takes_the_oldest_files_first(store, clock):
    """Over the budget by less than a file: the oldest sealed file goes, younger ones stay."""
    for seq in range(3):
        store.append(batch({"step": [step(seq * 3600 + n, batch_id=f"{n * 7919}") for n in range(2000)]}, seq=seq))
        clock.advance(400)
        seal(store)
    prune(store, RetentionPolicy(seal_after_s=300, max_age_s=0, max_bytes=None, parquet_max_age_s=None))
    sizes = store.query("SELECT num_bytes FROM seal_log ORDER BY seal_id").column(0).to_pylist()
    budget = store.data_bytes() + sum(sizes) - 1
    policy = RetentionPolicy(
        seal_after_s=300, max_age_s=None, max_bytes=None, parquet_max_age_s=None, disk_budget_bytes=budget
    )
    report = prune(store, policy)
    assert report.num_files == 1
    assert [path.parent.name for path in sorted(store.parquet_dir.glob("**/*.parquet"))] == ["hour=17", "hour=18"]
    assert not report.over_budget


def test_a_run_is_dropped_by_name_with_its_files(store, clock):
    """Only that run goes; an unknown name lists the runs there are."""
    store.append(batch({"step": [step(0, run_id="a"), step(1, run_id="b"), step(2)]}, seq=0))
    clock.advance(400)
    seal(store)
    with pytest.raises(StoreError, match=r"no run 'c' .* The runs are: a, b"):
        drop_run(store, "c")
    report = drop_run(store, "a")
    assert (dict(report.rows), report.num_files) == ({"step": 1}, 1)
    assert numbers(store) == [1, 2]
    assert list(store.runs()) == ["b"]
    assert list(store.verify()) == []


def test_a_run_that_gets_rows_while_it_is_dropped_stays_listed(store, monkeypatch):
    """A batch of the run between the deletion of its rows and of its name: the new row is there and its run is named."""
    store.append(batch({"step": [step(0, run_id="a")]}, seq=0))
    real = deletion.forget_run

    def late(of, run_id, cursor):
        cursor.execute(
            "INSERT INTO step BY NAME SELECT 1 AS step, 1 AS at_ns, 'a' AS run_id, 's' AS source, 1 AS received_ns"
        )
        real(of, run_id, cursor)

    monkeypatch.setattr("store.upkeep.retention.forget_run", late)
    drop_run(store, "a")
    assert list(store.runs()) == ["a"]


def test_upkeep_applies_the_policy_and_survives_a_failing_pass(store, clock):
    """A pass reports; one that fails keeps its error and the next one works again."""
    seen = []
    upkeep = Maintenance(store, PLAIN, on_pass=seen.append)
    store.append(batch({"step": [step(0)]}, seq=0))
    clock.advance(2 * HOUR)
    assert dict(upkeep.run_once().rows) == {"step": 1}
    assert seen == [upkeep.last]
    real = store.checkpoint
    store.checkpoint = lambda: (_ for _ in ()).throw(DiskFull("no space"))
    store.append(batch({"step": [step(1)]}, seq=1))
    clock.advance(2 * HOUR)
    assert upkeep.run_once() is None
    assert isinstance(upkeep.error, DiskFull)
    store.checkpoint = real
    assert upkeep.run_once() is not None
    assert upkeep.error is None


def test_upkeep_runs_beside_the_store_and_stops(store):
    """Started, it passes by itself; stopped, its thread is gone."""
    import threading

    passed = threading.Event()
    upkeep = Maintenance(store, PLAIN, interval_s=0.005, on_pass=lambda _: passed.set())
    upkeep.start()
    assert passed.wait(30)
    upkeep.stop()
    assert not any(thread.name == "kvscope-store-upkeep" for thread in threading.enumerate())
