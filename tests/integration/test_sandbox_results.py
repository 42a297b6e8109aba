"""What SQL for people sees and answers: sealed files, hot rows, the database itself, the store's views."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine_probe.errors import QueryRefused, StoreBusy
from engine_probe.events import KINDS
from engine_probe.schema import arrow_schema, table_from_rows
from store.deadline import Deadline
from store.duckdb_store import DuckDBStore
from store.interface import Batch, BatchId
from store.open import open_store
from store.sandbox.sandbox import SqlData, SqlLimits, SqlRunner, run_sql
from store.sandbox.wanted import Wanted
from store.upkeep.seal import seal
from store.views import views

S = 10**9


@pytest.fixture(scope="module")
def runner() -> Iterator[SqlRunner]:
    """One runner for the whole module."""
    with SqlRunner(SqlLimits(timeout_s=60.0)) as made:
        yield made


class Clock:
    """The store's time, moved by hand."""

    def __init__(self) -> None:
        self.now_ns = 1_764_000_000 * S

    def __call__(self) -> int:
        return self.now_ns


def request(name: str, arrival_ns: int, ttft_s: float) -> dict[str, object]:
    """A finished request with a queue and a prefill span."""
    first = arrival_ns + round(ttft_s * S)
    return {
        "request_id": name,
        "vantage": "engine",
        "state": "finished",
        "worker": "w0",
        "arrival_ns": arrival_ns,
        "first_token_ns": first,
        "at_ns": first + S,
        "prompt_tokens": 100,
        "prefix_hash": 2**64 - 1,
        "labels": {"product": "chat"},
        "token_ns": [first, first + S],
        "spans": [
            {"phase": "queue", "start_ns": arrival_ns, "end_ns": arrival_ns + S, "tokens": None},
            {"phase": "prefill", "start_ns": arrival_ns + S, "end_ns": first, "tokens": 100},
        ],
    }


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[DuckDBStore]:
    """Two sealed requests, one hot one."""
    with open_store(str(tmp_path / "k.duckdb"), clock=clock) as opened:
        start = clock.now_ns
        sealed = [request("a", start, 2.0), request("b", start, 4.0)]
        opened.append(Batch({"request": table_from_rows("request", sealed)}, BatchId("s", "e", 0)))
        clock.now_ns += 600 * S
        assert seal(opened, older_than_s=300).rows == {"request": 2}
        opened.append(Batch({"request": table_from_rows("request", [request("c", start, 8.0)])}, BatchId("s", "e", 1)))
        yield opened


TTFT = "SELECT request_id, (first_token_ns - arrival_ns) / 1e9 AS ttft_s FROM request ORDER BY ttft_s"
EXPECTED = [{"request_id": "a", "ttft_s": 2.0}, {"request_id": "b", "ttft_s": 4.0}, {"request_id": "c", "ttft_s": 8.0}]


def test_sealed_and_hot_rows_are_one_table(runner: SqlRunner, store: DuckDBStore) -> None:
    """Each row is there once, whether it lies in Parquet or is still in the database alone."""
    assert runner.run(TTFT, data=store.sql_data()).table.to_pylist() == EXPECTED


def test_rows_sealed_in_mid_query_are_neither_lost_nor_doubled(
    runner: SqlRunner, store: DuckDBStore, clock: Clock
) -> None:
    """The picture is taken first: a file made afterwards is not in it, its rows still come as hot ones."""
    data = store.sql_data()
    clock.now_ns += 600 * S
    assert seal(store, older_than_s=300).rows == {"request": 1}
    assert runner.run(TTFT, data=data).table.to_pylist() == EXPECTED
    assert runner.run(TTFT, data=store.sql_data()).table.to_pylist() == EXPECTED


def test_only_what_the_statement_reads_is_handed_over(runner: SqlRunner, store: DuckDBStore) -> None:
    """Kinds and columns that the text does not name stay where they are."""
    asked: list[tuple[str, Sequence[str] | None]] = []
    limits: list[int | None] = []

    class Watched(dict[str, pa.Table]):
        def __contains__(self, kind: object) -> bool:
            return True

        def stream(self, kind: str, wanted: Wanted, into: Callable[..., None], until: Deadline) -> None:
            asked.append((kind, wanted.columns))
            limits.append(wanted.limit)
            store.sql_data().hot.stream(kind, wanted, into, until)  # type: ignore[attr-defined]  # a Mapping by its type, HotRows in truth

    data = store.sql_data()
    watched = SqlData(parquet_dir=data.parquet_dir, files=data.files, hot=Watched(), views=data.views)
    assert runner.run(TTFT, data=watched).table.to_pylist() == EXPECTED
    assert asked == [("request", ["request_id", "arrival_ns", "first_token_ns"])]
    asked.clear()
    runner.run("DESCRIBE request", data=watched)
    runner.run("SELECT 1", data=watched)
    assert asked == []
    runner.run("SELECT phase, count(*) FROM phase_span GROUP BY phase", data=watched)
    assert [kind for kind, _ in asked] == ["request"]
    assert "spans" in (asked[0][1] or ())
    assert "prompt_blocks" not in (asked[0][1] or ())
    limits.clear()
    assert runner.run("SELECT * FROM request LIMIT 1", data=watched).table.num_rows == 1
    assert limits == [1]


