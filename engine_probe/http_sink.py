"""Rows to a collector over HTTP: encoded by the caller, kept in a spool, sent by background threads.

`write` encodes and queues; it never waits for the network. Up to `max_in_flight` batches are under way at once, each on
its worker's own connection. What the collector may still take is tried again with growing waits (nothing answers, 429,
5xx); what it will never take (400, 413 of one row, 422, or 401 and its like again and again) is set aside and told by a
`gap` mark. A batch keeps its (epoch, seq) through all of this, so nothing is applied twice.
Invariant: memory is at most `max_bytes` (without a spool folder) plus two copies of `max_in_flight` batches.
Source: design section 5.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_probe.backoff import Backoff
from engine_probe.errors import ProbeError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.http_link import Answer, Link
    from engine_probe.parcels import Parcel

log = logging.getLogger(__name__)

DISK_BYTES: Final = 256 << 20
MEMORY_BYTES: Final = 64 << 20
BATCH_BYTES: Final = 4 << 20
_NEVER: Final = frozenset((400, 411, 415, 422))
_LATER: Final = frozenset((408, 425, 429))


@dataclass(frozen=True, slots=True)
class SinkStats:
    """What a sink did so far, and what it holds."""

    sent_batches: int
    sent_rows: int
    duplicate_batches: int
    failures: int
    dropped_rows: Mapping[str, int]
    pending_batches: int
    in_flight_batches: int
    held_bytes: int
    last_error: str | None


class HttpSink:
    """Sends to `url` (`http://host:8321`) as `source`.

    token          sent as a bearer token
    spool_dir      folder of its own that keeps batches while the collector is away, also over kill -9; None: memory
    max_bytes      bound of what is kept; default 256 MiB on disk, 64 MiB in memory
    max_in_flight  batches under way at once, 1 to 8
    timeout_s      longest wait for one answer
    patience       times that 401, 403, 404 and their like are tried again before a batch is set aside
    fsync          True: kept batches survive a power cut too
    Raises UsageError (address, source, bounds make no sense), ProbeError (the spool folder cannot be used).
    """

    def __init__(
        self,
        url: str,
        source: str,
        token: str | None = None,
        spool_dir: str | Path | None = None,
        *,
        max_bytes: int | None = None,
        max_batch_bytes: int = BATCH_BYTES,
        max_in_flight: int = 8,
        timeout_s: float = 10.0,
        patience: int = 8,
        compression: str | None = "lz4",
        fsync: bool = False,
        backoff: Backoff | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        from engine_probe.http_link import Address
        from engine_probe.spool import Spool
        from engine_probe.spool_files import DiskFiles, MemoryFiles

        if not 1 <= len(source) <= 200 or not source.isascii() or not source.isprintable():
            raise UsageError(f"source is {source!r}; expected 1 to 200 printable ASCII characters", source=source)
        if not 1 <= max_in_flight <= 8:
            raise UsageError(f"max_in_flight is {max_in_flight}; expected 1 to 8", max_in_flight=max_in_flight)
        self.address = Address.parse(url)
        self.source = source
        self._token = token
        self._on_disk = spool_dir is not None
        self._max_batch_bytes = max_batch_bytes
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._patience = patience
        self._compression = compression
        self._now_ns = now_ns
        self._pid = os.getpid()
        self._backoff = backoff or Backoff()
        files = MemoryFiles() if spool_dir is None else DiskFiles(spool_dir, fsync=fsync)
        bound = max_bytes or (MEMORY_BYTES if spool_dir is None else DISK_BYTES)
        self._spool = Spool(files, max_bytes=bound, source=source, now_ns=now_ns)
        self._changed = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._closing = self._stopped = False
        self._refusals = 0
        self._told: set[str] = set()
        self._sent_batches = self._sent_rows = self._duplicates = self._failures = 0
        self._last_error: str | None = None
        atexit.register(self.close)
        self._start_workers()

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Queue rows; does not wait for the network. Raises ProbeError when closed, InvalidRows for a foreign table."""
        from engine_probe.parcels import pack

        if self._closing:
            raise ProbeError(f"the sink to {self.address} is closed", address=str(self.address))
        self._spool.append(pack(tables, self._max_batch_bytes, self._compression))
        self._start_workers()
        with self._changed:
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is delivered or set aside; False where `timeout_s` was not enough."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(self._is_empty, max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float = 5.0) -> None:
        """Try to deliver what is held for at most about `timeout_s`; what is on disk stays there for the next start."""
        if os.getpid() != self._pid:
            return  # a forked child has the object, but not the threads, nor the right to the spool
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._backoff.hurry()
            failed_before = self._failures
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._is_empty() or (self._on_disk and self._failures > failed_before), timeout_s
            )
            self._stopped = True
            self._changed.notify_all()
            left = self._spool.num_pending + self._spool.num_in_flight
        for worker in self._workers:
            worker.join(0.2)
        self._spool.close()
        atexit.unregister(self.close)
        if left and self._on_disk:
            log.info("batches stay in the spool for the next start", extra={"batches": left})
        elif left:
            log.warning("batches lost at the end of the process: no spool folder", extra={"batches": left})

    @property
    def stats(self) -> SinkStats:
        """Counts so far. They are read one after another, not at one instant."""
        return SinkStats(
            self._sent_batches,
            self._sent_rows,
            self._duplicates,
            self._failures,
            dict(self._spool.dropped),
            self._spool.num_pending,
            self._spool.num_in_flight,
            self._spool.num_bytes,
            self._last_error,
        )

    def _is_empty(self) -> bool:
        return self._spool.num_pending + self._spool.num_in_flight == 0

    def _start_workers(self) -> None:
        """One worker a pending batch, up to the bound; while nothing answers, one is enough."""
        with self._changed:
            wanted = min(self._spool.num_pending + self._spool.num_in_flight, self._max_in_flight)
            if self._backoff.failures:
                wanted = min(wanted, 1)
            while len(self._workers) < wanted:
                name = f"kvscope-send-{len(self._workers)}"
                self._workers.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._workers[-1].start()

    def _work(self) -> None:
        from engine_probe.http_link import Link

        link = Link(self.address, self._timeout_s)
        while (parcel := self._next()) is not None:
            try:
                self._deliver(link, parcel)
            except Exception as error:
                # A mistake of ours must not end the thread and leave the batch in flight for ever.
                log.exception("batch not sent")
                self._fail(parcel, f"{type(error).__name__}: {error}", time.monotonic())
            with self._changed:
                self._changed.notify_all()
        link.close()

    def _next(self) -> Parcel | None:
        """Wait for a batch that may be tried now; None at the end."""
        with self._changed:
            while not self._stopped:
                wait_s = self._backoff.resume_at_s - time.monotonic()
                # While nothing answers, one worker tries for all.
                if wait_s <= 0 and not (self._backoff.failures and self._spool.num_in_flight):
                    parcel = self._spool.take()
                    if parcel is not None:
                        return parcel
                self._changed.wait(wait_s if wait_s > 0 and self._spool.num_pending else None)
        return None

    def _deliver(self, link: Link, parcel: Parcel) -> None:
        from engine_probe.http_link import LinkDown

        started_s = time.monotonic()
        try:
            answer = link.post(parcel.body, self._headers(parcel))
        except LinkDown as error:
            self._fail(parcel, f"{self.address} does not answer: {error}", started_s)
            return
        self._judge(parcel, answer, started_s)

    def _headers(self, parcel: Parcel) -> dict[str, str]:
        from engine_probe.codec import ARROW_CONTENT_TYPE

        headers = {
            "Content-Type": ARROW_CONTENT_TYPE,
            "Kvscope-Source": self.source,
            "Kvscope-Epoch": parcel.key.epoch,
            "Kvscope-Seq": str(parcel.key.seq),
            "Kvscope-Sent-Ns": str(self._now_ns()),
        }
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _judge(self, parcel: Parcel, answer: Answer, started_s: float) -> None:
        status = answer.status
        words = f"{self.address} answered {status}: {answer.body[:300].decode('utf-8', 'replace').strip()}"
        if 200 <= status < 300:
            receipt = _receipt(answer.body)
            if receipt is None:
                self._fail(parcel, f"{self.address} is no collector: it answered {status} without a receipt", started_s)
            else:
                self._succeed(parcel, receipt)
        elif status in _LATER or status >= 500:
            self._fail(parcel, words, started_s, answer.retry_after_s)
        elif status == 413 or (status == 422 and len(parcel.segments) > 1):
            # 422: one bad kind must not take the others with it.
            self._split(parcel, words, started_s)
        elif status in _NEVER:
            self._refuse(parcel, "refused", words)
        else:
            with self._changed:
                self._refusals += 1
                patient = self._refusals < self._patience
            if patient:
                self._fail(parcel, words, started_s)
            else:
                self._refuse(parcel, "refused", words)

    def _succeed(self, parcel: Parcel, receipt: Mapping[str, Any]) -> None:
        self._spool.ack(parcel)
        with self._changed:
            self._backoff.succeed()
            self._refusals = 0
            self._told.clear()
            self._sent_batches += 1
            self._duplicates += bool(receipt.get("duplicate"))
            self._sent_rows += parcel.num_rows
        self._start_workers()

    def _split(self, parcel: Parcel, words: str, started_s: float) -> None:
        try:
            is_split = self._spool.split(parcel)
        except OSError as error:
            self._fail(parcel, f"the spool cannot be written: {error}", started_s)
            return
        if not is_split:
            self._refuse(parcel, "too_large", words)

    def _refuse(self, parcel: Parcel, reason: str, words: str) -> None:
        self._spool.refuse(parcel, reason, words)
        with self._changed:
            self._last_error = words
            self._backoff.hurry()
        self._tell(reason + words[:80], "batch refused for good, set aside", words)

    def _fail(self, parcel: Parcel, words: str, started_s: float, at_least_s: float = 0.0) -> None:
        with self._changed:
            self._failures += 1
            self._last_error = words
            self._backoff.fail(started_s, time.monotonic(), at_least_s)
        self._spool.release(parcel)
        self._tell("later", "batch not delivered, tried again", words)

    def _tell(self, what: str, message: str, words: str) -> None:
        """Log once until something is delivered again."""
        with self._changed:
            is_new = what not in self._told
            self._told.add(what)
        if is_new:
            log.warning(message, extra={"source": self.source, "answer": words})


def _receipt(body: bytes) -> Mapping[str, Any] | None:
    """The collector's answer to a batch; None where this is not one."""
    import msgspec

    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and ("accepted" in answer or "duplicate" in answer) else None
