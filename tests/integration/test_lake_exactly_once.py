"""Two collectors, one catalog on a real PostgreSQL: a batch that reaches both is applied exactly once.

In every round both writers have looked, found the batches new and written their rows before either may commit, so the
catalog alone decides.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pytest

from engine_probe.errors import BatchRejected, StoreBusy, StoreError
from engine_probe.schema import table_from_rows
from store.interface import Batch, BatchId, Window
from store.lake import LakeStore, LakeUrl, extension_path
from store.lake_commit import Committed, LakeCommitter, install

pytestmark = pytest.mark.server

RACES = 1000
ROWS = 2
T0 = 1_764_000_000 * 10**9


def batch(seq: int, source: str = "probe") -> Batch:
    """Two marks that carry the batch's number; every tenth batch has a step as well."""
    marks = [{"mark": "fault", "at_ns": T0 + seq, "subject": source, "text": f"{seq}/{i}"} for i in range(ROWS)]
    tables = {"mark": table_from_rows("mark", marks)}
    if seq % 10 == 0:
        tables["step"] = table_from_rows("step", [{"step": seq, "at_ns": T0 + seq}])
    return Batch(tables, BatchId(source, "epoch", seq), received_ns=T0)


@pytest.fixture
def url(postgres_database: str, tmp_path: Path) -> str:
    """A lake of its own."""
    return f"ducklake:postgres:{postgres_database}?data_path={tmp_path / 'data'}"


@pytest.fixture
def writers(url: str) -> Iterator[tuple[LakeStore, LakeStore]]:
    """Two collectors: two DuckDB instances on one catalog."""
    with LakeStore(url) as first, LakeStore(url) as second:
        yield first, second


@dataclass
class Report:
    """What one writer lived through."""

    applied: int = 0
    duplicates: int = 0
    refused: int = 0
    retried: int = 0
    errors: list[BaseException] = field(default_factory=list)

    def add(self, done: Committed) -> None:
        self.applied += len(done.applied)
        self.duplicates += len(done.duplicates)
        self.refused += done.refused
        self.retried += done.retried


