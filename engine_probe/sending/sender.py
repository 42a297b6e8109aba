"""The threads that bring a spool's batches to a collector, and what each answer means.

Up to `max_in_flight` workers, each with its own connection. While nothing answers one of them tries for all, after
waits that grow; Retry-After is kept. An answer is taken at its word: delivered, later, too large (cut in two), never.
Invariant: a batch taken from the spool is acknowledged, released, split or refused exactly once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from engine_probe.sending.backoff import Backoff
from engine_probe.sending.http_link import Address, Answer, Link, LinkDown
from engine_probe.wire.codec import ARROW_CONTENT_TYPE

if TYPE_CHECKING:
    from engine_probe.sending.parcels import Parcel
    from engine_probe.sending.spool import Spool

log = logging.getLogger(__name__)

_NEVER: Final = frozenset((400, 411, 415, 422))
_LATER: Final = frozenset((408, 425, 429))


class Sender:
    """Delivers what is in `spool` to `address` as `source`.

    patience   times that 401, 403, 404 and their like are tried again before a batch is set aside
    now_ns     wall clock of the header Kvscope-Sent-Ns
    """

    def __init__(
        self,
        spool: Spool,
        address: Address,
        source: str,
        *,
        token: str | None,
        max_in_flight: int,
        timeout_s: float,
        patience: int,
        backoff: Backoff,
        now_ns: Callable[[], int],
    ) -> None:
        self._spool = spool
        self._address = address
        self._source = source
        self._token = token
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._patience = patience
        self._backoff = backoff
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._stopped = False
        self._refusals = 0
        self._told: set[str] = set()
        self.sent_batches = self.sent_rows = self.duplicates = self.failures = 0
        self.last_error: str | None = None

    def wake(self) -> None:
        """There is something to send."""
        self._start_workers()
        with self._changed:
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is delivered or set aside; False where `timeout_s` was not enough."""
        with self._changed:
            return self._changed.wait_for(self._is_empty, timeout_s)

    def finish(self, timeout_s: float, *, gives_up: bool) -> int:
        """Try at once what is left, then stop the threads; returns the batches that are left.

        gives_up   stop at the first failure: what is left is kept for another process. A collector that did not
                   answer before gets one more try in any case, and no more
        """
        with self._changed:
            gives_up = gives_up or self._backoff.failures > 0
            self._backoff.hurry()
            before = self.failures
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_empty() or (gives_up and self.failures > before), timeout_s)
            self._stopped = True
            self._changed.notify_all()
            left = self._spool.num_pending + self._spool.num_in_flight
        for worker in self._workers:
            worker.join(0.2)  # one that waits for an answer is left alone: it is a daemon
        return left

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
        link = Link(self._address, self._timeout_s)
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
        started_s = time.monotonic()
        try:
            answer = link.post(parcel.body, self._headers(parcel))
        except LinkDown as error:
            self._fail(parcel, f"{self._address} does not answer: {error}", started_s)
            return
        self._judge(parcel, answer, started_s)

    def _headers(self, parcel: Parcel) -> dict[str, str]:
        headers = {
            "Content-Type": ARROW_CONTENT_TYPE,
            "Kvscope-Source": self._source,
            "Kvscope-Epoch": parcel.key.epoch,
            "Kvscope-Seq": str(parcel.key.seq),
            "Kvscope-Sent-Ns": str(self._now_ns()),
        }
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _judge(self, parcel: Parcel, answer: Answer, started_s: float) -> None:
        status = answer.status
        words = f"{self._address} answered {status}: {answer.body[:300].decode('utf-8', 'replace').strip()}"
        if 200 <= status < 300:
            receipt = _receipt(answer.body)
            if receipt is None:
                self._fail(
                    parcel, f"{self._address} is no collector: it answered {status} without a receipt", started_s
                )
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
            self.sent_batches += 1
            self.duplicates += bool(receipt.get("duplicate"))
            self.sent_rows += parcel.num_rows
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
            self.last_error = words
            self._backoff.hurry()
        self._tell(reason + words[:80], "batch refused for good, set aside", words)

    def _fail(self, parcel: Parcel, words: str, started_s: float, at_least_s: float = 0.0) -> None:
        with self._changed:
            self.failures += 1
            self.last_error = words
            self._backoff.fail(started_s, time.monotonic(), at_least_s)
        self._spool.release(parcel)
        self._tell("later", "batch not delivered, tried again", words)

    def _tell(self, what: str, message: str, words: str) -> None:
        """Log once until something is delivered again."""
        with self._changed:
            is_new = what not in self._told
            self._told.add(what)
        if is_new:
            log.warning(message, extra={"source": self._source, "answer": words})


def _receipt(body: bytes) -> Mapping[str, Any] | None:
    """The collector's answer to a batch; None where this is not one."""
    import msgspec

    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and ("accepted" in answer or "duplicate" in answer) else None
