"""Reading rows: windows, conditions, order, and what is refused."""

from __future__ import annotations

import threading

import pytest

from engine_probe.errors import StoreBusy, StoreError
from engine_probe.schema import arrow_schema
from store.interface import Window
from store.open import open_store
from tests.store_rows import START_NS, S, batch, request, step


@pytest.fixture(scope="module")
def store():
    """Three live requests, one of a run, four steps."""
    with open_store(":memory:") as opened:
        rows = [request("a", 0, tenant="x"), request("b", 1, tenant="it's"), request("c", 2)]
        rows.append(request("late", 0, at_ns=START_NS + 99 * S))
        rows.append(request("run", 1, run_id="exp"))
        opened.append(batch({"request": rows, "step": [step(n) for n in range(4)]}))
        yield opened


def ids(table):
    """Request ids of a table."""
    return table.column("request_id").to_pylist()


def test_a_window_is_half_open_and_goes_by_arrival(store):
    """[0 s, 1 s) holds what arrived at 0 s, though one of them ended much later."""
    assert ids(store.rows("request", Window(START_NS, START_NS + S))) == ["a", "late"]


def test_other_kinds_go_by_their_instant(store):
    """Steps at 0, 1, 2, 3 s: [1 s, 3 s) holds two."""
    found = store.rows("step", Window(START_NS + S, START_NS + 3 * S), ["step"])
    assert found.column("step").to_pylist() == [1, 2]


def test_live_rows_and_runs_never_mix(store):
    """Without a run only live rows are seen; a run has only its own."""
    assert "run" not in ids(store.rows("request", Window()))
    assert ids(store.rows("request", Window(run_id="exp"))) == ["run"]
    assert store.rows("request", Window(run_id="nope")).num_rows == 0
    assert store.runs() == ["exp"]


def test_columns_and_types_are_the_contracts(store):
    """By default all of the contract's columns with its types; else those asked for, in that order."""
    assert store.rows("request", Window()).schema.equals(arrow_schema("request"), check_metadata=False)
    assert store.rows("request", Window(), ["tenant", "request_id", "source"]).column_names == [
        "tenant",
        "request_id",
        "source",
    ]


def test_own_conditions_take_values_by_question_mark(store):
    """`?` outside quotes takes a value, inside quotes it is a character; colons are no parameters."""
    assert ids(store.rows("request", Window(), where="tenant = ?", params=["it's"])) == ["b"]
    found = store.rows("request", Window(), where="tenant = ? OR '?:x' = tenant::VARCHAR", params=["x"])
    assert ids(found) == ["a"]


def test_order_and_limit(store):
    """Newest first, two of them."""
    assert ids(store.rows("request", Window(), order_by="arrival_ns DESC, request_id", limit=2)) == ["c", "b"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: s.rows("requests", Window()), "no kind 'requests'"),
        (lambda s: s.rows("request", Window(), ["tenantt"]), "has no column tenantt"),
        (lambda s: s.rows("request", Window(), where="tenant = ?"), "1 question marks for 0 values"),
        (lambda s: s.query("SELECT * FROM nowhere"), "nowhere"),
        (lambda s: s.query("SELEC 1"), "SELEC"),
    ],
)
def test_what_cannot_be_read_is_named(store, call, says):
    """Unknown kinds and columns, missing values and wrong SQL are StoreErrors that name them."""
    with pytest.raises(StoreError, match=says):
        call(store)


def test_stats_count_rows_and_span_time(store):
    """Rows by kind, oldest and newest instants over all kinds (arrival for requests)."""
    stats = store.stats()
    assert (stats.rows["request"], stats.rows["step"], stats.rows["block"]) == (5, 4, 0)
    assert (stats.oldest_ns, stats.newest_ns) == (START_NS, START_NS + 3 * S)


def test_readers_wait_for_each_other_and_give_up_in_words():
    """With one reader that is busy, the next one is told after the wait, and can read again afterwards."""
    with open_store(":memory:", num_readers=1) as store:
        store._database.readers.wait_s = 0.01
        with store.reading(), pytest.raises(StoreBusy, match="readers") as busy:
            store.query("SELECT 1")
        assert busy.value.retry_after_s == 5
        assert store.query("SELECT 1").num_rows == 1


def test_a_read_that_fails_gives_its_reader_back():
    """Errors do not use up the few readers."""
    with open_store(":memory:", num_readers=1) as store:
        store._database.readers.wait_s = 5
        for _ in range(5):
            with pytest.raises(StoreError):
                store.query("SELECT * FROM nowhere")
        assert store.query("SELECT 1").num_rows == 1


def test_a_read_sees_a_commit_whole_or_not_at_all():
    """A snapshot taken before a commit stays as it was while the commit goes through."""
    with open_store(":memory:") as store:
        store.append(batch({"step": [step(0)]}))
        with store.reading() as cursor:
            cursor.execute("BEGIN")
            assert cursor.execute("SELECT count(*) FROM step").fetchone() == (1,)
            appended = threading.Thread(target=lambda: store.append(batch({"step": [step(1), step(2)]})))
            appended.start()
            appended.join(30)
            assert not appended.is_alive()
            assert cursor.execute("SELECT count(*) FROM step").fetchone() == (1,)
            cursor.execute("COMMIT")
        assert store.query("SELECT count(*) AS n FROM step").column("n").to_pylist() == [3]
