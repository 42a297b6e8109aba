"""Brings messages from the outbox to their receivers: at least once, in order, for as long as it takes - or to the dead letters.

A message is deleted from nobody's books before the receiver answered 2xx. If the collector dies between that answer and the note
of it, the message is sent again under the same `webhook-id`: that is why it is at least once and not exactly once. A receiver's
messages go one after the other, so an end never overtakes its beginning; receivers do not wait for each other: one that is slow, or
that comes back to a long queue, is served on a thread of its own while the others get theirs.
"""

from __future__ import annotations

import logging
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Lock, Thread
from typing import Final

from alerts.address_guard import Resolve
from alerts.post import post
from alerts.receivers import Receiver
from alerts.signature import headers as signed
from engine_probe.errors import AddressRefused, AlertError, AlertMisuse, DeliveryFailed, KvscopeError
from store.alert_book import AlertBook
from store.alert_rows import Changes, Delivery

log = logging.getLogger(__name__)

NS: Final = 1_000_000_000
AT_ONCE: Final = 64
"""Receivers that are sent to at the same time. Threads are made as they are needed."""
_USER_AGENT: Final = "kvscope"


@dataclass(frozen=True, slots=True)
class Patience:
    """Retries: the first after `first_s`, each after twice the time up to `limit_s`; dead after `give_up_s`."""

    first_s: float = 1.0
    limit_s: float = 300.0
    give_up_s: float = 86_400.0


class Courier:
    """A thread that sends what is due. `wake` makes it look at once."""

    def __init__(
        self,
        book: AlertBook,
        receivers: Sequence[Receiver],
        patience: Patience,
        *,
        on_end: Callable[[str, str], None] = lambda *_: None,
        clock: Callable[[], int] = time.time_ns,
        jitter: Callable[[], float] = random.random,
        resolve: Resolve | None = None,
    ) -> None:
        self._book, self._patience = book, patience
        self._receivers: Mapping[str, Receiver] = {receiver.name: receiver for receiver in receivers}
        self._contexts: dict[str, ssl.SSLContext | None] = {}
        self._on_end, self._clock, self._jitter, self._resolve = on_end, clock, jitter, resolve
        self._woken, self._stopping, self._lock = Event(), Event(), Lock()
        self._busy: set[str] = set()
        self._resting_ns: dict[str, int] = {}  # receivers whose book could not be read or written, until when
        self._unnoted: dict[str, Delivery] = {}  # what became of messages, where the book did not take it yet
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin, with what an earlier process left."""
        self._thread = Thread(target=self._run, name="kvscope-courier", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 15.0) -> None:
        """Let what is being sent end; the rest stays in the outbox."""
        self._stopping.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def wake(self) -> None:
        """There is something new."""
        self._woken.set()

    def run_once(self) -> float | None:
        """Send what is due; seconds until something is due again, None where nothing waits."""
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kvscope-courier") as pool:
            self._begin(pool)
        return self._until_due()

    def _begin(self, pool: ThreadPoolExecutor) -> None:
        """Serve every receiver that has something due and is not being served."""
        heads = self._book.next_deliveries()
        with self._lock:
            due = [
                head.receiver
                for head in heads
                if head.receiver not in self._busy and self._due_ns(head) <= self._clock()
            ]
            self._busy |= set(due)
        for name in due:
            pool.submit(self._serve, name).add_done_callback(partial(self._served, name))

    def _until_due(self) -> float | None:
        """Seconds until something is due for a receiver that is not being served; None where nothing is."""
        heads = self._book.next_deliveries()
        with self._lock:
            due = [self._due_ns(head) for head in heads if head.receiver not in self._busy]
        return None if not due else max(0.0, (min(due) - self._clock()) / NS)

    def _served(self, name: str, _: object) -> None:
        with self._lock:
            self._busy.discard(name)
        self._woken.set()

    def _due_ns(self, head: Delivery) -> int:
        """When a message is due; a wait that is longer than the longest means that the clock was set back meanwhile."""
        rest_ns, now_ns, longest_ns = self._resting_ns.get(head.receiver, 0), self._clock(), self._patience.limit_s * NS
        due_ns = max(head.next_ns, rest_ns)
        return due_ns if due_ns - now_ns <= longest_ns else now_ns

    def _serve(self, name: str) -> None:
        """A receiver's messages in order, up to the first that has to wait. What fails here is tried again after a rest."""
        try:
            while not self._stopping.is_set() and (delivery := self._book.next_delivery(name)) is not None:
                if self._due_ns(delivery) > self._clock():
                    return
                # sent before, and the book did not take it (a full disk): noted now, not sent again
                after = self._unnoted.get(delivery.delivery_id) or self._try(name, delivery)
                self._unnoted[delivery.delivery_id] = after
                self._book.save(Changes(deliveries=(after,)))
                del self._unnoted[delivery.delivery_id]
                if after.state != "waiting":
                    self._on_end(name, after.state)
            self._resting_ns.pop(name, None)
        except Exception as error:
            self._resting_ns[name] = self._clock() + round(self._patience.first_s * NS)
            if isinstance(error, KvscopeError):
                log.warning("outbox not read or written", extra={"receiver": name, "reason": error.message})
            else:
                log.exception("the courier stumbled", extra={"receiver": name})

    def _try(self, name: str, delivery: Delivery) -> Delivery:
        """One attempt, and what is true after it."""
        tried = replace(delivery, attempts=delivery.attempts + 1)
        try:
            self._send(name, delivery)
        except AlertError as error:
            after = self._failed(tried, error)
            level = logging.ERROR if after.state == "dead" else logging.WARNING
            facts = {"delivery_id": delivery.delivery_id, "receiver": name, "attempts": after.attempts}
            log.log(level, "delivery failed", extra={**facts, "state": after.state, "reason": error.message})
            return after
        except Exception as error:  # a defect of ours: this message waits like any that fails, and the others go on
            log.exception("delivery failed", extra={"delivery_id": delivery.delivery_id, "receiver": name})
            return self._failed(tried, DeliveryFailed(f"{type(error).__name__}: {error}", is_final=False))
        return replace(tried, state="delivered", ended_ns=self._clock(), message=None)

    def _send(self, name: str, delivery: Delivery) -> None:
        receiver = self._receivers.get(name)
        if receiver is None:
            raise AlertMisuse(f"there is no receiver {name!r} any more; replay it once there is")
        send(receiver, delivery, self._clock(), context=self._context(receiver), resolve=self._resolve)

    def _failed(self, tried: Delivery, error: AlertError) -> Delivery:
        """Again later, or dead: where trying again has no sense, or it was tried for long enough."""
        now_ns = self._clock()
        final = isinstance(error, AddressRefused | AlertMisuse) or bool(error.facts.get("is_final"))
        if final or now_ns - tried.created_ns >= self._patience.give_up_s * NS:
            return replace(tried, state="dead", ended_ns=now_ns, message=error.message)
        asked_s = error.facts.get("retry_after_s") if isinstance(error, DeliveryFailed) else None
        wait_s = backoff_s(self._patience, tried.attempts, self._jitter())
        wait_s = max(wait_s, min(float(asked_s), self._patience.limit_s)) if asked_s is not None else wait_s
        return replace(tried, next_ns=now_ns + round(wait_s * NS), message=error.message)

    def _context(self, receiver: Receiver) -> ssl.SSLContext | None:
        if receiver.name not in self._contexts:
            self._contexts[receiver.name] = trust(receiver)
        return self._contexts[receiver.name]

    def _run(self) -> None:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kvscope-courier") as pool:
            while not self._stopping.is_set():
                self._woken.clear()
                wait_s: float | None = self._patience.first_s
                try:
                    self._begin(pool)
                    wait_s = self._until_due()
                except KvscopeError as error:
                    log.warning("outbox not read", extra={"reason": error.message})
                except Exception:
                    log.exception("the courier stumbled")
                self._woken.wait(wait_s)


