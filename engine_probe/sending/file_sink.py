"""Rows into files that any Parquet or JSON reader opens, and that `kvscope import` takes back.

Parquet: `PATH/kind=request/part-<time>-<n>.parquet`. Rows are held until a part has enough of them or is old enough,
since a file a flush would be tens of thousands of files an hour; a part appears whole or not at all (written aside,
synced, renamed). NDJSON: one growing file of whole lines, written at every call, so that it can be followed.
Invariant: a reader never sees half a Parquet file; where the disk takes them, held rows are fewer than `part_rows` a
kind and, as long as `write` is called, not older than `part_age_s`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine_probe.errors import DiskFull, KvscopeError, ProbeError

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
_CHUNK = 1 << 20


class FileSink:
    """Writes under a folder (or, for NDJSON, into the file that `path` names by its ending .ndjson or .jsonl).

    part_rows, part_age_s   a Parquet part is finished at so many rows of its kind, or when its oldest row is so old
    """

    def __init__(
        self,
        path: str | Path,
        format: Literal["parquet", "ndjson"] = "parquet",
        *,
        part_rows: int = 100_000,
        part_age_s: float = 10.0,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if format not in ("parquet", "ndjson"):
            raise ProbeError(f"a file sink writes parquet or ndjson, not {format!r}", format=format)
        self._root = Path(path)
        self._format = format
        self._part_rows = part_rows
        self._part_age_s = part_age_s
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._held: dict[str, list[pa.Table]] = {}
        self._since: dict[str, float] = {}
        self._num_parts = 0
        self._closed = False
        lines = format == "ndjson"
        self._lines = (
            self._root if lines and self._root.suffix in (".ndjson", ".jsonl") else self._root / "events.ndjson"
        )
        self._make(self._lines.parent if lines else self._root)
        if lines:
            self._cut_torn_line()

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Take rows; they are in a file at once (NDJSON) or with their part (Parquet).

        Raises DiskFull or ProbeError where no more can be taken; nothing of `tables` is taken then. A Parquet part
        that cannot be written is tried again at the next call, and only a second one's worth of rows is refused.
        """
        with self._lock:
            if self._closed:
                raise ProbeError(f"the file sink {self._root} is closed", path=str(self._root))
            filled = {kind: table for kind, table in tables.items() if table.num_rows}
            if self._format == "ndjson":
                self._append(filled)
                return
            now = self._monotonic_s()
            for kind in filled:
                if self._num_held(kind) >= self._part_rows:
                    self._finish(kind)
            for kind, table in filled.items():
                self._held.setdefault(kind, []).append(table)
                self._since.setdefault(kind, now)
            for kind in list(self._held):
                if self._num_held(kind) >= self._part_rows or now - self._since[kind] >= self._part_age_s:
                    self._try_to_finish(kind)

    def close(self) -> None:
        """Finish every part. Raises DiskFull or ProbeError where one cannot be written; it may be tried again."""
        with self._lock:
            for kind in list(self._held):
                self._finish(kind)
            self._closed = True

    def _num_held(self, kind: str) -> int:
        return sum(table.num_rows for table in self._held.get(kind, ()))

    def _try_to_finish(self, kind: str) -> None:
        try:
            self._finish(kind)
        except KvscopeError as error:
            log.warning("part not written, rows are held", extra={"kind": kind, "error": error.message})

    def _finish(self, kind: str) -> None:
        """Write the part of one kind aside and rename it into place."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.concat_tables(self._held[kind])
        folder = self._root / f"kind={kind}"
        name = f"part-{time.time_ns()}-{os.getpid()}-{self._num_parts:06d}.parquet"
        aside = folder / f".{name}.tmp"
        self._make(folder)
        try:
            with aside.open("wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            aside.replace(folder / name)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise _cannot_write(folder / name, error) from error
        self._num_parts += 1
        del self._held[kind], self._since[kind]

    def _append(self, tables: Mapping[str, pa.Table]) -> None:
        from engine_probe.wire.codec import encode_ndjson

        body = encode_ndjson(tables)
        try:
            with self._lines.open("ab", buffering=0) as file:
                before = file.tell()
                try:
                    rest = memoryview(body)
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    # Half a batch would be read as whole rows and a torn one.
                    os.ftruncate(file.fileno(), before)
                    raise
        except OSError as error:
            raise _cannot_write(self._lines, error) from error

    def _cut_torn_line(self) -> None:
        """A process that was killed may have left half a line: whole lines go on after the last whole one."""
        if not self._lines.exists():
            return
        with self._lines.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - _CHUNK)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    file.truncate(start + newline + 1)
                    return
                end = start
            file.truncate(0)

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(folder, error) from error


def _cannot_write(path: Path, error: OSError) -> KvscopeError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"no space is left to write {path}; free some, or write elsewhere", path=str(path))
    return ProbeError(
        f"{path} cannot be written: {error.strerror or error}; check the path and its rights", path=str(path)
    )
