"""What all connections of one proxy share: upstreams, options, counters, and who observes.

The reading half plugs in here (`Observers`), so that the wire half can be run and tested without it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol
from uuid import uuid4

from engine_probe.proxy.exchange import Exchange
from engine_probe.proxy.heads import Header, RequestHead, ResponseHead
from engine_probe.proxy.upstreams import Balancer, Choice, Upstream

if TYPE_CHECKING:
    from engine_probe.proxy.client_side import ClientConnection

log = logging.getLogger(__name__)

OWN_PREFIX: Final = b"x-kvscope-"
"""Headers that are addressed to the proxy: it reads them and takes them off."""
_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,512}\Z")


class Observer(Protocol):
    """Looks at one exchange. Whatever it raises is caught; it is never waited for. Instants are monotonic ns."""

    def request_pieces(self, pieces: Sequence[bytes]) -> None:
        """Payload of the request, as it was passed on."""
        ...

    def routed(self, choice: Choice, begun_ns: int, now_ns: int) -> None:
        """An upstream was chosen."""
        ...

    def retried(self, reason: str) -> None:
        """The chosen upstream could not be used; another may follow."""
        ...

    def answered(self, head: ResponseHead, now_ns: int) -> None:
        """The final head of the answer came."""
        ...

    def payload(self, pieces: Sequence[bytes], now_ns: int) -> None:
        """Payload of the answer, which came at this instant."""
        ...

    def stalled(self, now_ns: int, is_stalled: bool) -> None:
        """The client does not keep up (or does again)."""
        ...

    def unreadable(self) -> None:
        """What comes from here on cannot be read; it is passed on all the same."""
        ...

    def ended(self, how: str, error: str | None, status: int | None, now_ns: int) -> None:
        """how: complete, failed, aborted, refused. status: what the proxy itself answered, where it did."""
        ...


class Observers(Protocol):
    """Makes observers, and hears of upstreams."""

    def observe(self, head: RequestHead, request_id: str, arrival_ns: int) -> Observer | None:
        """An observer for this request; None where it is not recorded."""
        ...

    def upstream_changed(self, upstream: Upstream, reason: str | None, now_ns: int) -> None:
        """It could not be connected to, for this reason; None: it can again."""
        ...


class Context:
    """One proxy's shared state.

    repeats_posts   a POST whose upstream broke off before a byte of an answer may go to another one
    max_open        most connections of clients at once
    """

    def __init__(
        self,
        balancer: Balancer,
        observers: Observers | None,
        *,
        loop: asyncio.AbstractEventLoop,
        connect_timeout_s: float = 5.0,
        repeats_posts: bool = False,
        max_open: int = 10_000,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.balancer = balancer
        self.loop = loop
        self.connect_timeout_s = connect_timeout_s
        self.repeats_posts = repeats_posts
        self.is_draining = False
        self.now_ns = monotonic_ns
        self.clients: set[ClientConnection] = set()
        self.num_requests = 0
        self.num_refused = 0
        self.num_observer_failures = 0
        self._observers = observers
        self._max_open = max_open

    def admit(self, client: ClientConnection) -> bool:
        """Take note of a new connection; False where there are too many."""
        self.clients.add(client)
        return len(self.clients) <= self._max_open

    def forget(self, client: ClientConnection) -> None:
        self.clients.discard(client)

    def new_exchange(self, client: ClientConnection, head: RequestHead, arrival_ns: int) -> Exchange:
        """An exchange for this request. Its id is the client's X-Request-Id, or a new one."""
        self.num_requests += 1
        sent = head.get(b"x-request-id")
        request_id = sent.decode("ascii") if sent is not None and _PRINTABLE.match(sent) else uuid4().hex
        observer = None
        if self._observers is not None:
            try:
                observer = self._observers.observe(head, request_id, arrival_ns)
            except Exception as error:
                self.observer_failed(error)
        return Exchange(self, client, head, request_id, observer)

    def request_headers(self, head: RequestHead, upstream: Upstream, request_id: str) -> list[Header]:
        """The headers that go to this upstream."""
        headers = [(b"Host", upstream.host_header)]
        sent_id = request_id.encode("ascii")
        has_id = False
        for name, value in head.passed_on():
            lower = name.lower()
            if lower == b"host" or lower.startswith(OWN_PREFIX):
                continue
            if lower == b"x-request-id":
                has_id, value = True, sent_id
            headers.append((name, value))
        if not has_id:
            headers.append((b"X-Request-Id", sent_id))
        return headers

    def answer_headers(self, answer: ResponseHead, request_id: str) -> list[Header]:
        """The headers that go to the client: the upstream's, and the id where it does not say one."""
        headers = list(answer.passed_on())
        if answer.get(b"x-request-id") is None:
            headers.append((b"X-Request-Id", request_id.encode("ascii")))
        return headers

    def upstream_failed(self, upstream: Upstream, reason: str) -> None:
        if upstream.failed(time.monotonic()):
            log.warning("upstream does not answer", extra={"upstream": upstream.name, "reason": reason})
            if self._observers is not None:
                self._observers.upstream_changed(upstream, reason, self.now_ns())

    def upstream_answered(self, upstream: Upstream) -> None:
        if upstream.answered():
            log.info("upstream answers again", extra={"upstream": upstream.name})
            if self._observers is not None:
                self._observers.upstream_changed(upstream, None, self.now_ns())

    def observer_failed(self, error: Exception) -> None:
        """Said once; counted always. Neither the error's text nor its traceback is logged: they may hold content."""
        self.num_observer_failures += 1
        if self.num_observer_failures == 1:
            log.error("an answer could not be observed", extra={"error": type(error).__name__, "at": _where(error)})


def _where(error: Exception) -> str:
    """Module and line where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}"
