"""One HTTP exchange: its body read with bounds, its client watched, its answer sent while it is made.

A client that goes away is noticed whether something is being sent or not, and its call is aborted at once. A slow reader
holds up nobody: its pieces wait for it, and go out together when it reads again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Final
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine_probe.engine.server import error_answer
from engine_probe.engine.server.answers import DONE, Answer, event, usage_document
from engine_probe.engine.server.call import Call
from engine_probe.engine.server.front_end import Asked
from engine_probe.engine.server.requests import GenerateRequest
from engine_probe.errors import BadRequest, BodyTimeout, KvscopeError, TooLarge
from engine_probe.proxy.heads import Head
from engine_probe.proxy.tags import printable, request_columns

log = logging.getLogger(__name__)

MOST_BYTES: Final = 32 << 20
BODY_S: Final = 60.0
CLIENT_GONE: Final = 499
"""Nobody reads this answer; the number is what nginx calls it."""


async def read_body(request: Request) -> bytes:
    """Raises TooLarge, BodyTimeout, BadRequest (the client went away in the middle)."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BYTES:
                    raise TooLarge(f"the body is larger than {MOST_BYTES} bytes", limit_bytes=MOST_BYTES)
                parts.append(part)
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {BODY_S:.0f} s") from error
    except Exception as error:
        if isinstance(error, KvscopeError):
            raise
        raise BadRequest("the client went away before its body was there") from error
    return b"".join(parts)


def asked(request: Request, arrival_ns: int) -> Asked:
    """What the headers say: `X-Request-Id`, `traceparent`, `X-Kvscope-<Tag>`; an id is made where none came."""
    headers = list(request.scope["headers"])
    head = Head(headers, 1, False, False, None, by_name=dict(reversed(headers)))
    columns = request_columns(head, {})
    columns["labels"] = dict(columns.get("labels", {}))
    own = printable(head.get(b"x-request-id") or b"")
    return Asked(own if own is not None and own.isascii() else uuid4().hex, arrival_ns, columns)


@contextlib.asynccontextmanager
async def watched(call: Call, receive: Receive) -> AsyncIterator[None]:
    """The call ends with its client, or with this block, whichever is first."""
    task = asyncio.create_task(_abort_when_gone(call, receive))
    try:
        yield
    finally:
        task.cancel()
        call.leave()


async def whole(call: Call, answer: Answer, receive: Receive, headers: dict[str, str]) -> Response:
    """The answer in one piece. Raises what went wrong."""
    texts = [""] * call.num_choices
    reasons: list[str | None] = [None] * call.num_choices
    async with watched(call, receive):
        while not call.is_done or call.has_news:
            pieces = await call.news()
            if not pieces:
                return Response(status_code=CLIENT_GONE)
            for index, piece in pieces:
                texts[index] += piece.text
                reasons[index] = piece.finish_reason or reasons[index]
    body = {**answer.whole(texts, reasons), "usage": usage_document(call.usage)}
    return Response(msgspec.json.encode(body), 200, headers, "application/json")


class Stream(Response):
    """Server-sent events, while the call goes on."""

    def __init__(self, call: Call, answer: Answer, request: GenerateRequest, headers: dict[str, str]) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._call = call
        self._answer = answer
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        async with watched(call, receive):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for body in self._bodies():
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if not call.is_gone:
                await send({"type": "http.response.body", "body": b""})

    async def _bodies(self) -> AsyncIterator[bytes]:
        call, answer = self._call, self._answer
        includes, counts = self._request.includes_usage, self._request.counts_usage
        try:
            while not call.is_done or call.has_news:
                pieces = await call.news()
                if not pieces:
                    return
                chunks: list[dict[str, Any]] = [
                    chunk for index, piece in pieces for chunk in answer.chunks(index, piece)
                ]
                if counts:
                    chunks = [{**chunk, "usage": usage_document(call.usage)} for chunk in chunks]
                elif includes:
                    chunks = [{**chunk, "usage": None} for chunk in chunks]
                if chunks:
                    yield b"".join(map(event, chunks))
        except KvscopeError as error:
            yield event(error_answer.document(error)) + DONE
            return
        last = event({**answer.usage_chunk(), "usage": usage_document(call.usage)}) if includes else b""
        yield last + DONE


async def _abort_when_gone(call: Call, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not call.is_done:
        log.info("client went away", extra={"request_id": call.request_id})
    call.leave()
