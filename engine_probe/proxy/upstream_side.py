"""The proxy's end towards an engine: a connection that belongs to one exchange, or waits idle for the next.

Bytes that come while it is idle belong to no request: whoever sends them is not trusted with another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_probe.proxy.link import Link, buffer
from engine_probe.proxy.upstreams import now_s

if TYPE_CHECKING:
    from engine_probe.proxy.exchange import Exchange


class UpstreamConnection(Link):
    """`exchange` is the request it works for, None while it is idle."""

    __slots__ = (
        "closed_s",
        "exchange",
        "idle_since_s",
        "num_requests",
        "usable_from_s",
    )

    def __init__(self) -> None:
        super().__init__()
        self.exchange: Exchange | None = None
        self.idle_since_s = 0.0
        self.usable_from_s = 0.0
        self.closed_s = 0.0
        self.num_requests = 0

    def buffer_updated(self, nbytes: int) -> None:
        exchange = self.exchange
        if exchange is None:
            self.abort()
        else:
            exchange.upstream_data(bytes(buffer[:nbytes]))

    def eof_received(self) -> bool:
        # Not left to the transport, which would wait until everything written is taken: nobody may be reading any more.
        self._ended(None)
        self.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.exchange is not None:
            self.exchange.client.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.exchange is not None:
            self.exchange.client.resume_reading()

    def _ended(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        self.closed_s = self.closed_s or now_s()
        if exchange is not None:
            exchange.upstream_ended(exc)
