"""OTLP spans are stored once, by (trace_id, span_id), though exporters resend and regroup them as they like.

Idea: the keys of committed spans are kept in memory, newest last. A key that is not there may have been stored by an
earlier process, or its entry may have been dropped; both can only be so for spans that ended at or before `floor_ns`,
so only those are looked up in the store. Invariant: two batches never commit the same key. Who finds a key claimed by
another batch waits for that batch: if it commits, the key is a duplicate; if it fails, the key is free again. A batch
has committed or given up its own claims before it waits, so none waits in a circle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from itertools import islice

Key = bytes
Lookup = Callable[[Sequence[int]], Collection[Key]]
"""Positions of keys that may be stored already -> the keys that are."""


class SpanLedger:
    """Which spans are stored; safe from several threads.

    floor_ns   end of the newest span in the store when the process started
    max_keys   keys kept in memory (about 200 bytes each)
    """

    def __init__(self, floor_ns: int, max_keys: int = 131_072) -> None:
        self.floor_ns = floor_ns
        self._max_keys = max_keys
        self._committed: dict[Key, int] = {}
        self._claimed: dict[Key, threading.Event] = {}
        self._lock = threading.Lock()

    def apply(
        self, keys: Sequence[Key], ends_ns: Sequence[int], lookup: Lookup, commit: Callable[[Sequence[int]], None]
    ) -> int:
        """Call `commit` with the positions of the keys that are new (perhaps several times) and count them.

        What `commit` raises passes through; its keys are then as if they had never been sent.
        """
        pending: Sequence[int] = range(len(keys))
        num_new = 0
        while pending:
            done = threading.Event()
            mine, others, theirs = self._claim(keys, pending, done)
            try:
                num_new += self._settle(keys, ends_ns, mine, lookup, commit)
            finally:
                self._release(keys, mine)
                done.set()
            for event in theirs:
                event.wait()
            pending = others
        return num_new

    def _claim(
        self, keys: Sequence[Key], pending: Sequence[int], done: threading.Event
    ) -> tuple[list[int], list[int], set[threading.Event]]:
        mine: list[int] = []
        others: list[int] = []
        theirs: set[threading.Event] = set()
        with self._lock:
            if len(pending) == len(keys) and self._is_new(keys):
                self._claimed.update(dict.fromkeys(keys, done))
                return list(pending), others, theirs
            for position in pending:
                key = keys[position]
                if key in self._committed:
                    continue
                holder = self._claimed.setdefault(key, done)
                if holder is not done:
                    others.append(position)
                    theirs.add(holder)
                else:
                    mine.append(position)
        return mine, others, theirs

    def _is_new(self, keys: Sequence[Key]) -> bool:
        """Nobody has sent any of these: the usual case, told without looking at each."""
        return self._committed.keys().isdisjoint(keys) and self._claimed.keys().isdisjoint(keys)

    def _settle(
        self,
        keys: Sequence[Key],
        ends_ns: Sequence[int],
        mine: Sequence[int],
        lookup: Lookup,
        commit: Callable[[Sequence[int]], None],
    ) -> int:
        unsure = [position for position in mine if ends_ns[position] <= self.floor_ns]
        stored = set(lookup(unsure)) if unsure else set()
        # The first of those that have one key in this batch is the one that counts.
        fresh = {keys[position]: position for position in reversed(mine) if keys[position] not in stored}
        if fresh:
            commit(sorted(fresh.values()))
        with self._lock:
            self._committed.update((keys[position], ends_ns[position]) for position in mine)
            self._forget_oldest()
        return len(fresh)

    def _release(self, keys: Sequence[Key], mine: Sequence[int]) -> None:
        with self._lock:
            for position in mine:
                self._claimed.pop(keys[position], None)

    def _forget_oldest(self) -> None:
        surplus = len(self._committed) - self._max_keys
        if surplus > 0:
            for key in list(islice(self._committed, surplus + self._max_keys // 8)):
                self.floor_ns = max(self.floor_ns, self._committed.pop(key))
