"""SQL for people: one statement in a child process that can read the store, compute, answer, and nothing else.

Idea: DuckDB's safety settings are global to an instance, an interrupt can come seconds late and memory can exceed its
limit, so a person's text never runs in the collector. A child gets the sealed Parquet folder (read only), the hot rows
that the statement names (through shared memory, in batches), and answers with Arrow over a socket. It is killed at its deadline.

Invariant: whatever the statement does, the parent gets a result or one error of ours, within the time limit and a grace
of about a second, and no process, file descriptor or temporary file of the child is left behind.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine_probe.errors import StoreBusy, StoreError
from store.sandbox.process import Child
from store.sandbox.talk import Conversation
from store.sandbox.terms import MIB, Picture, SqlData, SqlLimits, SqlResult

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MIB", "SqlData", "SqlLimits", "SqlResult", "SqlRunner", "run_sql"]


class SqlRunner:
    """Runs statements, at most `max_children` at once; one child waits warm, so that a statement starts at once.

    Safe to call from several threads. Close it (or use it as a context manager): that ends its children.
    """

    def __init__(self, limits: SqlLimits | None = None, max_children: int = 2, *, prewarm: bool = True) -> None:
        self.limits = limits or SqlLimits()
        self.max_children = max_children
        self._seats = threading.BoundedSemaphore(max_children)
        self._lock = threading.Lock()
        self._running: set[Child | None] = set()
        self._prewarm = prewarm
        self._spare: Child | None = None
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
                self._spare = Child()

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
        data: Picture | None = None,
        cancelled: threading.Event | None = None,
    ) -> SqlResult:
        """Run one statement over `data` (or, in short, over `parquet_dir` and `hot`).

        Raises QueryRefused (not allowed, DuckDB cannot answer it, or too many hot rows), QueryKilled (time, memory, or `cancelled` was
        set), StoreBusy (all children are taken, or another process holds the database).
        """
        data = data or SqlData(parquet_dir=parquet_dir, hot={} if hot is None else hot)
        with self._conversation(cancelled) as conversation:
            return conversation.arrow(sql, data, self._rows(max_rows))

    def run_json(
        self, sql: str, data: Picture, *, max_rows: int | None = None, cancelled: threading.Event | None = None
    ) -> bytes:
        """As `run`, answered as the text of the JSON document {"columns", "rows", "truncated"}.

        The child writes the JSON: a million rows as Python objects would keep the collector from its senders.
        """
        with self._conversation(cancelled) as conversation:
            return conversation.json(sql, data, self._rows(max_rows))

    def _rows(self, max_rows: int | None) -> int:
        return self.limits.max_rows if max_rows is None else max(0, min(max_rows, self.limits.max_rows))

    @contextlib.contextmanager
    def _conversation(self, cancelled: threading.Event | None) -> Iterator[Conversation]:
        """A seat and a child for one statement."""
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
            yield Conversation(child, self.limits, cancelled)
        finally:
            if child is not None:
                child.end()
            with self._lock:
                self._running.discard(child)
                self._taken -= 1
            self._seats.release()
            if self._prewarm:
                self.warm()

    def _take(self) -> Child:
        with self._lock:
            if self._closed:
                raise StoreError("The SQL runner is closed: the service is going down.")
            child, self._spare = self._spare, None
        if child is not None and not child.is_alive():
            child.end()
            child = None
        child = child or Child()
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
