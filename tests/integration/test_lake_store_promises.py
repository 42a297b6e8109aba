"""One suite of the `Store` promises, run against the DuckDB store and against the lake: the interface fits both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from engine_probe.errors import BatchRejected, StoreError
from engine_probe.events import KINDS
from engine_probe.schema import arrow_schema, table_from_rows
from store.interface import Batch, BatchId, Store, Window
from tests.strategies import batches

Open = Callable[[], Any]
S = 10**9
T0 = 1_764_000_000 * S


@pytest.fixture(params=["duckdb", pytest.param("lake", marks=pytest.mark.server)])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same store each time it is called; the one before must be closed."""
    if request.param == "duckdb":
        from store.open import open_store

        return lambda: open_store(str(tmp_path / "k.duckdb"))
    from store.lake import LakeStore

    dsn = request.getfixturevalue("postgres_database")
    return lambda: LakeStore(f"ducklake:postgres:{dsn}?data_path={tmp_path / 'data'}")


@pytest.fixture
def store(open_again: Open) -> Iterator[Store]:
    """An empty store."""
    with open_again() as opened:
        yield opened


def request_row(name: str, arrival_ns: int, **more: Any) -> dict[str, Any]:
    """A finished request."""
    facts = {"request_id": name, "vantage": "engine", "state": "finished", "arrival_ns": arrival_ns}
    return facts | {"at_ns": arrival_ns + 5 * S} | more


def batch(seq: int | None, **rows: list[dict[str, Any]]) -> Batch:
    """A batch of a sender; None: without identity."""
    tables = {kind: table_from_rows(kind, some) for kind, some in rows.items()}
    return Batch(tables, None if seq is None else BatchId("probe", "epoch", seq), source="probe", received_ns=T0)


def names(store: Store, window: Window) -> list[str]:
    """Ids of the requests in a window."""
    return sorted(store.rows("request", window, ["request_id"]).column("request_id").to_pylist())


def test_a_store_fits_the_protocol(store: Store) -> None:
    """Every verb of the protocol is there under its name."""
    verbs = [name for name in vars(Store) if not name.startswith("_")]
    assert set(verbs) >= {"append", "rows", "query", "runs", "sources", "stats", "verify", "close"}
    assert [verb for verb in verbs if not callable(getattr(store, verb, None))] == []


def test_an_append_answers_what_it_took_and_makes_it_visible(store: Store) -> None:
    """All kinds of a batch become visible together."""
    receipt = store.append(batch(0, request=[request_row("a", T0)], step=[{"step": 1, "at_ns": T0}]))
    assert (dict(receipt.accepted), receipt.duplicate, receipt.received_ns) == ({"request": 1, "step": 1}, False, T0)
    assert names(store, Window()) == ["a"]
    assert store.rows("step", Window()).num_rows == 1


def test_a_batch_is_applied_once(store: Store) -> None:
    """The second time the answer is duplicate, and no row is added; another number is another batch."""
    first = batch(7, request=[request_row("a", T0)])
    assert not store.append(first).duplicate
    again = store.append(first)
    assert again.duplicate
    assert sum(again.accepted.values()) == 0
    assert not store.append(batch(3, request=[request_row("b", T0)])).duplicate
    assert names(store, Window()) == ["a", "b"]


def test_identities_outlive_the_process(open_again: Open) -> None:
    """A resend after a restart is still a duplicate."""
    with open_again() as store:
        store.append(batch(0, request=[request_row("a", T0)]))
    with open_again() as store:
        assert store.append(batch(0, request=[request_row("a", T0)])).duplicate
        assert names(store, Window()) == ["a"]


def test_a_batch_without_identity_is_taken_each_time(store: Store) -> None:
    """At least once, as promised to senders that name nothing."""
    for _ in range(2):
        assert not store.append(batch(None, request=[request_row("a", T0)])).duplicate
    assert names(store, Window()) == ["a", "a"]


