"""The queue between a probe and a collector that may be away: bounded bytes, identities, and losses that are told.

A batch is pending, or in flight with one worker; it leaves by being acknowledged, refused for good, or dropped when
the bound is reached. What is dropped first is said by `DROP_ORDER`: the oldest rows of the first kind in that order,
then the next kind; batches in flight are left alone. Every loss is added to a `Gap`, kept across restarts, and told by
a `mark` as soon as the collector answers again.
Invariant: rows in = rows acknowledged + rows in the gaps + rows pending or in flight; a batch keeps its (epoch, seq)
for life, so a resend is recognised; a number is never used twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from engine_probe.events import DROP_ORDER
from engine_probe.sending.parcels import Gap, Key, Parcel, Segment, SegmentInfo, halve, mark_segment
from engine_probe.sending.spool_files import Damaged, Files, Stored

log = logging.getLogger(__name__)

_ROOM_AFTER_OVERFLOW: Final = 0.9
"""An overflow drops down to this share of the bound, so that the next batch does not overflow again."""


class Spool:
    """Batches of one sender, oldest first. Safe to use from several threads.

    max_bytes   bound of what is pending and in flight, headers included
    source      the sender's name, told in `gap` marks
    now_ns      wall clock of those marks
    """

    def __init__(self, files: Files, *, max_bytes: int, source: str, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._files = files
        self._max_bytes = max_bytes
        self._source = source
        self._now_ns = now_ns
        self._lock = threading.RLock()
        self._batches: dict[Key, Stored] = {}
        self._in_flight: set[Key] = set()
        self._num_bytes = 0
        self._closed = False
        self._next_seq = files.next_seq
        self.dropped: Counter[str] = Counter()
        stored, damaged, gaps = files.load()
        self._gaps = {gap.reason: gap for gap in gaps}
        for batch in stored:
            self._index(batch)
        for key in damaged:
            self._lose(key, (), "spool_damaged")
            self._files.set_aside(key, "the file is damaged")
        if not self._batches:
            self._tell_gaps()  # else with the first answer: a collector that stays away is not told again and again

    @property
    def num_pending(self) -> int:
        """Batches that wait to be taken."""
        with self._lock:
            return len(self._batches) - len(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Batches taken and not answered yet."""
        with self._lock:
            return len(self._in_flight)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        with self._lock:
            return self._num_bytes

    def append(self, batches: Iterable[Sequence[Segment]]) -> None:
        """Queue batches, each under a new number. Never raises OSError: what cannot be kept is dropped and told."""
        with self._lock:
            for segments in batches:
                self._put_new(segments)
            self._make_room()
            if not self._batches:
                self._tell_gaps()  # no answer will come that could tell them

    def take(self) -> Parcel | None:
        """The oldest batch that nobody sends, now in flight; None where there is none."""
        with self._lock:
            while True:
                # Those in flight are among the oldest, so this looks at few.
                key = next((key for key in self._batches if key not in self._in_flight), None)
                if key is None:
                    return None
                try:
                    segments = self._files.read(self._batches[key])
                except Damaged as error:
                    self._lose(key, self._batches[key].infos, "spool_damaged")
                    self._set_aside(key, f"the file is damaged: {error}")
                    self._tell_gaps()
                    continue
                self._in_flight.add(key)
                return Parcel(key, segments)

    def ack(self, parcel: Parcel) -> None:
        """The collector has it: forget it, and tell losses now that somebody listens."""
        with self._lock:
            self._in_flight.discard(parcel.key)
            if parcel.key in self._batches and not self._closed:
                self._forget(parcel.key)
                self._remove(parcel.key)
                self._tell_gaps()

    def release(self, parcel: Parcel) -> None:
        """It was not delivered, or nobody knows: it is pending again, under the same number."""
        with self._lock:
            self._in_flight.discard(parcel.key)

    def split(self, parcel: Parcel) -> bool:
        """Make two batches of one that is too large: the first keeps the number. False where it has but one row.

        Raises OSError where the spool cannot be written; the batch is then whole and still in flight.
        """
        halves = halve(parcel.segments)
        if halves is None:
            return False
        with self._lock:
            first, second = halves
            key = Key(self._files.epoch, self._take_number())
            whole = self._batches[parcel.key]
            kept = replace(whole, infos=_infos(first), halves=(*whole.halves, str(key)))
            new = Stored(key, _infos(second), half_of=str(parcel.key), is_tale=whole.is_tale)
            # In this order: a process that ends in between finds the whole batch, and forgets the half of it.
            self._files.put(new, second)
            try:
                self._files.put(kept, first)
            except OSError:
                self._remove(key)
                raise
            self._replace(kept)
            self._index(new)
            self._in_flight.discard(parcel.key)
        return True

    def refuse(self, parcel: Parcel, reason: str, words: str) -> None:
        """The collector will never take it: set it aside, count its rows as lost, and tell so."""
        with self._lock:
            self._in_flight.discard(parcel.key)
            if parcel.key not in self._batches or self._closed:
                return
            stored = self._batches[parcel.key]
            if stored.is_tale:
                # Telling the loss of the tale would be refused as well, and so for ever.
                self.dropped.update({info.kind: info.num_rows for info in stored.infos})
            else:
                self._lose(parcel.key, stored.infos, reason)
            self._set_aside(parcel.key, words)
            self._tell_gaps()

    def close(self) -> None:
        """Let go of the files; what is pending stays on disk. Answers that come later change nothing: a resend will."""
        with self._lock:
            self._closed = True
            self._files.close()

    def _put_new(self, segments: Sequence[Segment]) -> None:
        key = Key(self._files.epoch, self._take_number())
        stored = Stored(key, _infos(segments))
        try:
            self._files.put(stored, segments)
        except OSError as error:
            log.warning("spool not writable, rows dropped", extra={"error": str(error)})
            self._lose(key, stored.infos, "spool_not_writable")
            return
        self._index(stored)

    def _take_number(self) -> int:
        number = self._next_seq
        self._next_seq += 1
        return number

    def _make_room(self) -> None:
        if self._num_bytes <= self._max_bytes:
            return
        target = int(self._max_bytes * _ROOM_AFTER_OVERFLOW)
        for kind in DROP_ORDER:
            for key, stored in list(self._batches.items()):
                if self._num_bytes <= target:
                    return
                is_free = key not in self._in_flight and not stored.is_tale
                if is_free and any(info.kind == kind for info in stored.infos):
                    self._strip(stored, kind)

    def _strip(self, stored: Stored, kind: str) -> None:
        """Drop the rows of one kind from a pending batch."""
        lost = [info for info in stored.infos if info.kind == kind]
        try:
            segments = [segment for segment in self._files.read(stored) if segment.info.kind != kind]
            kept = replace(stored, infos=_infos(segments))
            if segments:
                self._files.put(kept, segments)
        except (Damaged, OSError):
            segments, lost = [], list(stored.infos)
        self._lose(stored.key, lost, "spool_overflow")
        if segments:
            self._replace(kept)
        else:
            self._forget(stored.key)
            self._remove(stored.key)

    def _lose(self, key: Key, infos: Iterable[SegmentInfo], reason: str) -> None:
        infos = list(infos)
        self._gaps.setdefault(reason, Gap(reason)).add(key, infos)
        for info in infos:
            self.dropped[info.kind] += info.num_rows
        self._save_gaps()

    def _tell_gaps(self) -> None:
        """Queue one `mark` a reason. They may exceed the bound: they are small, and the loss must be told."""
        if not self._gaps:
            return
        marks = [gap.to_mark(self._source, self._now_ns()) for gap in self._gaps.values()]
        key = Key(self._files.epoch, self._take_number())
        segment = mark_segment(marks)
        stored = Stored(key, (segment.info,), is_tale=True)
        try:
            self._files.put(stored, [segment])
        except OSError as error:
            log.warning("spool not writable, loss told later", extra={"error": str(error)})
            return
        self._index(stored)
        self._gaps.clear()
        self._save_gaps()

    def _save_gaps(self) -> None:
        try:
            self._files.save_gaps(list(self._gaps.values()))
        except OSError as error:
            log.warning("spool not writable, loss remembered in memory only", extra={"error": str(error)})

    def _index(self, stored: Stored) -> None:
        self._batches[stored.key] = stored
        self._num_bytes += stored.num_bytes

    def _replace(self, stored: Stored) -> None:
        self._num_bytes += stored.num_bytes - self._batches[stored.key].num_bytes
        self._batches[stored.key] = stored

    def _forget(self, key: Key) -> None:
        self._num_bytes -= self._batches.pop(key).num_bytes

    def _set_aside(self, key: Key, words: str) -> None:
        self._forget(key)
        try:
            self._files.set_aside(key, words)
        except OSError:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        try:
            self._files.remove(key)
        except OSError as error:
            # It would be sent again after a restart, and be recognised as a repeat.
            log.warning("delivered batch not removed from the spool", extra={"error": str(error)})


def _infos(segments: Sequence[Segment]) -> tuple[SegmentInfo, ...]:
    return tuple(segment.info for segment in segments)
