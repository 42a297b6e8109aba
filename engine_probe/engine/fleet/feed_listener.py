"""Takes one worker's block changes to the router's feed, as KV events would travel."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine_probe.engine.block_pool import Evicted
from engine_probe.engine.fleet.prefix_index import EventFeed
from engine_probe.engine.sequence import Sequence


class FeedListener:
    """Tells `feed` what happens at worker number `worker` (KvListener)."""

    def __init__(self, feed: EventFeed, worker: int) -> None:
        self._feed = feed
        self._worker = worker

    def stored(self, sequence: Sequence, hashes: Items[int], parents: Items[int], first: int, at_ns: int) -> None:
        above = [None if parent == sequence.root else parent for parent in parents]
        self._feed.stored(at_ns, self._worker, hashes, above)

    def hit(self, sequence: Sequence, hashes: Items[int], at_ns: int) -> None:
        """The index knows it already."""

    def evicted(self, blocks: Evicted, cause: str | None, at_ns: int) -> None:
        self._feed.removed(at_ns, self._worker, blocks.hashes)

    def cleared(self, at_ns: int) -> None:
        self._feed.cleared(at_ns, self._worker)
