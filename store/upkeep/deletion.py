"""Deleting rows and sealed files: in slices between commits, counted in the books, oldest first.

Invariant: rows of a run are deleted only by its name; what is deleted and what the books say change in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb

from engine_probe.events import KINDS

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore

Progress = Callable[[str], None]

SLICE_ROWS: Final = 250_000
_KEPT_FACTS: Final = 20
"""Newest `worker` rows of a worker that stay whatever their age: later questions need its geometry."""
FILES_REMOVED: Final = "files_removed_through_ns"
"""Setting: files of live rows received up to this instant may be gone."""


def delete_through(
    store: DuckDBStore, through_ns: int, removed: dict[str, int], tell: Progress, *, only_sealed: bool
) -> None:
    """Delete live rows received at or before `through_ns`, oldest first, a slice a job."""
    for kind in KINDS:
        limit = through_ns
        if only_sealed:
            sealed = store.books.kinds[kind].sealed_through_ns
            if sealed is None:
                continue
            limit = min(limit, sealed)
        total = 0
        while True:
            count = store.call(partial(_delete_slice, store, kind, limit))
            total += count
            if count < SLICE_ROWS // 2:
                break
        if total:
            removed[kind] = removed.get(kind, 0) + total
            tell(f"deleted {total} {kind} rows")


def _delete_slice(store: DuckDBStore, kind: str, through_ns: int, cursor: duckdb.DuckDBPyConnection) -> int:
    """Delete up to about `SLICE_ROWS` of the oldest live rows received at or before `through_ns`."""
    (edge,) = cursor.execute(
        f'SELECT max(received_ns) FROM (SELECT received_ns FROM "{kind}" WHERE run_id IS NULL AND received_ns <= ? '
        f"LIMIT {SLICE_ROWS})",
        [through_ns],
    ).fetchone() or (None,)
    if edge is None:
        return 0
    condition = "run_id IS NULL AND received_ns <= ?"
    if kind == "worker":
        condition += (
            " AND rowid NOT IN (SELECT rowid FROM worker WHERE run_id IS NULL "
            f"QUALIFY row_number() OVER (PARTITION BY worker ORDER BY at_ns DESC, rowid DESC) <= {_KEPT_FACTS})"
        )
    return delete_rows(store, kind, condition, [edge], cursor)


def delete_rows(
    store: DuckDBStore, kind: str, condition: str, values: list[Any], cursor: duckdb.DuckDBPyConnection
) -> int:
    """Delete rows and count them in the books, in one transaction."""
    cursor.execute("BEGIN")
    (count,) = cursor.execute(f'DELETE FROM "{kind}" WHERE {condition}', values).fetchone() or (0,)
    if count:
        cursor.execute("UPDATE kind_state SET num_removed = num_removed + ? WHERE kind = ?", [count, kind])
    cursor.execute("COMMIT")
    store.books.kinds[kind].num_removed += int(count)
    return int(count)


def delete_files(store: DuckDBStore, condition: str, values: list[Any]) -> int:
    """Delete sealed files and then their rows of the log; a crash in between is made good by the next call."""
    if store.parquet_dir is None:
        return 0
    rows = store.query(
        f"SELECT path, run_id, through_ns FROM seal_log WHERE sealed_ns IS NOT NULL AND {condition}", values
    ).to_pylist()
    for row in rows:
        (store.parquet_dir / row["path"]).unlink(missing_ok=True)
    if rows:
        names = [row["path"] for row in rows]
        through_ns = max((row["through_ns"] for row in rows if row["run_id"] is None), default=None)
        store.call(partial(_forget_files, names, through_ns))
        for name in names:
            _remove_empty_folders(store.parquet_dir / name, store.parquet_dir)
    return len(rows)


def forget_run(store: DuckDBStore, run_id: str, cursor: duckdb.DuckDBPyConnection) -> None:
    """Take a run off the list, unless rows of it came in meanwhile. Runs on the writer's thread, between commits."""
    for kind in KINDS:
        if cursor.execute(f'SELECT 1 FROM "{kind}" WHERE run_id = ? LIMIT 1', [run_id]).fetchone() is not None:
            return
    cursor.execute("DELETE FROM run WHERE run_id = ?", [run_id])
    store.books.runs.discard(run_id)


def _forget_files(names: list[str], through_ns: int | None, cursor: duckdb.DuckDBPyConnection) -> None:
    """Take files out of the log, and note up to when live rows have lost files: from there on `verify` compares."""
    cursor.execute("BEGIN")
    cursor.execute("DELETE FROM seal_log WHERE path IN (SELECT unnest(?))", [names])
    if through_ns is not None:
        known = cursor.execute("SELECT value FROM setting WHERE name = ?", [FILES_REMOVED]).fetchone()
        cursor.execute("DELETE FROM setting WHERE name = ?", [FILES_REMOVED])
        mark = max(through_ns, int(known[0]) if known else through_ns)
        cursor.execute("INSERT INTO setting VALUES (?, ?)", [FILES_REMOVED, str(mark)])
    cursor.execute("COMMIT")


def _remove_empty_folders(path: Path, top: Path) -> None:
    for folder in path.parents:
        if folder == top or any(folder.iterdir()):
            return
        folder.rmdir()
