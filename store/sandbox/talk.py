"""The parent's side of one statement: hand over, answer what the child needs, take the rows, keep the time.

Invariant: it ends by the deadline, with the answer or with one error of ours. What comes from the child is only data:
frames have a limit in bytes and in number, documents a type, Arrow is validated, rows in JSON are passed on unread.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine_probe.errors import QueryKilled, QueryRefused, StoreBusy, StoreError
from store.deadline import Late
from store.sandbox import wire
from store.sandbox.arrow_rows import ArrowRows
from store.sandbox.hot import shared
from store.sandbox.process import Child
from store.sandbox.terms import MIB, Picture, SqlData, SqlLimits, SqlResult
from store.sandbox.told import MOST_BYTES, Column, End, Failure, Needs, heard

log = logging.getLogger(__name__)

START_S: Final = 30.0
"""How long a child may take to come up; on a busy machine its imports take seconds, and they are not the statement's."""


class Conversation:
    """The parent's side of one job: hand over, answer what the child needs, take the rows, keep the time."""

    def __init__(self, child: Child, limits: SqlLimits, cancelled: threading.Event | None) -> None:
        self._child = child
        self._limits = limits
        self._cancelled = cancelled
        self._deadline = time.monotonic() + START_S
        self._waiter = wire.Waiter(self._deadline, cancelled)

    def arrow(self, sql: str, data: Picture, max_rows: int) -> SqlResult:
        """Rows as Arrow; each batch is looked at, see `ArrowRows`."""
        rows = ArrowRows(
            max_rows, 2 * self._limits.max_result_bytes + MIB
        )  # the child counts slices, whose ends Arrow pads
        columns, walls, end = self._hold(sql, data, max_rows, "arrow", rows.take)
        try:
            table = rows.table
        except ValueError as error:
            raise self._died(error) from error
        return SqlResult(columns, table, end.truncated, end.elapsed_s, walls)

    def json(self, sql: str, data: Picture, max_rows: int) -> bytes:
        """Rows as JSON text, which nobody here looks into."""
        parts: list[memoryview] = []
        columns, _, end = self._hold(sql, data, max_rows, "json", parts.append)
        head = b'{"columns":' + json.dumps(columns, ensure_ascii=False).encode() + b',"rows":['
        tail = b'],"truncated":' + (b"true" if end.truncated else b"false") + b"}"
        return head + b",".join(part for part in parts if part) + tail

    def _hold(
        self, sql: str, data: Picture, max_rows: int, form: str, take: Callable[[memoryview], None]
    ) -> tuple[list[dict[str, str]], tuple[str, ...], End]:
        """Columns, walls, and how it ended. Raises QueryRefused, QueryKilled, StoreBusy, StoreError."""
        sock = self._child.socket
        sock.settimeout(self._limits.timeout_s)
        try:
            self._await_start()
            seen = data if isinstance(data, SqlData) else data(self._waiter)
            job = self._job(sql, seen) | {"max_rows": max_rows, "form": form}
            wire.send(sock, wire.JOB, json.dumps(job).encode())
            needs = heard(self._expect(wire.NEEDS, MOST_BYTES), Needs)
            with shared(seen.hot, needs.kinds, self._limits.memory_bytes, self._waiter) as (layout, fds):
                wire.send(sock, wire.HOT, json.dumps(layout).encode(), fds)
            columns = heard(self._expect(wire.COLUMNS, 16 * MIB), list[Column])
            end = self._take_rows(take, max_rows)
        except Late:
            raise self._too_late() from None
        except (wire.Gone, wire.TooLong, ValueError) as error:
            raise self._died(error) from error
        return [{"name": one.name, "type": one.type} for one in columns], tuple(needs.walls), end

    def _await_start(self) -> None:
        """The statement's time begins when the child is up. Raises StoreBusy where it does not come up."""
        try:
            self._expect(wire.READY, 0)
        except Late:
            if self._cancelled is not None and self._cancelled.is_set():
                raise
            raise StoreBusy(
                f"No process for the statement came up within {START_S:g} s: the machine is overloaded. Try again later.",
                retry_after_s=30,
            ) from None
        self._deadline = time.monotonic() + self._limits.timeout_s
        self._waiter = wire.Waiter(self._deadline, self._cancelled)

    def _job(self, sql: str, data: SqlData) -> dict[str, Any]:
        limits = self._limits
        parquet_dir = data.parquet_dir.resolve() if data.parquet_dir and data.parquet_dir.is_dir() else None
        database = data.database.resolve() if data.database else None
        readable = [path for path in (parquet_dir, database) if path]
        if database and (wal := database.with_name(database.name + ".wal")).exists():
            readable.append(wal)
        return {
            "sql": sql,
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
            raise self._told(heard(body, Failure))
        if got != kind:
            raise ValueError(f"frame {got!r} where {kind!r} was expected")
        return body

    def _take_rows(self, take: Callable[[memoryview], None], max_rows: int) -> End:
        """Give each batch to `take` until the end, which is answered. One batch is without rows, the others have some."""
        left = self._limits.max_result_bytes + MIB
        for _ in range(max_rows + 2):
            kind, body, _ = wire.receive(self._child.socket, left, self._waiter)
            if kind == wire.ERROR:
                raise self._told(heard(body, Failure))
            if kind == wire.END:
                return heard(body, End)
            if kind != wire.BATCH:
                raise ValueError(f"frame {kind!r} among the rows")
            left -= len(body)
            take(body)
        raise ValueError(f"more batches than {max_rows} rows fill")

    def _told(self, failure: Failure) -> StoreError:
        what, message = failure.what, failure.message
        if what == "refused":
            return QueryRefused(message)
        if what == "memory":
            return self._no_memory(message)
        if what == "locked":
            return StoreBusy(
                f"Another process holds the database ({message.partition(chr(10))[0]}). "
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