def race(writers: Sequence[LakeStore], offers: Sequence[Sequence[Sequence[Batch]]]) -> list[Report]:
    """Each writer commits its list of commits, round by round; in each round no one commits before all have written."""
    barrier = threading.Barrier(len(writers), timeout=120)
    reports = [Report() for _ in writers]

    def compete(writer: LakeStore, commits: Sequence[Sequence[Batch]], report: Report) -> None:
        write, first = writer._committer.write, [True]

        def write_then_wait(batches: Sequence[Batch]) -> None:
            write(batches)
            if first[0]:
                first[0] = False
                barrier.wait()

        writer._committer.write = write_then_wait
        try:
            for commit in commits:
                first[0] = True
                report.add(writer.commit(commit, timeout_s=120))
                barrier.wait()
        except BaseException as error:
            report.errors.append(error)
            barrier.abort()
        finally:
            writer._committer.write = write

    threads = [threading.Thread(target=compete, args=args) for args in zip(writers, offers, reports, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for report in reports:
        assert report.errors == []
    return reports


def check_each_once(url: str, num_batches: int, source: str = "probe") -> None:
    """A third collector sees every row of every batch once, and the catalog every identity once."""
    with LakeStore(url) as store:
        found = store.query(
            "SELECT text, count(*) AS n FROM mark WHERE subject = ? GROUP BY text", [source]
        ).to_pylist()
        assert {row["text"]: row["n"] for row in found} == {
            f"{seq}/{i}": 1 for seq in range(num_batches) for i in range(ROWS)
        }
        steps = store.rows("step", Window(), ["step"], order_by="step").column("step").to_pylist()
        assert steps == list(range(0, num_batches, 10))
    with psycopg.connect(LakeUrl.parse(url).dsn) as catalog:
        rows = catalog.execute("SELECT seq, snapshot_id FROM kvscope_batch WHERE source = %s ORDER BY seq", [source])
        assert [seq for seq, _ in rows.fetchall()] == list(range(num_batches))


@pytest.mark.timeout(900)
def test_a_batch_raced_by_two_writers_is_applied_once_a_thousand_times(
    url: str, writers: tuple[LakeStore, LakeStore], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """No row is lost, none doubled; every race has one winner, and the loser was undone by the catalog."""
    races = [[batch(seq)] for seq in range(RACES)]
    first, second = race(writers, [races, races])
    check_each_once(url, RACES)
    assert first.applied + second.applied == RACES
    assert first.duplicates + second.duplicates == RACES
    assert first.refused + first.retried + second.refused + second.retried >= RACES
    assert first.refused + second.refused > 0
    record_property("refused", first.refused + second.refused)
    record_property("retried", first.retried + second.retried)
    print(f"{RACES} races: {first}, {second}")
    with psycopg.connect(LakeUrl.parse(url).dsn) as catalog:
        (named,) = catalog.execute("SELECT count(*) FROM ducklake_data_file").fetchone() or (0,)
    assert len(list((tmp_path / "data").rglob("*.parquet"))) == named  # an undone commit leaves no file behind


def test_commits_of_several_batches_are_raced_the_same_way(url: str, writers: tuple[LakeStore, LakeStore]) -> None:
    """Twenty commits of five batches: all five are the winner's, or none."""
    races = [[batch(seq) for seq in range(start, start + 5)] for start in range(0, 100, 5)]
    first, second = race(writers, [races, races])
    check_each_once(url, 100)
    assert (first.applied + second.applied, first.duplicates + second.duplicates) == (100, 100)
    assert first.applied % 5 == 0


def test_a_refused_commit_is_stripped_and_keeps_what_is_new(url: str, writers: tuple[LakeStore, LakeStore]) -> None:
    """Commits that overlap in part: the loser's other batches are applied by its next try."""
    ahead = [[batch(6 * i + j) for j in (0, 1, 2, 3)] for i in range(8)]
    behind = [[batch(6 * i + j) for j in (2, 3, 4, 5)] for i in range(8)]
    first, second = race(writers, [ahead, behind])
    check_each_once(url, 48)
    assert first.applied + second.applied == 48
    assert first.duplicates + second.duplicates == 16


def test_commits_that_share_nothing_both_succeed(url: str, writers: tuple[LakeStore, LakeStore]) -> None:
    """They compete for the snapshot id only: DuckLake retries within, nobody is refused."""
    first, second = race(writers, [[[batch(2 * i)] for i in range(8)], [[batch(2 * i + 1)] for i in range(8)]])
    check_each_once(url, 16)
    assert (first.applied, second.applied, first.refused, second.refused) == (8, 8, 0, 0)


def test_names_with_the_words_that_ducklake_retries_on_end_in_the_same_answer(
    url: str, writers: tuple[LakeStore, LakeStore]
) -> None:
    """A source called after DuckLake's retry words costs retries, not correctness."""
    source = "unique primary key, concurrent conflict: 'ö'"
    rounds = [[batch(seq, source)] for seq in range(3)]
    first, second = race(writers, [rounds, rounds])
    check_each_once(url, 3, source)
    assert (first.applied + second.applied, first.duplicates + second.duplicates) == (3, 3)


def test_rows_that_stay_in_the_catalog_are_applied_once_too(url: str) -> None:
    """Small commits kept inline in PostgreSQL rather than in a Parquet file."""
    with LakeStore(url, inline_rows=100) as first, LakeStore(url, inline_rows=100) as second:
        rounds = [[batch(seq)] for seq in range(4)]
        race([first, second], [rounds, rounds])
    check_each_once(url, 4)


def test_the_same_batch_twice_in_one_commit_is_applied_once(url: str) -> None:
    """The second one is a duplicate."""
    with LakeStore(url) as store:
        receipts = store.append_all([batch(0), batch(0), batch(1)])
        assert [receipt.duplicate for receipt in receipts] == [False, True, False]
        assert [dict(receipt.accepted) for receipt in receipts][1] == {"mark": 0, "step": 0}
    check_each_once(url, 2)


class LosesAnswers:
    """A connection that commits and then reports a lost connection, once."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self.lost = 0

    def execute(self, sql: str, parameters: Any = None) -> Any:
        answer = self._connection.execute(sql, parameters)
        if sql == "COMMIT" and not self.lost:
            self.lost += 1
            raise duckdb.IOException("server closed the connection unexpectedly")
        return answer


def test_a_commit_whose_answer_was_lost_is_known_as_ones_own(url: str) -> None:
    """The connection breaks after the catalog committed: found by the attempt's id, not applied again, no duplicate."""
    with LakeStore(url) as store:
        loses = LosesAnswers(store._connection)
        store._committer.connection = loses  # type: ignore[assignment]
        done = store.commit([batch(0)])
        assert loses.lost == 1
        assert (done.applied, done.duplicates, done.tries) == ((0,), (), 1)
        assert done.snapshot_id is not None
    check_each_once(url, 1)


WRITER = """
import sys
from store.lake import LakeStore
from tests.integration.test_lake_exactly_once import batch
with LakeStore(sys.argv[1]) as store:
    for seq in range(1000):
        store.append(batch(seq))
        print(seq, flush=True)
"""


def test_a_collector_killed_in_mid_commit_loses_and_doubles_nothing(url: str) -> None:
    """SIGKILL at a random moment; another collector is sent the same batches again."""
    LakeStore(url).close()
    chance = random.Random(7)
    acknowledged = -1
    for _ in range(3):
        root = Path(__file__).parents[2]
        writer = subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True, cwd=root)
        assert writer.stdout is not None
        for _ in range(3):
            line = writer.stdout.readline()
            assert line, "the writer ended by itself"
            acknowledged = max(acknowledged, int(line))
        try:
            writer.wait(chance.uniform(0.0, 0.3))
        except subprocess.TimeoutExpired:
            writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate()
        acknowledged = max([acknowledged, *map(int, rest.split())])
    with LakeStore(url) as store:
        receipts = store.append_all([batch(seq) for seq in range(acknowledged + 5)])
    assert all(receipt.duplicate for receipt in receipts[: acknowledged + 1])
    check_each_once(url, acknowledged + 5)


def test_two_collectors_that_start_together_make_one_lake(url: str) -> None:
    """Tables and trigger are made once, whoever comes first."""
    stores: list[LakeStore] = []
    threads = [threading.Thread(target=lambda: stores.append(LakeStore(url))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 3
    for i, store in enumerate(stores):
        assert not store.append(batch(i)).duplicate
        store.close()
    check_each_once(url, 3)


def test_installing_again_changes_nothing(url: str) -> None:
    """The trigger and its table survive, identities too."""
    with LakeStore(url) as store:
        store.append(batch(0))
        with psycopg.connect(LakeUrl.parse(url).dsn, autocommit=True) as catalog:
            install(catalog)
        assert store.append(batch(0)).duplicate


def test_a_commit_of_another_program_is_left_alone(url: str) -> None:
    """Extra info that is not ours, or none, is no matter of the trigger's."""
    with LakeStore(url) as store:
        connection = store._connection
        for said in ("NULL", "'kvscope2:zz'", "'{\"x\": 1}'"):
            connection.execute("BEGIN")
            connection.execute(f"CALL lake.set_commit_message('someone', 'else', extra_info => {said})")
            connection.execute("INSERT INTO step (step, at_ns, source, received_ns) VALUES (0, 0, 'x', 0)")
            connection.execute("COMMIT")
        assert store.query("SELECT count(*) AS n FROM step").to_pylist() == [{"n": 3}]


def test_a_catalog_that_takes_no_commit_is_busy_after_the_time(url: str) -> None:
    """The rows are not kept, the number stays free, and the message says what to do."""
    with LakeStore(url) as store:
        store._connection.execute("SET ducklake_max_retry_count = 0")
        with psycopg.connect(LakeUrl.parse(url).dsn) as catalog:
            catalog.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ "
                "BEGIN RAISE EXCEPTION 'could not serialize access'; END $$"
            )
            catalog.execute("CREATE TRIGGER refuse BEFORE INSERT ON ducklake_snapshot EXECUTE FUNCTION refuse()")
        with pytest.raises(StoreBusy, match="send the batches again under the same identities"):
            store.append(batch(0), timeout_s=0.5)
        with psycopg.connect(LakeUrl.parse(url).dsn) as catalog:
            catalog.execute("DROP TRIGGER refuse ON ducklake_snapshot")
        assert not store.append(batch(0)).duplicate
    check_each_once(url, 1)


def test_an_error_that_time_does_not_heal_is_told_at_once(url: str) -> None:
    """One try, and the catalog's own words."""
    with LakeStore(url) as store:
        with psycopg.connect(LakeUrl.parse(url).dsn) as catalog:
            catalog.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ "
                "BEGIN RAISE EXCEPTION 'this catalog is read only today'; END $$"
            )
            catalog.execute("CREATE TRIGGER refuse BEFORE INSERT ON ducklake_snapshot EXECUTE FUNCTION refuse()")
        with pytest.raises(StoreError, match="read only today"):
            store.append(batch(0))
        assert store.rows("mark", Window()).num_rows == 0


def test_what_the_spike_does_not_have_is_named(url: str) -> None:
    """No half answer: a StoreError that says what is absent and what to use."""
    with LakeStore(url) as store:
        for verb in (store.sources, store.verify):
            with pytest.raises(StoreError, match=r"The lake does not have .* yet\. Use a DuckDB store") as absent:
                verb()
            assert absent.value.absent


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("ducklake:sqlite:x", "is no lake URL"),
        ("ducklake:postgres:", "is no lake URL"),
        ("ducklake:postgres:host=127.0.0.1 port=1 dbname=x password=secret", "cannot be reached"),
    ],
)
def test_a_lake_that_cannot_be_opened_is_explained_without_its_password(bad: str, said: str) -> None:
    """StoreError, next step, no secret."""
    with pytest.raises(StoreError, match=said) as error:
        LakeStore(bad)
    assert "secret" not in error.value.message


def test_a_source_with_a_nul_is_rejected(url: str) -> None:
    """PostgreSQL's text cannot hold it; said before anything is written."""
    with LakeStore(url) as store, pytest.raises(BatchRejected, match="NUL"):
        store.append(batch(0, "a\0b"))


def test_the_extensions_come_from_their_wheels() -> None:
    """Nothing is downloaded: the files lie in the environment, made for this DuckDB."""
    for name in ("ducklake", "postgres_scanner"):
        assert extension_path(name).parts[-2:] == (f"v{duckdb.__version__}", f"{name}.duckdb_extension")
    with pytest.raises(StoreError, match="not installed"):
        extension_path("no_such_extension")


def test_committer_needs_only_its_parts(url: str) -> None:
    """It works on any connection that has the lake attached, with any way to write the rows."""
    with LakeStore(url) as store, psycopg.connect(LakeUrl.parse(url).dsn, autocommit=True) as catalog:
        written: list[int] = []

        def write(batches: Sequence[Batch]) -> None:
            written.append(len(batches))
            store._insert(batches)

        done = LakeCommitter(store._connection, catalog, write).commit([batch(0), batch(1)])
        assert (done.applied, written) == ((0, 1), [2])
