"""SQL for people: one statement in a child process that can read the store, compute, answer, and nothing else.

Idea: DuckDB's safety settings are global to an instance, an interrupt can come seconds late and memory can exceed its
limit, so a person's text never runs in the collector. A child gets the sealed Parquet folder (read only), the hot rows
that the statement names (through shared memory), and answers with Arrow over a socket. It is killed at its deadline.

Invariant: whatever the statement does, the parent gets a result or one error of ours, within the time limit and a grace
of about a second, and no process, file descriptor or temporary file of the child is left behind.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_probe.errors import QueryKilled, QueryRefused, StoreBusy, StoreError
from store import sandbox_wire as wire

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

MIB = 1024 * 1024
START_S = 30.0
"""How long a child may take to come up; on a busy machine its imports take seconds, and they are not the statement's."""


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """What one statement may use.

    timeout_s          wall seconds from the hand-over to the last row, then the child is killed
    memory_bytes       memory of the query beyond that of an idle child (about 150 MiB)
    max_rows           rows of a result; more are left out and `truncated` says so
    max_result_bytes   Arrow bytes of a result, likewise
    threads            DuckDB threads of one child
    wait_s             how long to wait for a free child before StoreBusy
    """

    timeout_s: float = 30.0
    memory_bytes: int = 1024 * MIB
    max_rows: int = 1_000_000
    max_result_bytes: int = 256 * MIB
    threads: int = 2
    wait_s: float = 2.0


