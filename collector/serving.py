"""Runs the app under uvicorn: slow headers cut off, and a stop that loses nothing.

Draining: the first SIGTERM or SIGINT turns `/readyz` and new batches to 503 while what was accepted is finished and
committed; when nothing is left on its way, or after `drain_timeout_s`, the listener closes and the process ends with 0.
A second signal ends it without waiting for batches (what was acknowledged is on disk anyway).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from collector import problems
from collector.services import Services
from collector.settings import Settings
from engine_probe.errors import BadRequest, NotReady

log = logging.getLogger(__name__)

CLOSING_S = 2
"""Time for answers that are being sent when the listener closes."""


def serve(app: FastAPI, settings: Settings, sock: socket.socket) -> None:
    """Serve until a signal ends it; back when everything accepted is committed."""
    _calm_garbage_collector()
    make_server(app, settings).run(sockets=[sock])


def make_server(app: FastAPI, settings: Settings) -> DrainingServer:
    """The server with its limits; `run(sockets=[sock])` serves."""
    server = settings.server

    class Protocol(PatientH11):
        header_timeout_s = server.header_timeout_s

    doorway = Doorway(app, server.max_connections)
    config = uvicorn.Config(
        doorway,
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=CLOSING_S,
    )
    made = DrainingServer(config, app, server.drain_timeout_s)
    doorway.state = made.server_state
    return made


def _calm_garbage_collector() -> None:
    """Keep what start-up made out of every later collection, and collect less often.

    A decoded batch is tens of thousands of objects that die at once and by themselves; looking for cycles among them, and
    among all modules again each time, took up to a tenth of ingest's CPU.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class DrainingServer(uvicorn.Server):
    """uvicorn's server that drains the collector before it stops."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._collector = app
        self._drain_timeout_s = drain_timeout_s
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain; second: end now; third: do not even wait for answers that are being sent."""
        services = self._services
        if services is None or self._drain_until is not None:
            self.force_exit = self.should_exit
            self.should_exit = True
            return
        services.drain()
        self._drain_until = time.monotonic() + self._drain_timeout_s

    async def on_tick(self, counter: int) -> bool:
        """Every 100 ms: leave once drained."""
        if self._drain_until is not None and not self.should_exit:
            services = self._services
            if services is None or services.is_drained:
                self.should_exit = True
            elif time.monotonic() > self._drain_until:
                log.warning("drain timed out", extra={"requests": services.ingest.num_requests})
                self.should_exit = True
        return await super().on_tick(counter)

    @property
    def _services(self) -> Services | None:
        services: Services | None = self._collector.state.services
        return services


class Doorway:
    """Outermost layer: 503 where too many are connected or the end came first; HEAD is GET (uvicorn sends no body)."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self._most = most
        self.state: ServerState | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self.state is not None and max(len(self.state.connections), len(self.state.tasks)) > self._most:
                full = NotReady(
                    f"{self._most} connections are open, and no more fit (KVSCOPE_SERVER__MAX_CONNECTIONS); ask again later",
                    retry_after_s=1,
                    limit=self._most,
                )
                await problems.response(full, {"Connection": "close"})(scope, receive, send)
                return
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
            await self._answer(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app's answer; where it is cut off at the end of the drain before it began, a problem that says so."""
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if has_begun:
                raise
            stopped = NotReady(
                "the collector stopped before it could answer; ask again when it is back", retry_after_s=1
            )
            await problems.response(stopped, {"Connection": "close"})(scope, receive, send)


class PatientH11(H11Protocol):
    """uvicorn's h11 protocol with an end to its patience.

    It ends for headers that do not arrive in time, and for the rest of a body that was refused before its end: that is
    read and thrown away for a while, so that the client sees the answer.
    """

    header_timeout_s = 10.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_timer: asyncio.TimerHandle | None = None
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the problem document of any other bad request."""
        answer = problems.response(
            BadRequest(f"what came is no sound HTTP/1.1 request: {msg}"), {"Connection": "close"}
        )
        head = h11.Response(status_code=answer.status_code, headers=answer.raw_headers, reason=b"Bad Request")
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _await_headers(self) -> None:
        """The timer runs while, and only while, the peer owes headers or the rest of an answered body."""
        if not self._is_owed():
            self._forget_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _is_owed(self) -> bool:
        if self.conn.their_state is h11.SEND_BODY:
            return self.cycle is not None and self.cycle.response_complete
        return self.conn.their_state is h11.IDLE

    def _forget_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        self._header_timer = None
        if self._is_owed() and not self.transport.is_closing():
            self.transport.close()
