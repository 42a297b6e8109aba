"""The proxy's end towards a client: one request after another on a connection that stays, each handed to an exchange.

A request that comes while the one before is being answered waits in the buffer (pipelining); no two of a connection
are worked on at once, so answers keep their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_probe.proxy.heads import END, MAX_HEAD_BYTES, BadHead, RequestHead, parse_request
from engine_probe.proxy.link import READ_BYTES, Link
from engine_probe.proxy.refusals import refusal

if TYPE_CHECKING:
    import asyncio

    from engine_probe.proxy.context import Context
    from engine_probe.proxy.exchange import Exchange

HEAD_S: Final = 30.0
IDLE_S: Final = 120.0
LINGER_BYTES: Final = 1 << 22
LINGER_S: Final = 2.0


class ClientConnection(Link):
    """`exchange` is the request that is being answered, None between requests."""

    __slots__ = (
        "_buffer",
        "_context",
        "_has_ended",
        "_linger_timer",
        "_lingering",
        "_since_ns",
        "exchange",
    )

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self.exchange: Exchange | None = None
        self._buffer = b""
        self._since_ns = 0
        self._has_ended = False
        self._lingering: int | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._since_ns = self._context.now_ns()
        if not self._context.admit(self):
            self._refuse(503, "There are as many open connections as this proxy takes.")

    def received(self, data: bytes) -> None:
        if self._lingering is not None:
            self._lingering += len(data)
            if self._lingering > LINGER_BYTES:
                self.abort()
            return
        if self.exchange is not None and not self.exchange.request_done:
            data = self.exchange.request_data(data)
            if not data:
                return
        if not self._buffer:
            self._since_ns = self._context.now_ns()
        self._buffer += data
        if self.exchange is None:
            self._next()
        elif len(self._buffer) > READ_BYTES:
            self.pause_reading()

    def eof_received(self) -> bool:
        self._has_ended = True
        if self.exchange is None or self._lingering is not None:
            return False
        self.exchange.client_ended()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._context.forget(self)
        if self.exchange is not None:
            self.exchange.client_lost()
            self.exchange = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.exchange is not None:
            self.exchange.client_paused(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.exchange is not None:
            self.exchange.client_paused(False)

    def exchange_over(self, *, keep: bool, request_done: bool) -> None:
        """The answer is complete. keep: another request may follow."""
        self.exchange = None
        if not self.is_open:
            return
        if not request_done:
            self._linger()
        elif not keep or self._has_ended or self._context.is_draining:
            self.close()
        else:
            self._since_ns = self._context.now_ns()
            self.resume_reading()
            # Not from here: an exchange that is over is still on the stack, and a pipeline of them would grow it.
            if self._buffer:
                self._context.loop.call_soon(self._next)

    def sweep(self, now_ns: int) -> None:
        """Close what has been silent too long between requests, or does not get its head done."""
        if self.exchange is None and self._lingering is None and self.is_open:
            waited_s = (now_ns - self._since_ns) / 1e9
            if self._buffer and waited_s > HEAD_S:
                self._refuse(408, f"The request's head did not come within {HEAD_S:g} s.")
            elif not self._buffer and waited_s > IDLE_S:
                self.close()

    def drain(self) -> None:
        """No request is taken any more; one that is being answered is answered."""
        if self.exchange is None:
            self.close()

    def _next(self) -> None:
        """Begin the request whose head is complete, if there is one."""
        if self.exchange is not None or not self.is_open or self._lingering is not None:
            return
        # A client may send an empty line too many after a body (RFC 9112, section 2.2).
        if self._buffer.startswith(b"\r\n"):
            self._buffer = self._buffer.lstrip(b"\r\n")
        end = self._buffer.find(END)
        if end < 0 and len(self._buffer) <= MAX_HEAD_BYTES:
            return
        if end < 0 or end > MAX_HEAD_BYTES:
            self._refuse(431, "The request's head is longer than 64 KiB.")
            return
        block, rest = self._buffer[: end + 4], self._buffer[end + 4 :]
        self._buffer = b""
        try:
            head = parse_request(block)
        except BadHead as error:
            self._refuse(error.status, f"This cannot be passed on: {error.problem}.")
            return
        if head.upgrade is not None and head.upgrade != b"h2c":
            self._refuse(
                501,
                f"Upgrade to {head.upgrade.decode('latin-1')} is not passed on: kvscope proxy carries HTTP requests and "
                "their (streamed) answers. Connect to the engine itself for this.",
            )
            return
        self._begin(head, rest)

    def _begin(self, head: RequestHead, rest: bytes) -> None:
        if self._context.is_draining:
            self._refuse(503, "This proxy is stopping.")
            return
        self.exchange = exchange = self._context.new_exchange(self, head, self._since_ns)
        # Before there is a connection, so that a short request leaves in one piece.
        if rest and not exchange.request_done:
            rest = exchange.request_data(rest)
        self._buffer = rest + self._buffer
        if self.exchange is exchange:
            exchange.start()
        if self._buffer:
            self._since_ns = self._context.now_ns()

    def _refuse(self, status: int, problem: str) -> None:
        self._context.num_refused += 1
        head, body = refusal(status, problem)
        self.write(head + body)
        self._buffer = b""
        self._linger()

    def _linger(self) -> None:
        """Close in a way that lets the client read what was sent though it is still sending itself: no reset."""
        self._lingering = 0
        self.write_eof()
        self.resume_reading()
        self._linger_timer = self._context.loop.call_later(LINGER_S, self.abort)
