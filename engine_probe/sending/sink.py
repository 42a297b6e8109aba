"""Where rows go: a collector (HTTP), files (Parquet, NDJSON), or memory. One verb, `write`.

Invariant: after `write` returns, the rows are the sink's: delivered, kept for later, or counted as dropped and told by
a `gap` mark. `write` may encode and touch the disk: an engine's loop calls the recorder, whose flush thread calls this.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from engine_probe.sending.file_sink import FileSink
from engine_probe.sending.http_sink import HttpSink

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FileSink", "HttpSink", "MemorySink", "NoSink", "Sink"]


class Sink(Protocol):
    """Takes tables of any kinds; safe to call from several threads."""

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Take rows over. Tables conform to `arrow_schema(kind)`; they are not changed afterwards."""
        ...

    def close(self) -> None:
        """Bring out what is held, within bounded time. A second call does nothing."""
        ...


class NoSink:
    """Keeps nothing: for an engine that nobody records."""

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """They were seen."""

    def close(self) -> None:
        """Nothing is held."""


class MemorySink:
    """Keeps everything in this process: for tests, notebooks and the in-process store. Not bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[str, list[pa.Table]] = {}
        self.closed = False

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Keep the tables that have rows."""
        with self._lock:
            for kind, table in tables.items():
                if table.num_rows:
                    self._tables.setdefault(kind, []).append(table)

    def close(self) -> None:
        """Nothing is held back; the tables stay readable."""
        self.closed = True

    def table(self, kind: str) -> pa.Table:
        """All rows of a kind so far, in the order written."""
        import pyarrow as pa

        from engine_probe.schema import arrow_schema

        with self._lock:
            parts = list(self._tables.get(kind, ()))
        return pa.concat_tables(parts) if parts else arrow_schema(kind).empty_table()

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows by kind so far."""
        with self._lock:
            return {kind: sum(table.num_rows for table in parts) for kind, parts in self._tables.items()}
