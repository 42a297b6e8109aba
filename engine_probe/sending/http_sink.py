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
from typing import TYPE_CHECKING, Final

from engine_probe.errors import ProbeError, UsageError
from engine_probe.sending.backoff import Backoff

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

DISK_BYTES: Final = 256 << 20
MEMORY_BYTES: Final = 64 << 20
BATCH_BYTES: Final = 4 << 20


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
        from engine_probe.sending.http_link import Address
        from engine_probe.sending.sender import Sender
        from engine_probe.sending.spool import Spool
        from engine_probe.sending.spool_disk import DiskFiles
        from engine_probe.sending.spool_files import MemoryFiles

        if not 1 <= len(source) <= 200 or not source.isascii() or not source.isprintable() or source != source.strip():
            raise UsageError(
                f"source is {source!r}; expected 1 to 200 printable ASCII characters, no space at an end", source=source
            )
        if not 1 <= max_in_flight <= 8:
            raise UsageError(f"max_in_flight is {max_in_flight}; expected 1 to 8", max_in_flight=max_in_flight)
        if token is not None and not (token and token.isascii() and token.isprintable()):
            raise UsageError("the token is empty or holds characters that no header can carry")
        self.address = Address.parse(url)
        self.source = source
        self._on_disk = spool_dir is not None
        self._max_batch_bytes = max_batch_bytes
        self._compression = compression
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        files = MemoryFiles() if spool_dir is None else DiskFiles(spool_dir, fsync=fsync)
        bound = max_bytes or (MEMORY_BYTES if spool_dir is None else DISK_BYTES)
        self._spool = Spool(files, max_bytes=bound, source=source, now_ns=now_ns)
        self._sender = Sender(
            self._spool,
            self.address,
            source,
            token=token,
            max_in_flight=max_in_flight,
            timeout_s=timeout_s,
            patience=patience,
            backoff=backoff or Backoff(),
            now_ns=now_ns,
        )
        atexit.register(self.close)
        self._sender.wake()

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Queue rows; does not wait for the network. Raises ProbeError when closed, InvalidRows for a foreign table."""
        from engine_probe.sending.parcels import pack

        if self._is_closed or os.getpid() != self._pid:
            why = "is closed" if self._is_closed else "was made before a fork; make one in each process"
            raise ProbeError(f"the sink to {self.address} {why}", address=str(self.address))
        self._spool.append(pack(tables, self._max_batch_bytes, self._compression))
        self._sender.wake()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is delivered or set aside; False where `timeout_s` was not enough."""
        return self._sender.drain(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Try to deliver what is held for at most about `timeout_s`; what is on disk stays there for the next start."""
        if os.getpid() != self._pid:
            return  # a forked child has the object, but not the threads, nor the right to the spool
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        left = self._sender.finish(timeout_s, gives_up=self._on_disk)
        self._spool.close()
        if left and self._on_disk:
            log.info("batches stay in the spool for the next start", extra={"batches": left})
        elif left:
            log.warning("batches lost at the end of the process: no spool folder", extra={"batches": left})

    @property
    def stats(self) -> SinkStats:
        """Counts so far. They are read one after another, not at one instant."""
        return SinkStats(
            self._sender.sent_batches,
            self._sender.sent_rows,
            self._sender.duplicates,
            self._sender.failures,
            dict(self._spool.dropped),
            self._spool.num_pending,
            self._spool.num_in_flight,
            self._spool.num_bytes,
            self._sender.last_error,
        )
