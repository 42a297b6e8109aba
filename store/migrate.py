"""Numbered SQL migrations, forward only: `migrations/NNNN_what_changed.sql`, each in one transaction with its record.

Invariant: what `schema_migration` names was applied whole, and its text (sha256) has not changed since. A database of a
newer kvscope is refused with SchemaTooNew, never touched.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from engine_probe.errors import SchemaTooNew, StoreError, StoreMisuse

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "migrations"
_FILE_NAME = re.compile(r"(?P<number>\d{4})_(?P<name>[a-z0-9_]+)\.sql")
_RECORD = """CREATE TABLE IF NOT EXISTS schema_migration (
    number INTEGER NOT NULL, name VARCHAR NOT NULL, sha256 VARCHAR NOT NULL, applied_ns BIGINT NOT NULL)"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file."""

    number: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """Digest of the text, hexadecimal."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


def load(folder: Path = FOLDER) -> list[Migration]:
    """The migrations of this release in order; StoreError where the numbering has a hole or a file a wrong name."""
    found = []
    for path in sorted(folder.glob("*.sql")):
        name = _FILE_NAME.fullmatch(path.name)
        if name is None:
            raise StoreError(f"{path.name} is no migration: its name must be NNNN_what_changed.sql.", path=str(path))
        found.append(Migration(int(name["number"]), name["name"], path.read_text(encoding="utf-8")))
    numbers = [migration.number for migration in found]
    if numbers != list(range(1, len(found) + 1)):
        raise StoreError(f"The migrations in {folder} are numbered {numbers}; they must run from 1 without a hole.")
    return found


def applied(connection: duckdb.DuckDBPyConnection) -> list[tuple[int, str, str]]:
    """(number, name, sha256) of what the database has; empty for a fresh one."""
    if "schema_migration" not in _tables(connection):
        return []
    rows = connection.execute("SELECT number, name, sha256 FROM schema_migration ORDER BY number").fetchall()
    return [(int(number), str(name), str(sha256)) for number, name, sha256 in rows]


def pending(connection: duckdb.DuckDBPyConnection, url: str, migrations: Sequence[Migration]) -> list[Migration]:
    """What is still to do. SchemaTooNew; StoreMisuse where it is none of ours; StoreError where a released file changed."""
    done = applied(connection)
    if not done and (strangers := _tables(connection) - {"schema_migration"}):
        raise StoreMisuse(
            f"{url} is a DuckDB database, but not one of kvscope (it holds {', '.join(sorted(strangers)[:3])}). "
            "Give another path with --store.",
            url=url,
        )
    known = {migration.number: migration for migration in migrations}
    newest = max(known, default=0)
    if done and done[-1][0] > newest:
        raise SchemaTooNew(
            f"{url} has schema {done[-1][0]} ({done[-1][1]}), this kvscope knows schemas up to {newest}. "
            "Install the kvscope that wrote it, or a newer one.",
            url=url,
            found=done[-1][0],
            known=newest,
        )
    for number, name, sha256 in done:
        if known[number].sha256 != sha256:
            raise StoreError(
                f"Migration {number:04d}_{name} of {url} is not the file of this kvscope (sha256 {sha256[:12]}... was "
                f"applied, {known[number].sha256[:12]}... is installed). A released migration must stay as it is: "
                "reinstall kvscope.",
                url=url,
                number=number,
            )
    have = {number for number, _, _ in done}
    return [migration for migration in migrations if migration.number not in have]


def migrate(
    connection: duckdb.DuckDBPyConnection, url: str, migrations: Sequence[Migration] | None = None
) -> list[Migration]:
    """Apply what is pending and answer with it. A failing file leaves the database at the number before it."""
    todo = pending(connection, url, load() if migrations is None else migrations)
    for migration in todo:
        connection.execute("BEGIN")
        try:
            connection.execute(_RECORD)
            connection.execute(migration.sql)
            connection.execute(
                "INSERT INTO schema_migration VALUES (?, ?, ?, ?)",
                [migration.number, migration.name, migration.sha256, time.time_ns()],
            )
            connection.execute("COMMIT")
        except duckdb.Error as error:
            connection.execute("ROLLBACK")
            raise StoreError(
                f"Migration {migration.number:04d}_{migration.name} failed on {url} and was undone: {error}. "
                "The database is as it was; keep it and report this.",
                url=url,
                number=migration.number,
            ) from error
        log.info("migration applied", extra={"number": migration.number, "migration": migration.name, "url": url})
    return todo


def _tables(connection: duckdb.DuckDBPyConnection) -> set[str]:
    rows = connection.execute(
        "SELECT table_name FROM duckdb_tables() WHERE database_name = current_database()"
    ).fetchall()
    return {str(name) for (name,) in rows}
