"""Who reads right now, few at once, and a door that the writer shuts on them where it needs their memory.

Idea: reads and commits share DuckDB's memory. Sorted rows spill to disk; what aggregates and windows hold does not, and a read may
hold it for seconds. A commit that finds none sends readers out, those that nobody waits for first, and is tried again.
A read that somebody waits for until a deadline is interrupted when that passes, or when they gave up.
Invariant: nobody comes in while the door is shut to them; who was sent out learns why, and not that somebody stopped it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import BoundedSemaphore, Condition, Event, Thread
from typing import Final

import duckdb

from engine_probe.errors import OutOfMemory, QueryKilled, StoreBusy
from store.deadline import Deadline, Late, attempt

Cursor = duckdb.DuckDBPyConnection

_AGAIN_S: Final = 0.02
"""An interrupt that comes between two statements of a read is lost, so it is sent until the reader has left."""


_RETRY_AFTER_S: Final = 5


@dataclass(slots=True, eq=False)
class Read:
    """One read on its cursor."""

    cursor: Cursor
    in_background: bool
    alone: bool
    why_out: str | None = None


class Readers:
    """The readers of the store `url`: at most `most` at once; who waits longer than `wait_s` is told so."""

    def __init__(self, url: str, most: int, wait_s: float) -> None:
        self.url, self.wait_s = url, wait_s
        self.guard = Condition()
        self.inside: list[Read] = []
        self._slots = BoundedSemaphore(most)
        self._shut: list[bool] = []
        self._wait_alone = 0

    @contextmanager
    def read(
        self,
        take: Callable[[], Cursor],
        give: Callable[[Cursor, bool], None],
        *,
        in_background: bool,
        alone: bool,
        deadline: Deadline | None = None,
    ) -> Iterator[Cursor]:
        """One read on the cursor that `take` gives and `give` gets back, with whether the read ended well; both under `guard`.

        alone      beside no other read; the others wait meanwhile
        deadline   until when it may wait for its turn, and read
        Raises StoreBusy where its turn does not come, OutOfMemory where it was sent out for a reason, Late.
        """
        since = time.monotonic()
        until = since + self.wait_s
        if not attempt(lambda wait_s: self._slots.acquire(timeout=wait_s), until, deadline):
            raise self._no_turn(since)
        try:
            with self.guard:
                self._come_in(since, until, deadline, in_background=in_background, alone=alone)
                read = Read(take(), in_background, alone)
                self.inside.append(read)
            ended_well = False
            try:
                with self._watched(read, deadline):
                    yield read.cursor
                ended_well = True
            except QueryKilled as error:
                if deadline is not None and deadline.is_over:
                    raise Late from error
                if read.why_out is None:
                    raise
                raise OutOfMemory(read.why_out, url=self.url, retry_after_s=_RETRY_AFTER_S) from error
            finally:
                with self.guard:
                    self.inside.remove(read)
                    give(read.cursor, ended_well)
                    self.guard.notify_all()
        finally:
            self._slots.release()

    @contextmanager
    def sent_out(
        self, why: str | None, *, only_background: bool = False, grace_s: float = 0.0, within_s: float
    ) -> Iterator[None]:
        """Meanwhile nobody reads: who is inside may end within `grace_s`, then is interrupted, and waited for `within_s` at most.

        why               what those are told who are interrupted; None: that their query was
        only_background   the others stay
        """
        with self.guard:
            self._shut.append(only_background)
        try:
            with self.guard:
                self.guard.wait_for(lambda: not self._meant(only_background), timeout=grace_s)
                until = time.monotonic() + within_s
                while (meant := self._meant(only_background)) and time.monotonic() < until:
                    for read in meant:
                        read.why_out = why
                        read.cursor.interrupt()
                    self.guard.wait(_AGAIN_S)
            yield
        finally:
            with self.guard:
                self._shut.remove(only_background)
                self.guard.notify_all()

    @contextmanager
    def _watched(self, read: Read, deadline: Deadline | None) -> Iterator[None]:
        """Meanwhile somebody looks at the deadline, and interrupts the read once it is over."""
        if deadline is None:
            yield
            return
        ended = Event()

        def watch() -> None:
            while not ended.wait(deadline.step_s or _AGAIN_S):
                with self.guard:
                    if deadline.is_over and read in self.inside:  # else its cursor may be another's
                        read.cursor.interrupt()

        watcher = Thread(target=watch, name="read-deadline", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _come_in(
        self, since: float, until: float, deadline: Deadline | None, *, in_background: bool, alone: bool
    ) -> None:
        """Wait until the door is open, and nobody wants to be alone, or is."""

        def may() -> bool:
            if any(in_background or not only_background for only_background in self._shut):
                return False
            return not self.inside if alone else not (self._wait_alone or any(read.alone for read in self.inside))

        self._wait_alone += alone
        try:
            if not attempt(lambda wait_s: self.guard.wait_for(may, timeout=wait_s), until, deadline):
                raise self._no_turn(since)
        finally:
            self._wait_alone -= alone
            self.guard.notify_all()

    def _meant(self, only_background: bool) -> list[Read]:
        return [read for read in self.inside if read.in_background or not only_background]

    def _no_turn(self, since: float) -> StoreBusy:
        return StoreBusy(
            f"All readers of {self.url} were busy for {round(time.monotonic() - since, 1):g} s. Ask for a smaller window, or again later.",
            url=self.url,
            retry_after_s=_RETRY_AFTER_S,
        )
