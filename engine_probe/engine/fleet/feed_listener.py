"""Takes one worker's block changes to the router's feed, as KV events would travel."""

from __future__ import annotations

from engine_probe.engine.fleet.prefix_index import EventFeed
from engine_probe.engine.name_book import Numbers


class FeedListener:
    """Tells `feed` what happens at worker number `worker` (PrefixFeed)."""

    def __init__(self, feed: EventFeed, worker: int) -> None:
        self._feed = feed
        self._worker = worker

    def stored(self, numbers: Numbers, parents: Numbers, at_ns: int) -> None:
        self._feed.stored(at_ns, self._worker, numbers, parents)

    def evicted(self, numbers: Numbers, at_ns: int) -> None:
        self._feed.removed(at_ns, self._worker, numbers)

    def cleared(self, at_ns: int) -> None:
        self._feed.cleared(at_ns, self._worker)
