"""Migrations: in order, each whole or not at all, never changed, never backwards."""

from __future__ import annotations

import duckdb
import pytest

from engine_probe.errors import SchemaTooNew, StoreError
from store.migrate import Migration, applied, load, migrate
from store.open import open_store

FIRST = Migration(1, "first", "CREATE TABLE a (x INTEGER);")
SECOND = Migration(2, "second", "ALTER TABLE a ADD COLUMN y INTEGER; INSERT INTO a VALUES (1, 2);")
BROKEN = Migration(2, "broken", "CREATE TABLE b (x INTEGER); INSERT INTO nowhere VALUES (1);")


@pytest.fixture
def connection():
    """An empty DuckDB in memory."""
    with duckdb.connect() as opened:
        yield opened


def test_each_is_applied_once_and_in_order(connection):
    """Two of two, then nothing; the record keeps number, name and digest."""
    assert migrate(connection, "db", [FIRST, SECOND]) == [FIRST, SECOND]
    assert migrate(connection, "db", [FIRST, SECOND]) == []
    assert applied(connection) == [(1, "first", FIRST.sha256), (2, "second", SECOND.sha256)]
    assert connection.execute("SELECT * FROM a").fetchall() == [(1, 2)]


def test_an_older_database_gets_what_it_lacks(connection):
    """Only the second is applied to a database that has the first."""
    migrate(connection, "db", [FIRST])
    assert migrate(connection, "db", [FIRST, SECOND]) == [SECOND]


def test_a_failing_migration_leaves_nothing_behind(connection):
    """Its table is gone and it is not recorded; the one before stays, and a corrected file goes on from there."""
    with pytest.raises(StoreError, match=r"0002_broken failed on db and was undone"):
        migrate(connection, "db", [FIRST, BROKEN])
    assert [number for number, _, _ in applied(connection)] == [1]
    assert connection.execute("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'b'").fetchone() == (0,)
    assert migrate(connection, "db", [FIRST, SECOND]) == [SECOND]


def test_a_newer_database_is_refused_with_both_numbers(connection):
    """Schema 2 under a release that knows 1: SchemaTooNew, and nothing is done."""
    migrate(connection, "db", [FIRST, SECOND])
    with pytest.raises(SchemaTooNew, match=r"has schema 2 .second., this kvscope knows schemas up to 1") as refused:
        migrate(connection, "db", [FIRST])
    assert (refused.value.found, refused.value.known) == (2, 1)


def test_a_changed_released_file_is_refused(connection):
    """The digest on record differs from the file: the message names the migration and both digests."""
    migrate(connection, "db", [FIRST])
    changed = Migration(1, "first", FIRST.sql + " -- edited")
    with pytest.raises(StoreError, match=f"0001_first .*{FIRST.sha256[:12]}.*{changed.sha256[:12]}"):
        migrate(connection, "db", [changed])


@pytest.mark.parametrize("names", [["0002_b.sql"], ["0001_a.sql", "0003_c.sql"]])
def test_a_hole_in_the_numbers_is_refused(tmp_path, names):
    """Numbers run from 1 without a hole."""
    for name in names:
        (tmp_path / name).write_text("SELECT 1;")
    with pytest.raises(StoreError, match="without a hole"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["1_a.sql", "0001-a.sql", "0001_A.sql"])
def test_a_wrong_name_is_refused(tmp_path, name):
    """The name of a file must be NNNN_what_changed.sql."""
    (tmp_path / name).write_text("SELECT 1;")
    with pytest.raises(StoreError, match="NNNN_what_changed"):
        load(tmp_path)


def test_opening_a_newer_store_says_so_and_lets_go_of_the_file(tmp_path):
    """A store whose record names a later migration is refused, and the file is free for the newer release."""
    path = str(tmp_path / "k.duckdb")
    open_store(path).close()
    with duckdb.connect(path) as connection:
        connection.execute("INSERT INTO schema_migration VALUES (9999, 'from_the_future', 'x', 0)")
    for read_only in (True, False):
        with pytest.raises(SchemaTooNew, match="9999"):
            open_store(path, read_only=read_only)
    with duckdb.connect(path) as connection:
        assert connection.execute("SELECT max(number) FROM schema_migration").fetchone() == (9999,)


def test_an_older_store_opened_for_reading_asks_for_migrate(tmp_path, monkeypatch):
    """Reading never changes a file, so an older schema is refused with the command that brings it up to date."""
    path = str(tmp_path / "k.duckdb")
    open_store(path).close()
    more = [*load(), Migration(len(load()) + 1, "next", "CREATE TABLE later (x INTEGER);")]
    monkeypatch.setattr("store.duckdb_store.load", lambda: more)
    with pytest.raises(StoreError, match="kvscope store migrate"):
        open_store(path, read_only=True)
