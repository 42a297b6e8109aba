"""One DuckDB instance in this process: opened with our settings, held alone, opened again when DuckDB gives it up.

Invariant: at most one `Database` of a file in this process, and DuckDB's file lock keeps other processes out. A failed
checkpoint invalidates DuckDB's whole instance (1.5); `revive` opens the file again, for reading only where it cannot be
written, so that reads go on when the disk is full.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final

import duckdb

from engine_probe.errors import DiskFull, StoreBusy, StoreError, StoreMisuse
from store.border import border, no_database, opening_error
from store.deadline import Deadline
from store.readers import Readers

MEMORY: Final = ":memory:"
CHECKPOINT_THRESHOLD: Final = "1200MB"
"""Log at which DuckDB makes a checkpoint inside a commit. The writer makes them before, between commits."""
VACUUM_TASKS: Final = 1
"""Runs of row groups that a checkpoint may rewrite as one: row groups of a few rows become fewer over time. DuckDB would
rewrite a hundred runs at once (1.5), which held commits up for many seconds and let the file grow to twice its size."""
STORAGE_VERSION: Final = "v1.5.0"
"""Format of new database files: any DuckDB from 1.5.0 on reads it, and it compresses in less time than older ones."""
_HEADROOM_BYTES: Final = 32 << 20
_READS_END_S: Final = 5.0

_open_files: set[Path] = set()
_open_files_lock = Lock()


class Database:
    """The file at `path` (or memory), with a small pool of reading cursors behind a semaphore."""

    def __init__(
        self,
        path: str,
        *,
        read_only: bool,
        num_readers: int,
        memory_limit_bytes: int | None,
        read_wait_s: float = 60.0,
        max_threads: int | None = None,
    ) -> None:
        self.url = path
        self.path = None if path == MEMORY else Path(path).resolve()
        self.read_only = read_only
        self._config: dict[str, str | bool | int | float | list[str]] = {
            "checkpoint_threshold": CHECKPOINT_THRESHOLD,
            "max_vacuum_tasks": str(VACUUM_TASKS),
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
            "storage_compatibility_version": STORAGE_VERSION,
            "threads": "1",
        }
        if memory_limit_bytes is not None:
            self._config["memory_limit"] = f"{memory_limit_bytes}B"
        self.readers = Readers(path, num_readers, read_wait_s)
        self._guard = self.readers.guard
        self._idle: list[duckdb.DuckDBPyConnection] = []
        self._most_threads = max_threads or _cores()
        self._threads = 1
        self._sharing = 0
        self._claim()
        try:
            self._connection: duckdb.DuckDBPyConnection | None = self._connect(read_only)
        except BaseException:
            self._release()
            raise
        self.degraded = False

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A new cursor of the instance, for the writer or a long read of its own."""
        if self._connection is None:
            raise StoreError(f"The store {self.url} is closed. Open it again.", url=self.url)
        cursor = self._connection.cursor()
        # A setting of the cursor alone; else DuckDB draws a bar on stdout when a query takes some seconds.
        cursor.execute("SET enable_progress_bar = false")
        return cursor

    @contextmanager
    def reading(
        self, *, in_background: bool = False, alone: bool = False, deadline: Deadline | None = None
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor for one read. Few run at once, so commits stay quick. Raises what `Readers.read` does."""
        owner = None

        def take() -> duckdb.DuckDBPyConnection:
            nonlocal owner
            owner = self._connection
            cursor = self._idle.pop() if self._idle else self.cursor()
            wanted = max(1, self._most_threads // 2) if self._sharing else self._most_threads
            if wanted > self._threads or not self.is_read:  # taking threads away waits for what they do
                self._use_threads(cursor, wanted)
            return cursor

        def give(cursor: duckdb.DuckDBPyConnection, ended_well: bool) -> None:
            if ended_well and owner is self._connection and owner is not None:
                self._idle.append(cursor)
            else:  # after an error it may still hold what it was at
                cursor.close()

        read = self.readers.read(take, give, in_background=in_background, alone=alone, deadline=deadline)
        with read as cursor, border(self.url):
            yield cursor

    @property
    def is_read(self) -> bool:
        """Somebody reads right now."""
        return bool(self.readers.inside)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Meanwhile a read takes half of the cores, because its caller reads several things at once.

        DuckDB's Python binding waits for its worker threads in a busy loop that takes the GIL (1.5): two reads at once on
        two cores are done sooner on one thread each than on two, and what else the caller does is not held up.
        """
        with self._guard:
            self._sharing += 1
        try:
            yield
        finally:
            with self._guard:
                self._sharing -= 1

    def calm(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Before a commit: work on the caller's thread alone where nobody reads.

        DuckDB's Python binding waits for its worker threads in a busy loop that takes the GIL (1.5), so a small insert
        on several threads costs about twice the CPU of one on a single thread, and gains nothing.
        """
        with self._guard:
            if not self.is_read:
                self._use_threads(cursor, 1)

    def revive(self) -> None:
        """Open the file again after DuckDB invalidated its instance, for reading only where writing fails.

        Waits for the reads that run, since the old instance lives as long as one of its cursors; they fail soon anyway.
        """
        ending = self.readers.sent_out(None, grace_s=_READS_END_S, within_s=_READS_END_S)
        with ending, self._guard:
            self._drop()
            try:
                self._connection, self.degraded = self._connect(read_only=False), False
            except StoreError:
                self._connection, self.degraded = self._connect(read_only=True), True

    @contextmanager
    def room(self, need: str, *, of_all: bool, grace_s: float = 0.0) -> Iterator[None]:
        """Meanwhile the writer has what those hold who read in the background, or all who read: after `grace_s` they are interrupted.

        need   why, as they are told: "a commit needed its memory"
        """
        why = f"A read of {self.url} was ended, because {need}. Ask for a smaller window, or again later."
        with self.readers.sent_out(why, only_background=not of_all, grace_s=grace_s, within_s=_READS_END_S):
            yield

    def close(self) -> None:
        """Let go of the file."""
        with self._guard:
            if self._connection is not None:
                self._drop()
                self._release()

    def file_bytes(self) -> int:
        """Bytes of the database file and its log on disk."""
        return sum(_size(path) for path in self._files())

    def log_bytes(self) -> int:
        """Bytes of the write-ahead log."""
        return 0 if self.path is None else _size(_log_of(self.path))

    def require_space(self, num_bytes: int) -> None:
        """DiskFull where a commit of `num_bytes`, and the checkpoint that may follow, could run out of disk."""
        if self.path is None:
            return
        free = shutil.disk_usage(self.path.parent).free
        needed = 2 * num_bytes + self.log_bytes() + _HEADROOM_BYTES
        if free < needed:
            raise DiskFull(
                f"The disk of {self.url} has {free / 1e6:.0f} MB free; the next commit may need {needed / 1e6:.0f} MB. "
                "Nothing was written, reads go on. Free space or run `kvscope store prune`; senders keep batches.",
                url=self.url,
                free_bytes=free,
                needed_bytes=needed,
            )

    def _use_threads(self, cursor: duckdb.DuckDBPyConnection, count: int) -> None:
        if count != self._threads:
            cursor.execute(f"SET threads = {count}")
            self._threads = count

    def _files(self) -> list[Path]:
        return [] if self.path is None else [self.path, _log_of(self.path)]

    def _connect(self, read_only: bool) -> duckdb.DuckDBPyConnection:
        if self.path is None:
            return duckdb.connect(MEMORY, config=self._config)
        self._check_place(self.path, read_only)
        try:
            return duckdb.connect(str(self.path), read_only=read_only, config=self._config)
        except (duckdb.Error, OSError) as error:
            raise opening_error(error, self.path, read_only=read_only) from error

    def _check_place(self, path: Path, read_only: bool) -> None:
        """StoreMisuse for what DuckDB would explain badly."""
        if path.is_dir():
            raise StoreMisuse(
                f"{path} is a folder. Give the path of a database file, such as {path / 'kvscope.duckdb'}."
            )
        if path.exists() and not path.is_file():
            raise StoreMisuse(f"{path} is no file that can hold a database. Give another path with --store.")
        if not path.parent.is_dir():
            raise StoreMisuse(f"The folder {path.parent} does not exist. Make it, or give another path with --store.")
        if read_only and not path.exists():
            raise no_database(path)
        if not read_only and not os.access(path.parent, os.W_OK):
            raise StoreMisuse(
                f"The folder {path.parent} cannot be written, and a database needs its log beside it. "
                "Give this user the right to it, or another path with --store.",
                path=str(path),
            )

    def _drop(self) -> None:
        self._threads = 1
        while self._idle:
            self._idle.pop().close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _claim(self) -> None:
        if self.path is None:
            return
        with _open_files_lock:
            if self.path in _open_files:
                raise StoreBusy(
                    f"{self.path} is open in this process already. Use that store, or close it first.",
                    path=str(self.path),
                    pid=os.getpid(),
                    retry_after_s=1,
                )
            _open_files.add(self.path)

    def _release(self) -> None:
        if self.path is not None:
            with _open_files_lock:
                _open_files.discard(self.path)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + ".wal")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