def test_views_of_the_store_are_there(runner: SqlRunner, store: DuckDBStore) -> None:
    """Every view of the store answers, and spans are unnested over sealed and hot rows."""
    for view in views():
        result = runner.run(f"SELECT * FROM {view.name}", data=store.sql_data())
        assert [column["name"] for column in result.columns] == [name for name, _ in view.fields]
    phases = runner.run(
        "SELECT phase, count(*) AS n FROM phase_span GROUP BY phase ORDER BY phase", data=store.sql_data()
    )
    assert phases.table.to_pylist() == [{"phase": "prefill", "n": 3}, {"phase": "queue", "n": 3}]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sql FROM duckdb_views()",
        "SELECT v.sql, p.definition FROM duckdb_views() v, pg_catalog.pg_views p",
        "SELECT v.sql, s.sql FROM duckdb_views() v, sqlite_master s",
        "SELECT sql FROM duckdb_tables()",
        "EXPLAIN SELECT * FROM request",
        "SELECT * FROM pg_catalog.pg_database",
    ],
)
def test_nothing_tells_where_the_store_lies(runner: SqlRunner, store: DuckDBStore, tmp_path: Path, sql: str) -> None:
    """Views name their sealed files from the folder on; a person who may ask in SQL learns no path of the machine."""
    told = str(runner.run(sql, data=store.sql_data()).table.to_pylist())
    assert str(tmp_path) not in told
    assert str(Path.home()) not in told
    assert ("'kind=request/date=" in told) == ("duckdb_views" in sql), "the sealed file is named, from its folder on"


def test_show_tables_lists_kinds_and_views_with_what_a_row_is(runner: SqlRunner, store: DuckDBStore) -> None:
    """The first thing a person types."""
    rows = runner.run("SHOW TABLES", data=store.sql_data()).table.to_pylist()
    assert {row["name"] for row in rows} == {*KINDS, *(view.name for view in views())}
    assert all(row["one_row_is"] for row in rows)


def test_describe_names_every_column_of_the_contract(runner: SqlRunner, store: DuckDBStore) -> None:
    """In the contract's order, with what the store adds behind."""
    rows = runner.run("DESCRIBE request", data=store.sql_data()).table.to_pylist()
    assert [row["column_name"] for row in rows] == [*arrow_schema("request").names, "source", "received_ns"]


def test_direct_mode_reads_the_database_file(runner: SqlRunner, store: DuckDBStore) -> None:
    """Without a collector the child opens the file itself, read only, and sees the same rows once."""
    url = store.url
    store.close()
    with open_store(url, read_only=True) as reading:
        data = reading.sql_data(direct=True)
        assert runner.run(TTFT, data=data).table.to_pylist() == EXPECTED
    before = Path(url).read_bytes()
    assert runner.run("SELECT count(*) AS n FROM request", data=data).table.to_pylist() == [{"n": 3}]
    for sql in ("DELETE FROM store.main.request", "CREATE TABLE store.main.x AS SELECT 1", "CHECKPOINT store"):
        with pytest.raises(QueryRefused):
            runner.run(sql, data=data)
    assert Path(url).read_bytes() == before


def test_direct_mode_over_a_held_file_says_who_to_ask(runner: SqlRunner, store: DuckDBStore) -> None:
    """A file that another process writes cannot be opened: StoreBusy, with the way out."""
    with pytest.raises(StoreBusy, match="Ask that process over HTTP"):
        runner.run("SELECT 1", data=SqlData(database=Path(store.url)))


def test_a_store_that_never_sealed_has_its_rows(runner: SqlRunner, tmp_path: Path) -> None:
    """No Parquet folder yet."""
    with open_store(str(tmp_path / "young.duckdb")) as young:
        young.append(Batch({"request": table_from_rows("request", [request("a", 1_764_000_000 * S, 2.0)])}))
        assert runner.run(TTFT, data=young.sql_data()).table.to_pylist() == EXPECTED[:1]


def test_files_of_an_older_release_lack_columns_that_become_null(runner: SqlRunner, tmp_path: Path) -> None:
    """A column added to the contract later is null in what was sealed before it."""
    folder = tmp_path / "kind=step" / "date=2026-11-29" / "hour=10"
    folder.mkdir(parents=True)
    old = table_from_rows("step", [{"step": 1, "at_ns": 1, "num_running": 5}]).select(["step", "at_ns", "num_running"])
    pq.write_table(old, folder / "1.parquet")
    hot = {"step": table_from_rows("step", [{"step": 2, "at_ns": 2, "gpu_util": 0.5}])}
    result = runner.run("SELECT step, num_running, gpu_util FROM step ORDER BY step", parquet_dir=tmp_path, hot=hot)
    assert result.table.to_pylist() == [
        {"step": 1, "num_running": 5, "gpu_util": None},
        {"step": 2, "num_running": None, "gpu_util": 0.5},
    ]


