"""The listening socket, its slow clock, and its end: stop taking, let answers finish, close."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from engine_probe.errors import UsageError
from engine_probe.proxy.client_side import ClientConnection
from engine_probe.proxy.context import Context
from engine_probe.proxy.upstreams import now_s

SWEEP_S: Final = 1.0
BACKLOG: Final = 4096
_DRAIN_STEP_S: Final = 0.05


class ProxyServer:
    """`start`, then `drain`. `address` is what it listens on."""

    def __init__(self, context: Context, host: str, port: int) -> None:
        self._context = context
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Listen. Raises UsageError where the address cannot be used."""
        try:
            self._server = await self._context.loop.create_server(
                lambda: ClientConnection(self._context), self._host, self._port, backlog=BACKLOG
            )
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"{self._host}:{self._port} cannot be listened on ({reason}); choose another --listen HOST:PORT.",
                host=self._host,
                port=self._port,
            ) from error
        for sock in self._server.sockets:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sweeper = self._context.loop.create_task(self._sweep())

    async def drain(self, timeout_s: float) -> int:
        """Take no more; wait for answers under way at most `timeout_s`, then break them off. Returns how many were."""
        context = self._context
        context.is_draining = True
        if self._server is not None:
            self._server.close()
        for client in list(context.clients):
            client.drain()
        deadline = now_s() + timeout_s
        while context.clients and now_s() < deadline:
            await asyncio.sleep(_DRAIN_STEP_S)
        left = [client for client in list(context.clients) if client.exchange is not None]
        for client in left:
            if client.exchange is not None:
                client.exchange.stop()
        for client in list(context.clients):
            client.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for upstream in context.balancer.upstreams:
            for connection in upstream.idle:
                connection.abort()
            upstream.idle.clear()
        await asyncio.sleep(0)
        return len(left)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_ns = self._context.now_ns()
            for client in list(self._context.clients):
                client.sweep(now_ns)
            for upstream in self._context.balancer.upstreams:
                upstream.sweep(now_s())
