"""Bodies of questions (SQL, marks): read here within bounds of size and pace, and handed on whole.

The framework would read them without an end. The two ways in of ingest have bounds of their own and pass untouched.
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from collector import problems
from collector.intake.body import Budget, Lease, read_body
from engine_probe.errors import KvscopeError

MAX_BYTES: Final = 1 << 20
MAX_TOGETHER: Final = 32
INGEST_PATHS: Final = frozenset({"/v1/events", "/v1/traces", "/v1/metrics"})


class SmallBodies:
    """ASGI layer: at most MAX_BYTES a body, MAX_TOGETHER of them at once, no longer than the pace allows."""

    def __init__(self, app: ASGIApp, *, idle_s: float, total_s: float) -> None:
        self.app = app
        self._idle_s, self._total_s = idle_s, total_s
        self._budget = Budget(MAX_TOGETHER * MAX_BYTES, retry_after_s=1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD") or scope["path"] in INGEST_PATHS:
            await self.app(scope, receive, send)
            return
        with Lease(self._budget) as lease:
            try:
                body = await read_body(
                    receive,
                    Headers(scope=scope),
                    lease,
                    limit_bytes=MAX_BYTES,
                    idle_s=self._idle_s,
                    total_s=self._total_s,
                )
            except KvscopeError as error:
                await problems.response(error)(scope, receive, send)
                return
            waiting: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

            async def replay() -> Message:
                return waiting.pop() if waiting else await receive()

            await self.app(scope, replay, send)
