"""A kept log of a router, a cache or an engine, read by its adapter's own reader: the rows that `attach --log` would write.

One start of the program is one file. Lines that tell nothing are passed over; rows come in the order of the lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_probe.adapters.registry import adapter
from engine_probe.errors import UnknownFormat
from engine_probe.readers.lines import text_lines
from engine_probe.readers.source import Notes, ReadOptions
from engine_probe.schema import table_from_rows

if TYPE_CHECKING:
    import pyarrow as pa

_CHUNK = 10_000


class EngineLog:
    """One file. `worker` of the options names the program whose log it is; without it that is the engine's word."""

    def __init__(self, path: Path, engine: str, what: str) -> None:
        self.files = [path]
        self.format = what
        self._engine = engine

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """Tables of up to 10,000 rows a kind. Raises UnknownFormat where no line tells anything."""
        path = self.files[0]
        reader = adapter(self._engine).log_reader(options.worker or self._engine)
        assert reader is not None, self._engine
        rows: dict[str, list[Mapping[str, Any]]] = {}
        num_lines = num_rows = 0
        for _, line in text_lines(path):
            num_lines += 1
            for kind, found in reader.feed(line.decode("utf-8", "replace")).items():
                rows.setdefault(kind, []).extend(found)
                num_rows += len(found)
            if any(len(waiting) >= _CHUNK for waiting in rows.values()):
                yield {kind: table_from_rows(kind, waiting) for kind, waiting in rows.items()}
                rows = {}
        if rows:
            yield {kind: table_from_rows(kind, waiting) for kind, waiting in rows.items()}
        if not num_rows:
            raise UnknownFormat(
                f"{path.name}: none of {num_lines:,} lines tells of a request or a decision. Was it written at the level "
                f"that is needed? See {adapter(self._engine).guide}."
            )
        notes.facts["lines"] = num_lines
        if unnamed := getattr(reader, "unnamed", 0):
            notes.left_out.append(f"{unnamed} decisions whose line names no request")