def test_results_keep_types_and_digits(runner: SqlRunner, store: DuckDBStore) -> None:
    """Columns carry DuckDB's type names; JSON rows carry every digit."""
    sql = (
        "SELECT prefix_hash, labels, token_ns[1] AS first, 'nan'::DOUBLE AS nothing FROM request WHERE request_id = 'c'"
    )
    document = runner.run(sql, data=store.sql_data()).to_dict()
    assert document["columns"] == [
        {"name": "prefix_hash", "type": "UBIGINT"},
        {"name": "labels", "type": "MAP(VARCHAR, VARCHAR)"},
        {"name": "first", "type": "BIGINT"},
        {"name": "nothing", "type": "DOUBLE"},
    ]
    assert json.loads(msgspec.json.encode(document)) == {
        "columns": document["columns"],
        "rows": [[18446744073709551615, {"product": "chat"}, 1_764_000_008 * S, None]],
        "truncated": False,
    }


@pytest.mark.parametrize("type_", ["BIT", "BIGNUM", "TIMETZ", "VARIANT"])
def test_a_type_without_an_arrow_form_is_refused_with_the_cast_that_helps(runner: SqlRunner, type_: str) -> None:
    """Rather than bytes that nobody can read."""
    value = {"BIT": "'101'::BIT", "BIGNUM": "1::BIGNUM", "TIMETZ": "'10:00:00+02'::TIMETZ", "VARIANT": "1::VARIANT"}[
        type_
    ]
    with pytest.raises(QueryRefused, match='Cast it: "v"::VARCHAR'):
        runner.run(f"SELECT {value} AS v")
    assert runner.run(f"SELECT ({value})::VARCHAR AS v").table.num_rows == 1


def test_an_enum_named_like_such_a_type_is_fine(runner: SqlRunner) -> None:
    """Only the type itself is looked at, not the words in it."""
    result = runner.run("SELECT 'BIT'::ENUM('BIT', 'VARIANT') AS v")
    assert result.to_dict()["rows"] == [["BIT"]]


def test_max_rows_cuts_and_says_so(runner: SqlRunner) -> None:
    """Exactly as many rows as there are is not cut; one fewer is; none at all is a question about columns."""
    sql = "SELECT range AS i FROM range(5000)"
    for max_rows, rows, truncated in [(5001, 5000, False), (5000, 5000, False), (4999, 4999, True), (0, 0, True)]:
        result = runner.run(sql, max_rows=max_rows)
        assert (result.table.num_rows, result.truncated) == (rows, truncated)
        assert result.columns == [{"name": "i", "type": "BIGINT"}]


def test_no_rows_still_have_columns(runner: SqlRunner) -> None:
    """An empty answer keeps its names and types."""
    result = runner.run("SELECT request_id, arrival_ns FROM request WHERE false")
    assert result.table.schema == pa.schema([("request_id", pa.string()), ("arrival_ns", pa.int64())])
    assert not result.truncated


def test_order_and_ties_of_columns_of_one_name_survive(runner: SqlRunner) -> None:
    """Two columns may have one name."""
    result = runner.run("SELECT 1 AS a, 2 AS a")
    assert result.to_dict()["rows"] == [[1, 2]]


def test_instants_are_utc(runner: SqlRunner) -> None:
    """Whatever the machine's zone."""
    result = runner.run("SELECT make_timestamptz(0) AS t, extract(hour FROM make_timestamptz(0)) AS h")
    assert result.to_dict()["rows"] == [["1970-01-01T00:00:00.000000Z", 0]]


def test_instants_with_a_zone_are_written_inside_the_jail(runner: SqlRunner) -> None:
    """The child writes the JSON where no database of zones can be read; nested ones, nulls and infinities too."""
    sql = (
        "SELECT make_timestamptz(0) AS t, [make_timestamptz(1), NULL] AS l, 'infinity'::TIMESTAMPTZ AS i, "
        "current_timestamp > make_timestamptz(0) AS later, timezone('Asia/Tokyo', make_timestamptz(0)) AS there"
    )
    (row,) = msgspec.json.decode(runner.run_json(sql, SqlData()))["rows"]
    first, second = "1970-01-01T00:00:00.000000Z", "1970-01-01T00:00:00.000001Z"
    assert row == [first, [second, None], None, True, "1970-01-01T09:00:00.000000"]


def test_sums_of_integers_are_exact(runner: SqlRunner) -> None:
    """A sum of large integers goes beyond 64 bits and loses nothing."""
    table = runner.run("SELECT sum(x) AS s FROM (VALUES (9223372036854775807), (9223372036854775807)) t(x)").table
    assert table.to_pylist() == [{"s": Decimal(2 * (2**63 - 1))}]


def test_run_sql_needs_no_runner() -> None:
    """One statement, one child, nothing kept."""
    assert run_sql("SELECT 42 AS answer").table.to_pylist() == [{"answer": 42}]


def test_many_statements_one_after_another_share_nothing(runner: SqlRunner) -> None:
    """Each has a process of its own: what one set up is gone for the next."""
    pids = set()
    for _ in range(3):
        runner.warm()
        spare = runner._spare
        assert spare is not None
        pids.add(spare.process.pid)
        runner.run("SELECT 1")
    assert len(pids) == 3
