"""Appending: once, whole, in order, with a bound, and a bad batch alone."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_probe.errors import BatchRejected, DiskFull, StoreBusy, StoreError
from engine_probe.schema import table_from_rows
from store import writer as writing
from store.interface import Batch, BatchId, Window
from store.open import open_store
from store.queue import Append, WriteQueue
from tests.store_rows import START_NS, Clock, S, batch, numbers, request, step, steps


@pytest.fixture
def store():
    """A store in memory."""
    with open_store(":memory:") as opened:
        yield opened


@pytest.fixture
def held_writer(store):
    """The store, its writer held until the returned function is called: what is appended meanwhile forms one group."""
    begun, release = threading.Event(), threading.Event()

    def hold(_):
        begun.set()
        release.wait(30)

    holder = threading.Thread(target=lambda: store.call(hold))
    holder.start()
    begun.wait(30)

    def go():
        release.set()
        holder.join()

    yield store, go
    go()


def append_together(store, go, batches):
    """Append the batches so that the writer takes them as one group; their receipts or errors, in order."""
    with ThreadPoolExecutor(len(batches)) as pool:
        futures = []
        for number, item in enumerate(batches, 1):
            futures.append(pool.submit(store.append, item))
            while store._queue.depth[0] < number:
                threading.Event().wait(0.001)
        go()
        return [future.exception(30) or future.result() for future in futures]


def test_a_batch_comes_back_as_it_was_sent(store):
    """Rows of several kinds, with lists, maps, structs and hashes above 2^63, are read back equal."""
    table = table_from_rows(
        "request",
        [
            request(
                "a",
                labels={"phase": "warmup"},
                token_ns=[1, 2],
                spans=[{"phase": "queue", "start_ns": 1, "end_ns": 2, "tokens": None}],
                prompt_blocks=[2**64 - 1, 0],
                prefix_hash=2**63,
            ),
            request("b", labels={}, token_ns=[], spans=[], prompt_blocks=[]),
            request("c"),
        ],
    )
    receipt = store.append(Batch({"request": table, "step": steps(0, 2)}, BatchId("probe", "e", 0)))
    assert dict(receipt.accepted) == {"request": 3, "step": 2}
    assert not receipt.duplicate
    assert store.rows("request", Window()).equals(table)


def test_a_repeat_is_a_duplicate_and_changes_nothing(store):
    """The same identity again: `duplicate`, nothing accepted, nothing stored."""
    store.append(batch({"step": [step(1)]}, seq=0))
    again = store.append(batch({"step": [step(2)]}, seq=0))
    assert again.duplicate
    assert dict(again.accepted) == {}
    assert numbers(store) == [1]


def test_identity_is_source_epoch_and_number(store):
    """Another source or another epoch with the same number is another batch."""
    for identity in (BatchId("a", "e", 0), BatchId("b", "e", 0), BatchId("a", "f", 0)):
        assert not store.append(Batch({"step": steps(0, 1)}, identity)).duplicate
    assert len(numbers(store)) == 3


def test_a_batch_without_identity_is_stored_each_time(store):
    """At least once: there is nothing to tell a repeat by."""
    for _ in range(2):
        assert not store.append(batch({"step": [step(1)]})).duplicate
    assert numbers(store) == [1, 1]


def test_batches_out_of_order_leave_ranges_and_gaps(store):
    """3, 0 and 1 applied: the sender is known up to 3, and 2 is missing until it comes."""
    for seq in (3, 0, 1):
        store.append(batch({"step": [step(seq)]}, seq=seq))
    (sender,) = store.sources()
    assert (sender.source, sender.epoch, sender.last_seq, list(sender.missing)) == ("probe", "e", 3, [(2, 2)])
    store.append(batch({"step": [step(2)]}, seq=2))
    assert list(store.sources()[0].missing) == []


def test_duplicates_inside_one_group_are_applied_once(held_writer):
    """Three copies that wait together: one is stored, the others are told they are duplicates."""
    store, go = held_writer
    receipts = append_together(store, go, [batch({"step": [step(1)]}, seq=5) for _ in range(3)])
    assert sorted(receipt.duplicate for receipt in receipts) == [False, True, True]
    assert numbers(store) == [1]


def test_a_bad_batch_of_a_group_fails_alone(held_writer):
    """A null in a required column is refused by the database; its neighbours in the group are stored."""
    store, go = held_writer
    bad = Batch(
        {"step": steps(7, 1).set_column(1, "at_ns", [[None]]).cast(steps(0, 1).schema)}, BatchId("probe", "e", 1)
    )
    answers = append_together(store, go, [batch({"step": [step(0)]}, 0), bad, batch({"step": [step(2)]}, 2)])
    assert [type(answer).__name__ for answer in answers] == ["Receipt", "BatchRejected", "Receipt"]
    assert numbers(store) == [0, 2]
    assert list(store.sources()[0].missing) == [(1, 1)]
    assert "at_ns" in answers[1].message


def test_a_refused_batch_may_be_sent_again_corrected(store):
    """A batch that failed was not applied, so its number is free."""
    bad = Batch(
        {"step": steps(7, 1).set_column(1, "at_ns", [[None]]).cast(steps(0, 1).schema)}, BatchId("probe", "e", 0)
    )
    with pytest.raises(BatchRejected):
        store.append(bad)
    assert not store.append(batch({"step": [step(7)]}, seq=0)).duplicate


def test_nothing_of_a_bad_batch_is_stored(store):
    """A batch is whole or not there: the good kind of a batch with a bad one is not stored either."""
    bad = steps(7, 1).set_column(1, "at_ns", [[None]]).cast(steps(0, 1).schema)
    with pytest.raises(BatchRejected):
        store.append(Batch({"request": table_from_rows("request", [request()]), "step": bad}))
    assert store.stats().rows["request"] == 0


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"steps": steps(0, 1)}, "no kind 'steps'"),
        ({"step": steps(0, 1).drop_columns("policy")}, "policy is absent"),
        ({"step": steps(0, 1).append_column("extra", [[1]])}, "extra is not in the contract"),
        ({"step": steps(0, 1).set_column(4, "step", [["one"]])}, "step is string and must be int64"),
    ],
)
def test_tables_that_are_not_the_contracts_are_refused_in_words(store, tables, says):
    """The message names the kind and the column, and says how to bring the table there."""
    with pytest.raises(BatchRejected, match=says):
        store.append(Batch(tables))


IMPOSSIBLE = [
    BatchId("s", "e", -1),
    BatchId("s", "e", 2**63),
    BatchId("x" * 2000, "e", 0),
    BatchId("", "e", 0),
    BatchId("s", "", 0),
    BatchId("s\0", "e", 0),
    BatchId("s", "\ud800", 0),
]


@pytest.mark.parametrize("identity", IMPOSSIBLE)
def test_impossible_identities_are_refused(store, identity):
    """A negative or too large number, and a name that is empty, endless or no text, are no identity."""
    with pytest.raises(BatchRejected, match="identity"):
        store.append(Batch({"step": steps(0, 1)}, identity))
    with pytest.raises(BatchRejected, match="identity"):
        store.append(Batch({"step": steps(0, 1)}, source=""))


def test_names_from_outside_are_only_ever_values(store):
    """Quotes, semicolons and other scripts in a source's name are stored as they are."""
    source = "probe'); DROP TABLE step; -- ñ 漢"
    store.append(Batch({"step": steps(0, 1)}, BatchId(source, "e'", 0)))
    assert store.sources()[0].source == source
    assert store.query("SELECT DISTINCT source FROM step").column(0).to_pylist() == [source]


