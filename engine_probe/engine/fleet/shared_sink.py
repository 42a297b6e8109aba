"""One sink for several recorders: each closes its own end, the last one closes the sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine_probe.sending.sink import Sink

if TYPE_CHECKING:
    import pyarrow as pa


class SharedSink:
    """An end of `sink` for one recorder; `ends` is the list of those still open."""

    def __init__(self, sink: Sink, ends: list[SharedSink]) -> None:
        self._sink = sink
        self._ends = ends
        ends.append(self)

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Hand rows on."""
        self._sink.write(tables)

    def close(self) -> None:
        """This end writes no more."""
        if self in self._ends:
            self._ends.remove(self)
            if not self._ends:
                self._sink.close()