@dataclass(frozen=True, slots=True)
class SqlResult:
    """Rows of one statement.

    columns     name and DuckDB type of each column, in order: {"name": ..., "type": ...}
    truncated   rows were left out, because of `max_rows` or `max_result_bytes`
    elapsed_s   seconds in the child, without its start
    walls       what shut the child in: rlimits, landlock, seccomp
    """

    columns: list[dict[str, str]]
    table: pa.Table
    truncated: bool
    elapsed_s: float
    walls: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For `msgspec.json`: columns, rows as lists (see `sql_json`), truncated."""
        from store.sql_json import json_rows

        return {"columns": self.columns, "rows": json_rows(self.table), "truncated": self.truncated}


@dataclass(frozen=True, slots=True)
class SqlData:
    """What a statement may read: one consistent picture of a store.

    parquet_dir         folder that holds every one of `files`; only reading below it is possible
    files               kind -> sealed Parquet files; None: every `kind=*/**/*.parquet` below `parquet_dir`
    hot                 kind -> rows that are in no file; looked up only for the kinds that the statement names, and
                        only for the columns that it names where there is a method `select(kind, columns)`
    database            DuckDB file that the child attaches read-only (direct mode: no process has it open for writing)
    sealed_through_ns   with `database`: kind -> rows received up to this instant are in `files` and left out there
    views               (name, SELECT text[, what a row is]) of the store's own views over the kinds, in order of need
    """

    parquet_dir: Path | None = None
    files: Mapping[str, Sequence[Path]] | None = None
    hot: Mapping[str, pa.Table] = field(default_factory=dict)
    database: Path | None = None
    sealed_through_ns: Mapping[str, int] = field(default_factory=dict)
    views: Sequence[tuple[str, ...]] = ()


class SqlRunner:
    """Runs statements, at most `max_children` at once; one child waits warm, so that a statement starts at once.

    Safe to call from several threads. Close it (or use it as a context manager): that ends its children.
    """

    def __init__(self, limits: SqlLimits | None = None, max_children: int = 2, *, prewarm: bool = True) -> None:
        self.limits = limits or SqlLimits()
        self.max_children = max_children
        self._seats = threading.BoundedSemaphore(max_children)
        self._lock = threading.Lock()
        self._running: set[_Child | None] = set()
        self._prewarm = prewarm
        self._spare: _Child | None = None
        self._closed = False
        self._taken = 0
        if prewarm:
            self.warm()

    def __enter__(self) -> SqlRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def free_seats(self) -> int:
        """How many statements could start now."""
        with self._lock:
            return self.max_children - self._taken

    def warm(self) -> None:
        """Have a child ready: it imports while nobody waits for it."""
        with self._lock:
            if self._spare is None and not self._closed:
                self._spare = _Child()

    def close(self) -> None:
        """End every child, running ones too."""
        with self._lock:
            self._closed = True
            children = [child for child in (*self._running, self._spare) if child]
            self._spare = None
        for child in children:
            child.end()

    def run(
        self,
        sql: str,
        *,
        parquet_dir: Path | None = None,
        hot: Mapping[str, pa.Table] | None = None,
        max_rows: int | None = None,
        data: SqlData | None = None,
        cancelled: threading.Event | None = None,
    ) -> SqlResult:
        """Run one statement over `data` (or, in short, over `parquet_dir` and `hot`).

        Raises QueryRefused (not allowed, or DuckDB cannot answer it), QueryKilled (time, memory, or `cancelled` was
        set), StoreBusy (all children are taken, or another process holds the database).
        """
        data = data or SqlData(parquet_dir=parquet_dir, hot={} if hot is None else hot)
        rows = self.limits.max_rows if max_rows is None else max(0, min(max_rows, self.limits.max_rows))
        if not self._seats.acquire(timeout=self.limits.wait_s):
            raise StoreBusy(
                f"{self.max_children} SQL statements are running already. Wait for one to end and try again.",
                max_children=self.max_children,
                retry_after_s=5,
            )
        child = None
        try:
            with self._lock:
                self._taken += 1
            child = self._take()
            return _Conversation(child, self.limits, cancelled).hold(sql, data, rows)
        finally:
            if child is not None:
                child.end()
            with self._lock:
                self._running.discard(child)
                self._taken -= 1
            self._seats.release()
            if self._prewarm:
                self.warm()

    def _take(self) -> _Child:
        with self._lock:
            if self._closed:
                raise StoreError("The SQL runner is closed: the service is going down.")
            child, self._spare = self._spare, None
        if child is not None and not child.is_alive():
            child.end()
            child = None
        child = child or _Child()
        with self._lock:
            self._running.add(child)
        return child


def run_sql(
    sql: str,
    *,
    parquet_dir: Path | None = None,
    hot: Mapping[str, pa.Table] | None = None,
    limits: SqlLimits | None = None,
    max_rows: int | None = None,
    data: SqlData | None = None,
) -> SqlResult:
    """Run one statement in a child made for it; see `SqlRunner.run`."""
    with SqlRunner(limits, max_children=1, prewarm=False) as runner:
        return runner.run(sql, parquet_dir=parquet_dir, hot=hot, max_rows=max_rows, data=data)


class _Child:
    """A process that has imported what it needs and waits for its one job."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                _command(theirs.fileno()),
                env=_ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise StoreError(f"No process could be started for the statement: {error}. Try again later.") from error
        finally:
            theirs.close()
        self.socket = ours
        self._finalizer = weakref.finalize(self, _end, self.process, ours)

    def is_alive(self) -> bool:
        """The process still runs."""
        return self.process.poll() is None

    def end(self) -> None:
        """Kill it and all it may have started, and let go of what it held."""
        self._finalizer()

    def last_words(self) -> str:
        """What a dead child left on its error stream."""
        if self.process.stderr is None:
            return ""
        os.set_blocking(self.process.stderr.fileno(), False)
        with contextlib.suppress(OSError, ValueError):
            return (self.process.stderr.read(4096) or b"").decode(errors="replace").strip()
        return ""


_ENVIRONMENT = {
    # Nothing of the parent's: these keep malloc, Arrow and BLAS small and single-threaded, and text UTF-8.
    "MALLOC_ARENA_MAX": "2",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OPENBLAS_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
}


def _command(descriptor: int) -> list[str]:
    """The child finds modules where the parent does, and nowhere else (`-I -S`: no environment, no site, no cwd)."""
    here = str(Path(__file__).resolve().parent.parent)
    path = [here, *(str(Path(entry).resolve()) for entry in sys.path if entry and Path(entry).exists())]
    start = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
        "from store.sandbox_child import main; main(int(sys.argv[1]))"
    )
    return [sys.executable, "-I", "-S", "-c", start, str(descriptor), json.dumps(path)]


def _end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    sock.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    if process.stderr:
        process.stderr.close()


