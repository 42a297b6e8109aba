"""Follows a log file: geometry, version and settings that no endpoint tells, and requests or decisions where it has any.

The file is read from its beginning (the start-up lines are there) and followed; a file that shrinks or is replaced is a
new start and is read from its beginning again. Lines are bounded, and nothing but what the adapter's reader knows leaves
the log. Of lines that were there before kvscope came only the settings are taken: their rows may have been stored by an
earlier attach.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from engine_probe.adapters.adapter import LogReader, Rows

READ_BYTES: Final = 4 << 20
MAX_LINE_CHARS: Final = 65_536
MAX_ROWS: Final = 200_000


class LogTail:
    """`poll` now and then; it reads what was added since. `drain` hands out the rows read.

    make_reader  a fresh reader for each start of the engine
    """

    def __init__(self, path: Path, make_reader: Callable[[], LogReader]) -> None:
        self._path = path
        self._make_reader = make_reader
        self._reader = make_reader()
        self._old_bytes: int | None = None
        self._rows: Rows = {}
        self.dropped_rows = 0
        self._file: BinaryIO | None = None
        self._rest = b""
        self.lines = 0
        self.error: str | None = None

    def poll(self) -> dict[str, Any]:
        """`worker` columns told by the log so far; {} where nothing was told yet. Never raises for a missing file."""
        try:
            self._reopen()
            while self._file is not None and (chunk := self._file.read(READ_BYTES)):
                self._take(chunk)
            self.error = None
        except OSError as error:
            self.error = f"{self._path} cannot be read: {error.strerror or error}"
        facts = self._reader.worker_facts()
        return facts if len(facts) > 2 or facts.get("flags") else {}

    def drain(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Rows by kind of the lines read since the last call."""
        rows, self._rows = self._rows, {}
        return rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reopen(self) -> None:
        """Open the file anew where the path names another one now, or where it became shorter."""
        now = self._path.stat()
        if self._file is not None:
            opened = os.fstat(self._file.fileno())
            is_same = (opened.st_dev, opened.st_ino) == (now.st_dev, now.st_ino)
            if is_same and now.st_size >= self._file.tell():
                return
            self.close()
            self._rest, self._reader, self._old_bytes = b"", self._make_reader(), 0
        if self._old_bytes is None:
            self._old_bytes = now.st_size
        self._file = self._path.open("rb")

    def _take(self, chunk: bytes) -> None:
        assert self._file is not None
        position = self._file.tell() - len(chunk) - len(self._rest)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > 4 * MAX_LINE_CHARS:
            self._rest = self._rest[: 4 * MAX_LINE_CHARS]  # what follows on this endless line is dropped
        for line in lines:
            self.lines += 1
            position += len(line) + 1
            found = self._reader.feed(line[: 4 * MAX_LINE_CHARS].decode("utf-8", "replace"))
            for kind, rows in found.items() if position > (self._old_bytes or 0) else ():
                kept = self._rows.setdefault(kind, [])
                room = max(MAX_ROWS - len(kept), 0)
                kept += rows[:room]
                self.dropped_rows += max(len(rows) - room, 0)
