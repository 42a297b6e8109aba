"""The bounded queue between those who append and the one who writes.

Invariant: what is taken is taken in order and once; a full queue refuses at once (StoreBusy with `retry_after_s`), so
that a slow disk is felt by the senders, who keep their batches, and never as memory here.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from engine_probe.errors import StoreBusy, StoreError
from store.interface import Batch, Receipt


@dataclass(slots=True, eq=False)
class Append:
    """A batch on its way, with its answer to be."""

    batch: Batch
    received_ns: int
    num_rows: int
    num_bytes: int
    answer: Future[Receipt] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class Job:
    """Work that must run between two commits (deleting, sealing): called with the writer's connection.

    is_transaction   it is one transaction, so it may be called again where it failed for want of memory
    """

    work: Callable[[Any], Any]
    is_transaction: bool = False
    answer: Future[Any] = field(default_factory=Future)


class WriteQueue:
    """Batches and jobs in order, bounded in batches and bytes."""

    def __init__(self, url: str, max_batches: int, max_bytes: int) -> None:
        self._url = url
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._items: deque[Append | Job] = deque()
        self._num_batches = self._num_bytes = self._num_rows = 0
        self._bytes_per_s = 0.0
        self._closed = False
        self._changed = Condition()

    def put(self, item: Append | Job) -> None:
        """Queue an item; StoreBusy when full (jobs always fit), StoreError when closed."""
        with self._changed:
            if self._closed:
                raise StoreError(f"The store {self._url} is closed. Open it again.", url=self._url)
            if isinstance(item, Append):
                full = self._num_batches >= self._max_batches or self._num_bytes + item.num_bytes > self._max_bytes
                if full and self._num_batches:
                    raise StoreBusy(
                        f"The store {self._url} has {self._num_batches} batches ({self._num_bytes / 1e6:.0f} MB) "
                        f"waiting for the disk and takes no more. Send the batch again in {self._retry_after_s()} s.",
                        url=self._url,
                        retry_after_s=self._retry_after_s(),
                    )
                self._num_batches += 1
                self._num_bytes += item.num_bytes
                self._num_rows += item.num_rows
            self._items.append(item)
            self._changed.notify()

    def take(self, max_rows: int, ready_at: float = 0.0) -> list[Append] | Job | None:
        """The next job, or the waiting batches up to `max_rows` rows. Waits; None once closed and empty.

        ready_at   until this instant (time.monotonic) batches wait for others to come, unless they are many or a job waits
        """
        with self._changed:
            while not self._items or (self._may_gather(max_rows) and time.monotonic() < ready_at):
                if self._items:
                    self._changed.wait(ready_at - time.monotonic())
                elif self._closed:
                    return None
                else:
                    self._changed.wait()
            if isinstance(self._items[0], Job):
                job = self._items.popleft()
                assert isinstance(job, Job)
                return job
            return self._pop_batches(max_rows)

    def more(self, max_rows: int) -> list[Append]:
        """Batches that are at the head right now, up to `max_rows` rows; does not wait."""
        with self._changed:
            return self._pop_batches(max_rows)

    def withdraw(self, item: Append) -> bool:
        """Take a batch back that nobody has taken yet; False where the writer has it."""
        with self._changed:
            try:
                self._items.remove(item)
            except ValueError:
                return False
            self._forget(item)
            return True

    def wrote(self, num_bytes: int, seconds: float) -> None:
        """Tell how fast the disk is, so that `retry_after_s` is honest."""
        rate = num_bytes / max(seconds, 1e-6)
        self._bytes_per_s = rate if not self._bytes_per_s else 0.8 * self._bytes_per_s + 0.2 * rate

    def close(self) -> None:
        """Take no more; what is queued is still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def depth(self) -> tuple[int, int]:
        """(batches, bytes) that wait."""
        return self._num_batches, self._num_bytes

    def _may_gather(self, max_rows: int) -> bool:
        return not self._closed and len(self._items) == self._num_batches and 2 * self._num_rows < max_rows

    def _pop_batches(self, max_rows: int) -> list[Append]:
        group: list[Append] = []
        num_rows = 0
        while self._items and isinstance(item := self._items[0], Append):
            if group and num_rows + item.num_rows > max_rows:
                break
            self._items.popleft()
            self._forget(item)
            group.append(item)
            num_rows += item.num_rows
        return group

    def _forget(self, item: Append) -> None:
        self._num_batches -= 1
        self._num_bytes -= item.num_bytes
        self._num_rows -= item.num_rows

    def _retry_after_s(self) -> int:
        if not self._bytes_per_s:
            return 1
        return min(60, max(1, math.ceil(self._num_bytes / self._bytes_per_s)))
