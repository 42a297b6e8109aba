"""A sink that is pointed at one run's folder after another, for a worker that outlives the runs it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine_probe.recording.recorder import Recorder
from engine_probe.sending.sink import FileSink

if TYPE_CHECKING:
    import pyarrow as pa


class RunSink:
    """Writes Parquet into the folder of the run under way; between runs rows go nowhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: FileSink | None = None

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Hand rows to the run's files."""
        with self._lock:
            if self._files is not None:
                self._files.write(tables)

    def turn_to(self, folder: Path | None) -> None:
        """Finish what was written; what comes goes into `folder`, or nowhere."""
        with self._lock:
            if self._files is not None:
                self._files.close()
            self._files = None if folder is None else FileSink(folder)

    def close(self) -> None:
        """Finish what was written."""
        self.turn_to(None)


def begin_run(
    recorder: Recorder,
    sink: RunSink,
    run_id: str | None,
    folder: Path | None,
    announce: Callable[[], None] | None = None,
) -> None:
    """Rows so far belong to the run before; those from now on bear `run_id`.

    sink       the recorder's
    announce   tells what the rows of every run begin with
    """
    recorder.flush()
    for columns in recorder.constants.values():
        columns["run_id"] = run_id
    sink.turn_to(folder)
    if announce is not None:
        announce()
