"""Follows an engine's log file for its start-up lines: geometry, version and settings that no endpoint tells.

The file is read from its beginning (the start-up lines are there) and followed; a file that shrinks or is replaced is a
new start and is read from its beginning again. Lines are bounded, and nothing but known facts leaves the log.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, Final

from engine_probe.adapters.geometry import MAX_LINE_CHARS, StartupLog

READ_BYTES: Final = 4 << 20


class LogTail:
    """`poll` now and then; it reads what was added since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        self._startup = StartupLog()
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
        facts = self._startup.worker_facts()
        return facts if len(facts) > 2 or facts["flags"] else {}

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
            self._rest, self._startup = b"", StartupLog()
        self._file = self._path.open("rb")

    def _take(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > 4 * MAX_LINE_CHARS:
            self._rest = self._rest[: 4 * MAX_LINE_CHARS]  # what follows on this endless line is dropped
        for line in lines:
            self.lines += 1
            self._startup.feed(line.decode("utf-8", "replace"))