def test_an_empty_batch_is_remembered_too():
    """A batch without rows has an identity; its repeat is a duplicate."""
    with open_store(":memory:") as store:
        assert not store.append(Batch({}, BatchId("s", "e", 0))).duplicate
        assert store.append(Batch({"step": steps(0, 0)}, BatchId("s", "e", 0))).duplicate


def test_rows_carry_their_source_and_arrival_never_falls():
    """`received_ns` follows the store's clock, and where a batch was received before an earlier one it is lifted."""
    clock = Clock()
    with open_store(":memory:", clock=clock) as store:
        store.append(batch({"step": [step(0)]}, seq=0, received_ns=START_NS))
        clock.advance(2)
        store.append(batch({"step": [step(1)]}, seq=1, received_ns=START_NS + 2 * S))
        store.append(batch({"step": [step(2)]}, seq=2, received_ns=START_NS + S))
        store.append(batch({"step": [step(3)]}, seq=3, received_ns=START_NS + 900 * S))
        found = store.query("SELECT source, (received_ns - ?) // 1000000000 AS s FROM step", [START_NS]).to_pylist()
    assert found == [{"source": "probe", "s": second} for second in (0, 2, 2, 2)]


def test_the_receipt_tells_when_the_batch_was_received():
    """The answer carries the batch's own instant, from which the sender reckons its clock."""
    with open_store(":memory:", clock=Clock()) as store:
        assert store.append(batch({"step": [step(0)]}, received_ns=START_NS - S)).received_ns == START_NS - S
        assert store.append(batch({"step": [step(0)]})).received_ns == START_NS