class _Conversation:
    """The parent's side of one job: hand over, answer what the child needs, take the rows, keep the time."""

    def __init__(self, child: _Child, limits: SqlLimits, cancelled: threading.Event | None) -> None:
        self._child = child
        self._limits = limits
        self._cancelled = cancelled
        self._deadline = time.monotonic() + START_S
        self._waiter = wire.Waiter(self._deadline, cancelled)

    def hold(self, sql: str, data: SqlData, max_rows: int) -> SqlResult:
        """Raises QueryRefused, QueryKilled, StoreBusy, StoreError."""
        sock = self._child.socket
        sock.settimeout(self._limits.timeout_s)
        try:
            self._await_start()
            wire.send(sock, wire.JOB, json.dumps(self._job(sql, data, max_rows)).encode())
            needs = json.loads(bytes(self._expect(wire.NEEDS, MIB)))
            with _shared(data.hot, needs["kinds"]) as (layout, fds):
                wire.send(sock, wire.HOT, json.dumps(layout).encode(), fds)
            columns = json.loads(bytes(self._expect(wire.COLUMNS, 16 * MIB)))
            table, end = self._rows()
        except wire.Late:
            raise self._too_late() from None
        except (wire.Gone, wire.TooLong, ValueError) as error:
            raise self._died(error) from error
        return SqlResult(columns, table, bool(end["truncated"]), float(end["elapsed_s"]), tuple(needs["walls"]))

    def _await_start(self) -> None:
        """The statement's time begins when the child is up. Raises StoreBusy where it does not come up."""
        try:
            self._expect(wire.READY, 0)
        except wire.Late:
            if self._cancelled is not None and self._cancelled.is_set():
                raise
            raise StoreBusy(
                f"No process for the statement came up within {START_S:g} s: the machine is overloaded. Try again later.",
                retry_after_s=30,
            ) from None
        self._deadline = time.monotonic() + self._limits.timeout_s
        self._waiter = wire.Waiter(self._deadline, self._cancelled)

    def _job(self, sql: str, data: SqlData, max_rows: int) -> dict[str, Any]:
        limits = self._limits
        parquet_dir = data.parquet_dir.resolve() if data.parquet_dir and data.parquet_dir.is_dir() else None
        database = data.database.resolve() if data.database else None
        readable = [path for path in (parquet_dir, database) if path]
        if database and (wal := database.with_name(database.name + ".wal")).exists():
            readable.append(wal)
        return {
            "sql": sql,
            "max_rows": max_rows,
            "max_result_bytes": limits.max_result_bytes,
            "memory_bytes": limits.memory_bytes,
            "threads": limits.threads,
            "cpu_s": limits.timeout_s * limits.threads + 1,
            "wall_s": limits.timeout_s + 1,
            "readable": [str(path) for path in readable],
            "parquet_dir": str(parquet_dir) if parquet_dir else None,
            "files": _files(parquet_dir, data.files),
            "database": str(database) if database else None,
            "sealed_through_ns": dict(data.sealed_through_ns),
            "views": [[*view, ""][:3] for view in data.views],
        }

    def _expect(self, kind: bytes, limit: int) -> memoryview:
        got, body, _ = wire.receive(self._child.socket, limit, self._waiter)
        if got == wire.ERROR:
            raise self._told(json.loads(bytes(body)))
        if got != kind:
            raise ValueError(f"frame {got!r} where {kind!r} was expected")
        return body

    def _rows(self) -> tuple[pa.Table, dict[str, Any]]:
        """Batches until the end. They come from a process that a person's text may have broken: each is validated."""
        import pyarrow as pa

        batches: list[pa.RecordBatch] = []
        left = self._limits.max_result_bytes + MIB
        while True:
            kind, body, _ = wire.receive(self._child.socket, left, self._waiter)
            if kind == wire.ERROR:
                raise self._told(json.loads(bytes(body)))
            if kind == wire.END:
                return pa.Table.from_batches(batches), json.loads(bytes(body))
            if kind != wire.BATCH:
                raise ValueError(f"frame {kind!r} among the rows")
            left -= len(body)
            with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
                for batch in reader:
                    batch.validate(full=True)
                    batches.append(batch)

    def _told(self, report: dict[str, str]) -> StoreError:
        what, message = report["what"], report["message"]
        if what == "refused":
            return QueryRefused(message)
        if what == "memory":
            return self._no_memory(message)
        if what == "locked":
            return StoreBusy(
                f"Another process holds the database ({message.splitlines()[0]}). "
                "Ask that process over HTTP: kvscope sql --url http://127.0.0.1:8321 ...",
                retry_after_s=5,
            )
        return StoreError(message)

    def _no_memory(self, message: str) -> QueryKilled:
        return QueryKilled(
            f"The statement needed more than {self._limits.memory_bytes // MIB} MiB of memory and was stopped "
            f"({message}). Ask for fewer rows or columns, or aggregate earlier.",
            reason="memory",
            memory_bytes=self._limits.memory_bytes,
        )

    def _too_late(self) -> QueryKilled:
        if self._cancelled is not None and self._cancelled.is_set():
            return QueryKilled(
                "The statement was stopped because nobody waits for its answer any more.", reason="cancelled"
            )
        return QueryKilled(
            f"The statement ran longer than {self._limits.timeout_s:g} s and was stopped. Ask for a smaller window "
            "(a condition on at_ns or arrival_ns), or for fewer columns.",
            reason="time",
            timeout_s=self._limits.timeout_s,
        )

    def _died(self, error: Exception) -> StoreError:
        """The child is gone without a word: say by which signal, as far as it tells."""
        try:
            code = self._child.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return StoreError(f"The process that ran the statement answered nonsense and was ended ({error}).")
        words = self._child.last_words()
        if code in (-signal.SIGXCPU, -signal.SIGALRM):
            return self._too_late()
        if code == -signal.SIGKILL and not self._child.is_alive() and time.monotonic() >= self._deadline:
            return self._too_late()
        if code < 0:
            name = signal.Signals(-code).name
            log.warning("sql child was brought down", extra={"signal": name, "stderr": words})
            return QueryKilled(
                f"The statement brought its process down ({name}), most often for want of memory "
                f"({self._limits.memory_bytes // MIB} MiB are allowed). Ask for fewer rows or columns, or aggregate "
                "earlier.",
                reason="crash",
                signal=name,
            )
        last = words.splitlines()[-1] if words else f"exit code {code}"
        log.error("sql child failed", extra={"code": code, "stderr": words})
        return StoreError(f"The process that runs statements could not work: {last}. Report this, with the statement.")


