"""`backup`: a consistent copy of the database and its sealed files while the store goes on; it opens as a store.

Invariant: the copy is one snapshot, its rows are counted before it gets its name, and it never overwrites a file.
Sealed files never change, so they are linked where the disk is the same and copied where it is not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from engine_probe.errors import StoreError, StoreMisuse
from engine_probe.events import KINDS
from store.border import border
from store.statements import literal
from store.upkeep.seal import sealed_files
from store.views import install_views

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore


@dataclass(frozen=True, slots=True)
class BackupReport:
    """What the copy holds; `num_bytes` of database and files together."""

    path: str
    num_bytes: int
    rows: Mapping[str, int]
    num_files: int


def backup(store: DuckDBStore, path: Path, progress: Callable[[str], None] | None = None) -> BackupReport:
    """Copy the database to `path`, its sealed files to the folder beside it.

    Raises StoreMisuse where one of them exists or their folder does not, DiskFull where the copy does not fit.
    """
    if not path.name:
        raise StoreMisuse(f"{str(path)!r} is no path of a file to make. Give one, such as copy.duckdb.", path=str(path))
    folder = path.with_name(f"{path.stem}.parquet")
    for place in (path, folder):
        if place.exists():
            raise StoreMisuse(
                f"{place} exists already. Give a path where nothing is, or move it away.", path=str(place)
            )
    if not path.parent.is_dir():
        raise StoreMisuse(f"The folder {path.parent} does not exist. Make it, or give another path.", path=str(path))
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with border(str(path)), store.upkeep:
            with store.reading() as cursor, border(str(path)):  # what fails now fails at the copy
                counts = _copy(cursor, temporary, progress or (lambda _: None))
            with closing(duckdb.connect(str(temporary))) as copy:
                install_views(copy)
                sizes = [] if store.parquet_dir is None else _copy_files(copy, store.parquet_dir, folder)
            _sync(temporary)
            temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        temporary.with_name(temporary.name + ".wal").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return BackupReport(str(path), path.stat().st_size + sum(sizes), counts, len(sizes))


def _copy(cursor: duckdb.DuckDBPyConnection, target: Path, tell: Callable[[str], None]) -> dict[str, int]:
    """Copy every table in one transaction; what was counted in the snapshot must be in the copy."""
    (name,) = cursor.execute("SELECT current_database()").fetchone() or ("",)
    cursor.execute(f"ATTACH {literal(str(target))} AS backup_copy")
    try:
        cursor.execute("BEGIN")
        try:
            expected = _counts(cursor, name)
            tell(f"copying {sum(expected.values())} rows")
            tables = cursor.execute(
                "SELECT table_name, sql FROM duckdb_tables() WHERE database_name = ? ORDER BY table_oid", [name]
            ).fetchall()
            for table, sql in tables:
                cursor.execute(_into_copy(sql, table))
                cursor.execute(f'INSERT INTO backup_copy.main."{table}" SELECT * FROM "{name}".main."{table}"')
            cursor.execute("DELETE FROM backup_copy.main.setting WHERE name = 'views'")
            if (found := _counts(cursor, "backup_copy")) != expected:
                raise StoreError(f"The copy has {found} rows, the store {expected}; it was dropped. Try again.")
            cursor.execute("COMMIT")
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
    finally:
        cursor.execute("DETACH backup_copy")
    return expected


def _copy_files(copy: duckdb.DuckDBPyConnection, source: Path, target: Path) -> list[int]:
    """Link or copy every sealed file that the copy's log names; their sizes."""
    sizes = []
    for paths in sealed_files(copy, source).values():
        for path in paths:
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except OSError:
                shutil.copyfile(path, place)
                _sync(place)
            sizes.append(place.stat().st_size)
    return sizes


def _into_copy(sql: str, table: str) -> str:
    """The table's `CREATE TABLE` text, pointed at the copy."""
    head, body = sql.split("(", 1)
    if not head.startswith("CREATE TABLE "):
        raise StoreError(f"The table {table} cannot be copied: {sql[:80]}")
    return f'CREATE TABLE backup_copy.main."{table}"({body}'


def _counts(cursor: duckdb.DuckDBPyConnection, database: str) -> dict[str, int]:
    parts = [f'SELECT \'{kind}\', count(*) FROM "{database}".main."{kind}"' for kind in KINDS]
    return {str(kind): int(count) for kind, count in cursor.execute(" UNION ALL ".join(parts)).fetchall()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