def send(
    receiver: Receiver,
    delivery: Delivery,
    now_ns: int,
    *,
    context: ssl.SSLContext | None = None,
    resolve: Resolve | None = None,
) -> None:
    """One attempt. Raises AddressRefused, DeliveryFailed."""
    body = delivery.body.encode()
    sent = {
        "Content-Type": delivery.content_type,
        "User-Agent": _USER_AGENT,
        "Kvscope-Delivery": delivery.delivery_id,
        "Kvscope-Attempt": str(delivery.attempts + 1),
    }
    if receiver.secret is not None:
        sent |= signed(receiver.secret, delivery.delivery_id, now_ns // NS, body)
    post(
        receiver.target,
        body,
        sent,
        secret_headers={} if receiver.bearer is None else {"Authorization": f"Bearer {receiver.bearer}"},
        allowed=receiver.networks,
        timeout_s=receiver.timeout_s,
        context=context or trust(receiver),
        resolve=resolve,
        now_s=lambda: now_ns / NS,
    )


def trust(receiver: Receiver) -> ssl.SSLContext | None:
    """What certificates are verified against; None where there is no TLS. Raises DeliveryFailed where they cannot be read."""
    try:
        return ssl.create_default_context(cafile=receiver.ca_file) if receiver.target.startswith("https") else None
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        raise DeliveryFailed(
            f"the certificates of {receiver.ca_file or 'this machine'} cannot be read: {error}", is_final=False
        ) from error


def backoff_s(patience: Patience, attempts: int, jitter: float) -> float:
    """Between a half and the whole of first_s * 2^(attempts - 1), at most limit_s: receivers are not all asked at once."""
    return min(patience.limit_s, patience.first_s * 2.0 ** min(attempts - 1, 40)) * (0.5 + jitter / 2)


def deliveries_of(
    receiver: Receiver, bodies: Sequence[str], delivery_id: str, group_key: str, now_ns: int
) -> list[Delivery]:
    """Messages for the outbox; several bodies of one notification are numbered."""
    ids = [delivery_id] if len(bodies) == 1 else [f"{delivery_id}.{number}" for number in range(1, len(bodies) + 1)]
    content_type = receiver.content_type if receiver.kind == "generic" else "application/json"
    return [
        Delivery(made, receiver.name, group_key, "waiting", content_type, body, now_ns, now_ns)
        for made, body in zip(ids, bodies, strict=True)
    ]