def test_the_senders_clock_is_estimated():
    """Sent at START + 3 s by its clock, received at START by ours: it is 3 s ahead."""
    with open_store(":memory:", clock=Clock()) as store:
        store.append(batch({"step": [step(0)]}, seq=0, sent_ns=START_NS + 3 * S))
        (sender,) = store.sources()
    assert sender.clock_offset_s == 3.0
    assert sender.clock_error_s == 1e-4


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(held_writer):
    """With the writer held, the queue fills; the next batch gets StoreBusy with whole seconds, and is not stored."""
    store, go = held_writer
    store._queue._max_batches = 2
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(store.append, batch({"step": [step(n)]}, n)) for n in (0, 1)]
        while store._queue.depth[0] < 2:
            threading.Event().wait(0.001)
        with pytest.raises(StoreBusy, match="Send the batch again in 1 s") as refused:
            store.append(batch({"step": [step(2)]}, 2))
        assert refused.value.retry_after_s == 1
        go()
        assert [future.result(30).duplicate for future in waiting] == [False, False]
    assert sorted(numbers(store)) == [0, 1]


def test_retry_after_follows_the_speed_of_the_disk():
    """30 MB wait and the disk takes 10 MB/s: come back in 3 s; never more than a minute."""
    queue = WriteQueue("x", max_batches=1, max_bytes=1 << 40)
    queue.wrote(10_000_000, 1.0)
    queue.put(Append(Batch({}), 0, 0, 30_000_000))
    with pytest.raises(StoreBusy) as refused:
        queue.put(Append(Batch({}), 0, 0, 1))
    assert refused.value.retry_after_s == 3


def test_a_batch_larger_than_the_bound_still_gets_through_alone():
    """The bound in bytes holds back a second batch, never the only one."""
    with open_store(":memory:", max_queued_bytes=10) as store:
        assert dict(store.append(batch({"step": [step(1)]})).accepted) == {"step": 1}


def test_a_batch_that_waits_too_long_is_withdrawn(held_writer):
    """The timeout takes it out of the queue, so it is certain that it was not applied."""
    store, go = held_writer
    with pytest.raises(StoreBusy, match="withdrawn"):
        store.append(batch({"step": [step(1)]}, seq=0), timeout_s=0.01)
    go()
    assert numbers(store) == []
    assert not store.append(batch({"step": [step(1)]}, seq=0)).duplicate


def test_a_group_is_bounded_in_rows(held_writer, monkeypatch):
    """Three batches of 2 rows under a bound of 4 rows make two groups; all are stored in order."""
    monkeypatch.setattr(writing, "MAX_GROUP_ROWS", 4)
    store, go = held_writer
    sizes = []
    commit = store._writer._commit
    monkeypatch.setattr(store._writer, "_commit", lambda group: (sizes.append(len(group)), commit(group))[1])
    append_together(store, go, [Batch({"step": steps(2 * n, 2)}, BatchId("s", "e", n)) for n in range(3)])
    assert sizes == [2, 1]
    assert numbers(store) == [0, 1, 2, 3, 4, 5]


