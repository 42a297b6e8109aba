"""Several listeners behind one: the recorder, a router's index, a publisher of KV events."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine_probe.engine.block_pool import Evicted, Seconds
from engine_probe.engine.kv_manager import KvListener
from engine_probe.engine.name_book import Names
from engine_probe.engine.sequence import Sequence


class KvListeners:
    """Tells each, in their order."""

    def __init__(self, listeners: Items[KvListener]) -> None:
        self._listeners = tuple(listeners)

    def stored(self, sequence: Sequence, hashes: Names, parents: Names, first: int, at_ns: int) -> None:
        for listener in self._listeners:
            listener.stored(sequence, hashes, parents, first, at_ns)

    def hit(self, sequence: Sequence, hashes: Names, idle_s: Seconds, at_ns: int) -> None:
        for listener in self._listeners:
            listener.hit(sequence, hashes, idle_s, at_ns)

    def evicted(self, hashes: Names, blocks: Evicted, cause: str | None, at_ns: int) -> None:
        for listener in self._listeners:
            listener.evicted(hashes, blocks, cause, at_ns)

    def cleared(self, at_ns: int) -> None:
        for listener in self._listeners:
            listener.cleared(at_ns)
