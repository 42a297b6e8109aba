"""Opening: what a store URL may be, and what is said when it cannot be opened."""

from __future__ import annotations

import os
import stat

import duckdb
import pytest

from engine_probe.errors import StoreBusy, StoreError
from store.interface import Window
from store.open import open_store, path_of
from tests.store_rows import batch, numbers, step


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("kvscope.duckdb", "kvscope.duckdb"),
        ("/var/lib/k.db", "/var/lib/k.db"),
        ("duckdb:///k.duckdb", "k.duckdb"),
        ("duckdb:////var/lib/k.duckdb", "/var/lib/k.duckdb"),
        ("duckdb:///:memory:", ":memory:"),
        (":memory:", ":memory:"),
        ("dir with space/k.duckdb", "dir with space/k.duckdb"),
    ],
)
def test_a_url_names_a_path(url, path):
    """Three slashes are relative, four absolute; a bare path is a path."""
    assert path_of(url) == path


@pytest.mark.parametrize(
    "url", ["", "  ", "duckdb:", "duckdb:k.duckdb", "duckdb://host/k", "duckdb:///", "mysql://host/db"]
)
def test_a_url_that_names_no_store_is_refused_in_words(url):
    """The message says what to write instead."""
    with pytest.raises(StoreError, match=r"Give a path|Write duckdb:///"):
        path_of(url)


def test_a_folder_is_no_database(tmp_path):
    """A folder in place of a file."""
    with pytest.raises(StoreError, match=r"is a folder. Give the path of a database file"):
        open_store(str(tmp_path))


def test_a_text_file_is_no_database_and_stays_as_it_is(tmp_path):
    """A file of another sort is named, and not touched."""
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk\n" * 1000)
    with pytest.raises(StoreError, match=r"not a DuckDB database. Give another path"):
        open_store(str(path))
    assert path.read_text() == "remember the milk\n" * 1000


def test_a_missing_folder_is_named(tmp_path):
    """The parent folder does not exist."""
    with pytest.raises(StoreError, match=r"The folder .*nowhere does not exist. Make it"):
        open_store(str(tmp_path / "nowhere" / "k.duckdb"))


@pytest.mark.parametrize("read_only", [True, False])
def test_a_database_that_must_exist_and_does_not(tmp_path, read_only):
    """Reading asks for an existing database, and says how to make one; none is made."""
    path = tmp_path / "k.duckdb"
    with pytest.raises(StoreError, match=r"There is no database at .* `kvscope import PATH`"):
        open_store(str(path), read_only=read_only, must_exist=not read_only)
    assert not path.exists()


def _as_other_user(tmp_path):
    """Skip where permissions do not bind this user."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    return tmp_path


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """A database needs its log beside it, so a read-only folder is refused before anything is tried."""
    folder = tmp_path / "fixed"
    folder.mkdir()
    monkeypatch.setattr("store.database.os.access", lambda path, mode: str(path) != str(folder))
    with pytest.raises(StoreError, match=r"fixed cannot be written, .* Give this user the right"):
        open_store(str(folder / "k.duckdb"))
    assert list(folder.iterdir()) == []


def test_a_file_without_permission_is_named(tmp_path):
    """The operating system's refusal becomes a sentence about the file."""
    path = _as_other_user(tmp_path) / "k.duckdb"
    open_store(str(path)).close()
    path.chmod(0)
    try:
        with pytest.raises(StoreError, match="permission denied"):
            open_store(str(path))
    finally:
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)


@pytest.mark.parametrize("damage", ["header", "middle", "cut"])
def test_a_damaged_database_is_said_to_be_damaged(tmp_path, damage):
    """Flipped and missing bytes are found on opening or on the first read: a StoreError that says what to do."""
    path = tmp_path / "k.duckdb"
    with open_store(str(path)) as store:
        for seq in range(3):
            store.append(batch({"step": [step(n, policy=f"p{n}") for n in range(2000)]}, seq=seq))
        store.checkpoint()
    whole = bytearray(path.read_bytes())
    if damage == "cut":
        del whole[len(whole) // 2 :]
    else:
        start = 0 if damage == "header" else len(whole) // 3
        whole[start : start + 400_000] = b"\xa5" * len(whole[start : start + 400_000])
    path.write_bytes(whole)
    with (
        pytest.raises(StoreError, match=r"damaged|not a DuckDB|failed|another release"),
        open_store(str(path)) as store,
    ):
        store.rows("step", Window())


def test_a_foreign_database_is_not_touched(tmp_path):
    """A DuckDB file of another program is named and left alone."""
    path = tmp_path / "other.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE sales (amount INTEGER)")
    with pytest.raises(StoreError, match=r"not one of kvscope .it holds sales"):
        open_store(str(path))
    with duckdb.connect(str(path)) as connection:
        assert connection.execute("SELECT table_name FROM duckdb_tables()").fetchall() == [("sales",)]


def test_the_same_file_twice_in_one_process_is_busy(tmp_path):
    """A second store on the same file is refused, also by another spelling of its path; after closing it opens."""
    path = tmp_path / "k.duckdb"
    (tmp_path / "x").mkdir()
    with open_store(str(path)):
        with pytest.raises(StoreBusy, match="open in this process already"):
            open_store(f"duckdb:///{tmp_path}/x/../k.duckdb")
        with pytest.raises(StoreBusy):
            open_store(str(path), read_only=True)
    open_store(str(path)).close()


def test_a_store_for_reading_refuses_to_write(tmp_path):
    """Append and upkeep on a read-only store are misuse, said as such; reads work, also of what is still in the log."""
    path = str(tmp_path / "k.duckdb")
    with open_store(path) as store:
        store.append(batch({"step": [step(1)]}, seq=0))
    with open_store(path, read_only=True) as store:
        assert store.is_read_only
        assert numbers(store) == [1]
        assert store.sources()[0].last_seq == 0
        with pytest.raises(StoreError, match=r"for reading only. Open it for writing"):
            store.append(batch({"step": [step(2)]}))
        with pytest.raises(StoreError, match="for reading only"):
            store.checkpoint()


def test_closing_twice_is_harmless_and_use_after_closing_is_told(tmp_path):
    """A second close does nothing; a read afterwards says that the store is closed."""
    store = open_store(str(tmp_path / "k.duckdb"))
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.stats()


def test_views_are_there_again_after_their_text_changed(tmp_path):
    """Views hold no data: a database with other views gets those of this release on the next writing open."""
    path = str(tmp_path / "k.duckdb")
    open_store(path).close()
    with duckdb.connect(path) as connection:
        connection.execute("CREATE OR REPLACE VIEW evidence_batch AS SELECT 1 AS old")
        connection.execute("UPDATE setting SET value = 'older' WHERE name = 'views'")
    with open_store(path) as store:
        assert "scheduler_policy" in store.query("SELECT * FROM evidence_batch").column_names


def test_python_variables_are_no_tables(tmp_path):
    """DuckDB would look for an unknown table among Python's variables; the store has that switched off."""
    secret = open_store(":memory:").query("SELECT 42 AS answer")
    with open_store(str(tmp_path / "k.duckdb")) as store, pytest.raises(StoreError, match="secret"):
        store.query("SELECT * FROM secret")
    assert secret.num_rows == 1
