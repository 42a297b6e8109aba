"""Request bodies with bounds: how large, how slow, how many at once, and how large once decompressed.

Invariant: bytes of bodies in flight, as sent and decompressed, never exceed the budget: a lease asks before it grows,
and a full budget refuses (429) instead of waiting, so half-read bodies cannot block each other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from types import TracebackType

import pyarrow as pa
from starlette.types import Receive

from engine_probe.digits import whole_number
from engine_probe.errors import BadRequest, BodyTimeout, TooLarge, TooManyBatches, UnknownFormat

CHUNK_BYTES = 1 << 20
ENCODINGS = ("identity", "gzip", "zstd")


class Budget:
    """Bytes that all bodies in flight may use together; safe from several threads."""

    def __init__(self, total_bytes: int, retry_after_s: float) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self._retry_after_s = retry_after_s
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Raises TooManyBatches where they are not free now."""
        with self._lock:
            if self.used_bytes + num_bytes > self.total_bytes:
                raise TooManyBatches(
                    f"bodies in flight use {self.used_bytes} of {self.total_bytes} bytes; send again later",
                    retry_after_s=self._retry_after_s,
                    limit_bytes=self.total_bytes,
                )
            self.used_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        """Return what was taken."""
        with self._lock:
            self.used_bytes -= num_bytes


class Lease:
    """What one request has taken from a budget; returned at the end of the `with` block."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Raises TooManyBatches."""
        self._budget.take(num_bytes)
        self.held_bytes += num_bytes

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.give(self.held_bytes)
        self.held_bytes = 0


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    lease: Lease,
    *,
    limit_bytes: int,
    idle_s: float,
    total_s: float,
) -> bytearray:
    """The whole body as sent.

    Raises TooLarge (before reading where the length is declared), BodyTimeout (a pause over `idle_s`, or over
    `total_s` in all), BadRequest (the client hung up in mid-body, or a length that is no number), TooManyBatches.
    """
    declared = _declared_length(headers)
    if declared is not None:
        if declared > limit_bytes:
            raise _too_large(limit_bytes, declared)
        lease.grow(declared)
    body = bytearray()
    loop = asyncio.get_running_loop()
    end = loop.time() + total_s
    try:
        async with asyncio.timeout_at(min(loop.time() + idle_s, end)) as timer:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise BadRequest(
                        f"the client hung up after {len(body)} bytes of its body; nothing was stored",
                        size_bytes=len(body),
                    )
                chunk: bytes = message.get("body", b"")
                if len(body) + len(chunk) > limit_bytes:
                    raise _too_large(limit_bytes, None)
                if declared is None:
                    lease.grow(len(chunk))
                body += chunk
                more = message.get("more_body", False)
                timer.reschedule(min(loop.time() + idle_s, end))
    except TimeoutError as error:
        raise BodyTimeout(
            f"the body stopped after {len(body)} bytes; nothing was stored, send the batch again", size_bytes=len(body)
        ) from error
    return body


def decompress(
    body: bytes | bytearray, encoding: str, limit_bytes: int, grow: Callable[[int], None]
) -> bytes | bytearray:
    """Body without its Content-Encoding (`identity`, `gzip` or `zstd`), at most `limit_bytes`, asked for as it grows.

    encoding   the header's list; more than one that does something is refused
    Several members or frames one after another are one body. Raises UnknownFormat (another encoding), TooLarge,
    BadRequest (damaged or cut off).
    """
    names = [name for part in encoding.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if not names:
        return body
    codec = "gzip" if names == ["x-gzip"] else names[0]
    if len(names) > 1 or codec not in ENCODINGS:
        raise UnknownFormat(
            f"Content-Encoding {encoding[:60]!r} is not known; use one of {', '.join(ENCODINGS)}", known=list(ENCODINGS)
        )
    out = bytearray()
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                if len(out) + len(chunk) > limit_bytes:
                    raise TooLarge(
                        f"the body is larger than {limit_bytes} bytes once decompressed; send fewer rows a batch",
                        limit_bytes=limit_bytes,
                    )
                grow(len(chunk))
                out += chunk
    except (OSError, pa.ArrowException) as error:
        raise BadRequest(f"the body is no sound {codec}: {error}", encoding=codec) from error
    return out


def _declared_length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None or "transfer-encoding" in headers:  # chunks say how long they are, whatever else is claimed
        return None
    length = whole_number(text, 1 << 62)
    if length is None:
        raise BadRequest(f"Content-Length {text[:40]!r} is no number of bytes")
    return length


def _too_large(limit_bytes: int, size_bytes: int | None) -> TooLarge:
    size = "" if size_bytes is None else f"is {size_bytes} bytes, "
    return TooLarge(
        f"the body {size}over the limit of {limit_bytes}; send fewer rows a batch",
        limit_bytes=limit_bytes,
        **({} if size_bytes is None else {"size_bytes": size_bytes}),
    )