def test_a_request_belongs_to_its_arrival_and_other_kinds_to_their_instant(store: Store) -> None:
    """Windows are half open, and a run's rows are in no other window."""
    rows = [request_row("early", T0), request_row("late", T0 + 10 * S), request_row("run", T0, run_id="r")]
    store.append(batch(0, request=rows, step=[{"step": 1, "at_ns": T0 + 10 * S}]))
    assert names(store, Window(T0, T0 + 10 * S)) == ["early"]
    assert names(store, Window(T0 + 1, None)) == ["late"]
    assert names(store, Window(run_id="r")) == ["run"]
    assert names(store, Window()) == ["early", "late"]
    assert store.rows("step", Window(T0, T0 + 10 * S)).num_rows == 0
    assert store.rows("step", Window(T0 + 10 * S, T0 + 11 * S)).num_rows == 1
    assert list(store.runs()) == ["r"]


def test_rows_can_be_narrowed_ordered_and_cut(store: Store) -> None:
    """Columns, a condition with values, order and limit."""
    store.append(batch(0, request=[request_row(name, T0 + i, prompt_tokens=i) for i, name in enumerate("abcd")]))
    table = store.rows(
        "request", Window(), ["request_id"], where="prompt_tokens > ?", params=[0], order_by="arrival_ns DESC", limit=2
    )
    assert table.to_pydict() == {"request_id": ["d", "c"]}


def test_our_own_sql_takes_values(store: Store) -> None:
    """By name of kind, with question marks."""
    store.append(batch(0, request=[request_row("a", T0), request_row("b", T0, state="failed")]))
    assert store.query("SELECT count(*) AS n FROM request WHERE state = ?", ["failed"]).to_pylist() == [{"n": 1}]


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(tables=batches())
def test_every_value_comes_back_as_it_went_in(open_again: Open, tables: Any) -> None:
    """All nine kinds, nested values, uint64 to its end, null as null."""
    with open_again() as store:
        before = {kind: store.query(f'SELECT count(*) AS n FROM "{kind}"').column("n")[0].as_py() for kind in tables}
        marked = {kind: table.set_column(2, "run_id", [["this"] * table.num_rows]) for kind, table in tables.items()}
        tagged = {kind: table.cast(arrow_schema(kind)) for kind, table in marked.items()}
        store.append(Batch(tagged, received_ns=T0))
        for kind, table in tagged.items():
            found = store.rows(kind, Window(run_id="this")).to_pylist()
            assert len(found) >= table.num_rows
            assert all(row in found for row in table.to_pylist())
            assert (
                store.query(f'SELECT count(*) AS n FROM "{kind}"').column("n")[0].as_py()
                == before[kind] + table.num_rows
            )


def test_a_batch_that_breaks_the_contract_is_rejected_whole(store: Store) -> None:
    """An unknown kind and wrong columns; nothing of the batch is kept and its number stays free."""
    good = table_from_rows("request", [request_row("a", T0)])
    for tables in ({"request": good, "nothing": good}, {"request": good, "step": good}):
        with pytest.raises(BatchRejected):
            store.append(Batch(tables, BatchId("probe", "epoch", 0)))
    assert names(store, Window()) == []
    assert not store.append(batch(0, request=[request_row("a", T0)])).duplicate


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.rows("nothing", Window()),
        lambda store: store.rows("request", Window(), ["no_such_column"]),
        lambda store: store.query("SELECT no_such_column FROM request"),
        lambda store: store.query("SELEC 1"),
    ],
)
def test_a_question_that_makes_no_sense_is_a_store_error(store: Store, ask: Callable[[Store], Any]) -> None:
    """Never an exception of the database below."""
    with pytest.raises(StoreError):
        ask(store)


def test_stats_count_rows_and_know_the_span(store: Store) -> None:
    """Rows by kind, oldest and newest instant."""
    store.append(
        batch(
            0, request=[request_row("a", T0 + S), request_row("b", T0)], mark=[{"mark": "fault", "at_ns": T0 + 3 * S}]
        )
    )
    stats = store.stats()
    assert dict(stats.rows) == dict.fromkeys(KINDS, 0) | {"request": 2, "mark": 1}
    assert (stats.oldest_ns, stats.newest_ns) == (T0, T0 + 3 * S)


def test_a_store_can_be_closed_twice(open_again: Open) -> None:
    """The second time does nothing."""
    store = open_again()
    store.close()
    store.close()
