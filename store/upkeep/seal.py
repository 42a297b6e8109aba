"""Sealing: rows that came more than a few minutes ago are written to Parquet files that anybody may read meanwhile.

Files lie in `kind=<kind>/date=<YYYY-MM-DD>/hour=<HH>/`, by the row's `at_ns` in UTC, rows of a run apart from live
ones.

Invariant: every row is in exactly one sealed file once its kind's `sealed_through_ns` has passed its `received_ns`.
    1. On the writer's thread the floor of later rows is raised above the cut, so no row can come in behind it.
    2. The files are named in `seal_log` (sealed_ns null), then written under a temporary name, synced and renamed.
    3. One transaction sets `sealed_ns` and moves `sealed_through_ns`.
A crash in between leaves files that the log names as unfinished; the next open deletes them, and the rows are sealed
again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb
import pyarrow.parquet as pq

from engine_probe.errors import StoreError, StoreMisuse
from engine_probe.events import KINDS
from store.statements import literal

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore

log = logging.getLogger(__name__)

HOUR_NS: Final = 3_600_000_000_000
_HOUR: Final = f"(CASE WHEN at_ns >= 0 THEN at_ns ELSE at_ns::HUGEINT - {HOUR_NS - 1} END // {HOUR_NS})::BIGINT"
"""Hours since 1970, rounded down (`//` rounds towards zero)."""
_BEGINNING: Final = -(2**63) + 1
_ROW_GROUP_ROWS: Final = {"request": 16_384}
"""Rows of a Parquet row group where they are wide; else 122,880."""


@dataclass(frozen=True, slots=True)
class SealReport:
    """What one pass wrote."""

    rows: Mapping[str, int] = field(default_factory=dict)
    num_files: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class _File:
    """One file to be: the hour (since 1970) and run of its rows."""

    path: str
    hour: int
    run_id: str | None
    num_rows: int
    num_bytes: int = 0


def seal(
    store: DuckDBStore,
    *,
    older_than_s: float = 300.0,
    min_rows: int = 0,
    wait_s: float = 3600.0,
    progress: Callable[[str], None] | None = None,
) -> SealReport:
    """Write the rows received more than `older_than_s` ago and not sealed yet; one pass at a time.

    min_rows   a kind with fewer such rows waits for more, until its oldest came `wait_s` before that: a reader opens
               every file, so a pass a minute must not make a file a minute
    Raises StoreError for a store in memory, DiskFull where a file cannot be written; what was finished stays.
    """
    folder = store.parquet_dir
    if folder is None:
        raise StoreMisuse("A store in memory has no folder to seal into. Open a file.", url=store.url)
    through_ns = store.now_ns() - round(older_than_s * 1e9)
    rows: dict[str, int] = {}
    num_files = num_bytes = 0
    with store.upkeep:
        store.fence(through_ns)
        for kind in KINDS:
            files = _seal_kind(store, kind, folder, through_ns, min_rows, round(wait_s * 1e9))
            num_files += len(files)
            num_bytes += sum(file.num_bytes for file in files)
            if files:
                rows[kind] = sum(file.num_rows for file in files)
                if progress is not None:
                    progress(f"sealed {rows[kind]} {kind} rows in {len(files)} files")
    return SealReport(rows, num_files, num_bytes)


def recover(cursor: duckdb.DuckDBPyConnection, folder: Path | None) -> int:
    """Delete what a pass that did not end has left behind; called on opening, before anything is sealed."""
    left = [str(path) for (path,) in cursor.execute("SELECT path FROM seal_log WHERE sealed_ns IS NULL").fetchall()]
    if folder is not None:
        for path in left:
            (folder / path).unlink(missing_ok=True)
            _temporary(folder / path).unlink(missing_ok=True)
    if left:
        cursor.execute("DELETE FROM seal_log WHERE sealed_ns IS NULL")
        log.warning("unfinished Parquet files deleted", extra={"files": len(left)})
    return len(left)


def sealed_files(cursor: duckdb.DuckDBPyConnection, folder: Path) -> dict[str, list[Path]]:
    """Kind -> its sealed files, oldest first."""
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    cursor.execute("SELECT kind, path FROM seal_log WHERE sealed_ns IS NOT NULL ORDER BY seal_id, path")
    for kind, path in cursor.fetchall():
        found.setdefault(kind, []).append(folder / path)
    return found


def _seal_kind(
    store: DuckDBStore, kind: str, folder: Path, through_ns: int, min_rows: int, wait_ns: int
) -> list[_File]:
    after = store.books.kinds[kind].sealed_through_ns
    after_ns = _BEGINNING if after is None else after
    if after_ns >= through_ns:
        return []
    seal_id, files, oldest_ns = _plan(store, kind, after_ns, through_ns)
    if sum(file.num_rows for file in files) < min_rows and oldest_ns > through_ns - wait_ns:
        return []
    if files:
        store.call(lambda cursor: _announce(cursor, seal_id, kind, files, after_ns, through_ns))
    try:
        for file in files:
            with store.reading() as cursor:
                _write(cursor, kind, folder, file, after_ns, through_ns)
    except BaseException:
        store.call(lambda cursor: recover(cursor, folder))
        raise
    store.call(lambda cursor: _finish(cursor, seal_id, kind, files, through_ns, store.now_ns()))
    store.books.kinds[kind].sealed_through_ns = through_ns
    return files


def _plan(store: DuckDBStore, kind: str, after_ns: int, through_ns: int) -> tuple[int, list[_File], int]:
    """Id of the pass, the files to write, and when the oldest of their rows came."""
    with store.reading() as cursor:
        (last,) = cursor.execute("SELECT coalesce(max(seal_id), 0) FROM seal_log").fetchone() or (0,)
        groups = cursor.execute(
            f'SELECT {_HOUR} AS hour, run_id, count(*), min(received_ns) FROM "{kind}" '
            "WHERE received_ns > ? AND received_ns <= ? GROUP BY ALL ORDER BY hour, run_id NULLS FIRST",
            [after_ns, through_ns],
        ).fetchall()
    files = []
    for hour, run_id, count, _ in groups:
        when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
        place = f"kind={kind}/date={when:%Y-%m-%d}/hour={when:%H}"
        files.append(_File(f"{place}/{last + 1:08d}-{secrets.token_hex(4)}.parquet", hour, run_id, count))
    return int(last) + 1, files, min((int(group[3]) for group in groups), default=through_ns)


def _announce(
    cursor: duckdb.DuckDBPyConnection, seal_id: int, kind: str, files: list[_File], after_ns: int, through_ns: int
) -> None:
    for file in files:
        cursor.execute(
            "INSERT INTO seal_log (seal_id, kind, path, run_id, num_rows, after_ns, through_ns) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            [seal_id, kind, file.path, file.run_id, file.num_rows, after_ns, through_ns],
        )


def _write(
    cursor: duckdb.DuckDBPyConnection, kind: str, folder: Path, file: _File, after_ns: int, through_ns: int
) -> None:
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    run = "run_id IS NULL" if file.run_id is None else f"run_id = {literal(file.run_id)}"
    cursor.execute(
        f'COPY (SELECT * FROM "{kind}" WHERE received_ns > {after_ns} AND received_ns <= {through_ns} '
        f"AND at_ns >= {file.hour * HOUR_NS} AND at_ns < {(file.hour + 1) * HOUR_NS} AND {run}) "
        f"TO {literal(str(temporary))} (FORMAT parquet, COMPRESSION zstd, "
        f"ROW_GROUP_SIZE {_ROW_GROUP_ROWS.get(kind, 122_880)})"
    )
    written = pq.read_metadata(temporary).num_rows
    if written != file.num_rows:
        raise StoreError(
            f"Sealing {kind} wrote {written} rows where {file.num_rows} were counted; the file was dropped, the rows "
            "stay in the database. Run `kvscope store verify`.",
            path=str(target),
        )
    _sync(temporary)
    temporary.rename(target)
    _sync(target.parent)
    file.num_bytes = target.stat().st_size


def _finish(
    cursor: duckdb.DuckDBPyConnection, seal_id: int, kind: str, files: list[_File], through_ns: int, now_ns: int
) -> None:
    cursor.execute("BEGIN")
    for file in files:
        cursor.execute(
            "UPDATE seal_log SET num_bytes = ?, sealed_ns = ? WHERE seal_id = ? AND path = ?",
            [file.num_bytes, now_ns, seal_id, file.path],
        )
    cursor.execute("UPDATE kind_state SET sealed_through_ns = ? WHERE kind = ?", [through_ns, kind])
    cursor.execute("COMMIT")


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parquet_bytes(cursor: Any) -> int:
    """Bytes of all sealed files, by the log."""
    (found,) = cursor.execute("SELECT coalesce(sum(num_bytes), 0) FROM seal_log").fetchone()
    return int(found)
