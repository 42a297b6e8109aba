"""Runs the server: uvicorn over a socket that listens since before the model was loaded, and an end that loses no answer.

The first SIGTERM or SIGINT refuses new requests (503) and lets those under way finish; after `drain_s` they end with an
error that says so. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from engine_probe.engine.server.front_end import FrontEnd

log = logging.getLogger(__name__)

CLOSING_S = 2


class Server(uvicorn.Server):
    """on_ready: called when the first request can be answered."""

    def __init__(
        self, app: ASGIApp, front: FrontEnd, *, drain_s: float = 30.0, on_ready: Callable[[], None] | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=CLOSING_S,
            )
        )
        self._front = front
        self._drain_s = drain_s
        self._drain_until: float | None = None
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin: the engine's pieces come to this loop."""
        self._front.thread.start(asyncio.get_running_loop())
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain; second: end now."""
        if self._drain_until is None:
            self.drain()
        else:
            self.should_exit = True

    def drain(self) -> None:
        """Take nothing new; end when nothing is under way. From the loop's thread or a signal."""
        self._front.accepts = False
        self._drain_until = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Every 100 ms: leave once drained, or when time is up."""
        if self._drain_until is not None and not self.should_exit:
            if self._front.num_open == 0:
                self.should_exit = True
            elif time.monotonic() > self._drain_until:
                log.warning("drain timed out", extra={"requests": self._front.num_open})
                self._front.end_all()
                self.should_exit = True
        return await super().on_tick(counter)


def serve(server: Server, sock: socket.socket) -> None:
    """Until a signal ends it. The engine is closed afterwards by its owner."""
    with contextlib.closing(sock):
        server.run(sockets=[sock])