def test_many_small_batches_of_many_senders_in_one_group(held_writer):
    """Twelve batches of different senders and kinds become one commit, each sender with its own range."""
    store, go = held_writer
    batches = [Batch({"step": steps(n, 1)}, BatchId(f"s{n % 3}", "e", n // 3)) for n in range(12)]
    append_together(store, go, batches)
    assert sorted((s.source, s.last_seq, tuple(s.missing)) for s in store.sources()) == [
        ("s0", 3, ()),
        ("s1", 3, ()),
        ("s2", 3, ()),
    ]
    assert store.query("SELECT source, count(*) AS n FROM step GROUP BY ALL ORDER BY ALL").to_pylist() == [
        {"source": f"s{n}", "n": 4} for n in range(3)
    ]


def test_closing_writes_what_is_queued(tmp_path):
    """Batches that wait when the store is closed are committed first; later ones are told that it is closed."""
    store = open_store(str(tmp_path / "k.duckdb"))
    begun, release = threading.Event(), threading.Event()
    holder = threading.Thread(target=lambda: store.call(lambda _: (begun.set(), release.wait(30))))
    holder.start()
    begun.wait(30)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.append, batch({"step": [step(1)]}, seq=0))
        while store._queue.depth[0] < 1:
            threading.Event().wait(0.001)
        closer = threading.Thread(target=store.close)
        closer.start()
        release.set()
        assert dict(waiting.result(30).accepted) == {"step": 1}
        closer.join()
        holder.join()
    with pytest.raises(StoreError, match="closed"):
        store.append(batch({"step": [step(2)]}))
    with open_store(str(tmp_path / "k.duckdb"), read_only=True) as again:
        assert numbers(again) == [1]


def test_the_journal_is_folded_into_compact_tables(tmp_path):
    """After closing, a sender that lost nothing is one range and one row, however many commits there were."""
    path = str(tmp_path / "k.duckdb")
    with open_store(path) as store:
        for seq in range(20):
            store.append(batch({"step": [step(seq)]}, seq=seq))
        assert store.query("SELECT count(*) FROM batch_journal").column(0)[0].as_py() == 20
    with open_store(path, read_only=True) as store:
        assert store.query("SELECT first_seq, last_seq FROM batch_range").to_pylist() == [
            {"first_seq": 0, "last_seq": 19}
        ]
        assert store.query("SELECT count(*) FROM batch_journal").column(0)[0].as_py() == 0
        assert store.query("SELECT num_batches, num_rows['step'] AS n FROM sender").to_pylist() == [
            {"num_batches": 20, "n": 20}
        ]


def test_a_writer_that_stumbles_answers_and_goes_on(store, monkeypatch):
    """An error that nothing expects reaches the sender of the batch, and the next batch is stored."""

    def stumble(_):
        raise RuntimeError("not expected")

    monkeypatch.setattr(store._writer, "_recover", stumble)
    bad = Batch({"step": steps(7, 1).set_column(1, "at_ns", [[None]]).cast(steps(0, 1).schema)}, BatchId("s", "e", 0))
    with pytest.raises(RuntimeError, match="not expected"):
        store.append(bad)
    monkeypatch.undo()
    assert not store.append(batch({"step": [step(1)]}, seq=1)).duplicate


def test_a_refusal_by_budget_is_told_to_every_batch_and_lifted_again(store):
    """While the disk budget is used up batches get DiskFull, reads go on; afterwards they are taken."""
    store.refuse_batches(DiskFull("budget used up"))
    with pytest.raises(DiskFull):
        store.append(batch({"step": [step(1)]}, seq=0))
    assert numbers(store) == []
    store.refuse_batches(None)
    assert not store.append(batch({"step": [step(1)]}, seq=0)).duplicate


def test_a_disk_that_is_nearly_full_is_noticed_before_writing(tmp_path, monkeypatch):
    """With less free room than the commit and its checkpoint may need, nothing is written: DiskFull with both numbers."""
    with open_store(str(tmp_path / "k.duckdb")) as store:
        real = shutil.disk_usage(tmp_path)
        monkeypatch.setattr("store.database.shutil.disk_usage", lambda _: real._replace(free=1))
        with pytest.raises(DiskFull, match="MB free") as full:
            store.append(batch({"step": [step(1)]}, seq=0))
        assert full.value.free_bytes < full.value.needed_bytes
        assert numbers(store) == []
        monkeypatch.undo()
        assert not store.append(batch({"step": [step(1)]}, seq=0)).duplicate
