"""A sink before a sink: what is written to it waits in a funnel, which offers it again while the sink behind it is busy.

For writers that lose what a sink refuses (the recorder's flush). Invariant: as the funnel's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine_probe.attach.funnel import Funnel

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.sending.sink import Sink


class FunnelSink:
    """`who` speaks in the marks that tell of lost rows."""

    def __init__(self, sink: Sink, who: str) -> None:
        self._funnel = Funnel(sink, who=who)
        self._funnel.start()

    @property
    def lost(self) -> Mapping[str, int]:
        """Rows lost so far, by kind."""
        return dict(self._funnel.lost)

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Take rows over."""
        self._funnel.put(tables)

    def close(self) -> None:
        """Write what is left, trying for a bounded time, and close the sink behind."""
        self._funnel.close()