def _files(parquet_dir: Path | None, files: Mapping[str, Sequence[Path]] | None) -> dict[str, list[str]]:
    if parquet_dir is None:
        return {}
    if files is not None:
        return {kind: [str(path.resolve()) for path in paths] for kind, paths in files.items()}
    found = {}
    for folder in sorted(parquet_dir.glob("kind=*")):
        found[folder.name.removeprefix("kind=")] = sorted(str(path) for path in folder.glob("**/*.parquet"))
    return found


@contextlib.contextmanager
def _shared(hot: Mapping[str, pa.Table], kinds: Mapping[str, Sequence[str] | None]) -> Any:
    """Hot rows of `kinds` as Arrow IPC in memory that the child can map: (kind -> (offset, size), descriptors).

    kinds   kind -> the columns that are needed, None for all
    """
    import pyarrow as pa

    layout: dict[str, tuple[int, int]] = {}
    wanted = [kind for kind in kinds if kind in hot]
    if not wanted:
        yield layout, []
        return
    with _memory_file() as file:
        for kind in wanted:
            start = file.seek(0, os.SEEK_END)
            start += -start % 64  # Arrow's alignment holds only where the stream starts aligned
            file.seek(start)
            table = _select(hot, kind, kinds[kind])
            with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), table.schema) as writer:
                writer.write_table(table)
            layout[kind] = (start, file.tell() - start)
        file.flush()
        yield layout, [file.fileno()]


def _select(hot: Mapping[str, pa.Table], kind: str, columns: Sequence[str] | None) -> pa.Table:
    select = getattr(hot, "select", None)
    if select is not None:
        return select(kind, columns)
    table = hot[kind]
    return table if columns is None else table.select([name for name in columns if name in table.column_names])


def _memory_file() -> Any:
    """A file without a name: shared memory where the system has it, else an unlinked temporary file."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("kvscope-sql-hot", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()
