"""What `bench/proxy.py` puts around the proxy: an engine that streams, clients that read, a bare relay. Each a process.

The engine gives every open stream one chunk a tick, as a batch of an engine does; in each chunk stands the instant it was sent,
so that a client on the same machine knows how long it was under way. Neither does anything else, so that what the proxy
costs shows beside little.

    python -m bench.proxy_peers engine INTERVAL_S CHUNKS        prints its port, serves until killed
    python -m bench.proxy_peers relay PORT                      prints its port; passes bytes both ways, knows no HTTP
    python -m bench.proxy_peers clients PORT STREAMS PATH       prints `open` when all are, a JSON line at their end
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from functools import partial
from typing import Any, ClassVar, cast

BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x" * 400}]}).encode()
_STAMP = re.compile(rb'"content":"(\d{20})"')
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
CONNECT_AT_ONCE = 100


def chunk(stream: int, now_ns: int) -> bytes:
    """One chunk as vLLM writes it."""
    data = (
        b'data: {"id":"chatcmpl-%032x","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":'
        b'[{"index":0,"delta":{"content":"%020d"},"logprobs":null,"finish_reason":null}]}\n\n' % (stream, now_ns)
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    """Answers each request with a stream; the ticker writes into all that are open."""

    open: ClassVar[dict[Engine, int]] = {}
    num_streams = 0

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._buffer = b""
        self.stream = 0
        self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        Engine.open.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) < len(BODY) or not self._buffer.endswith(BODY):
            return
        is_short = self._buffer.startswith(b"POST /v1/completions ")
        self._buffer = b""
        Engine.num_streams += 1
        self.stream = Engine.num_streams
        self.left = self._num_chunks
        if is_short:
            self.transport.write(_HEAD + chunk(self.stream, time.monotonic_ns()) + _END)
            return
        self.transport.write(_HEAD)
        Engine.open[self] = self.stream

    def tick(self) -> None:
        self.transport.write(chunk(self.stream, time.monotonic_ns()))
        self.left -= 1
        if self.left == 0:
            Engine.open.pop(self, None)
            self.transport.write(_END)


async def engine(interval_s: float, num_chunks: int) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(num_chunks), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    while True:
        await asyncio.sleep(interval_s)
        for one in list(Engine.open):
            one.tick()


class Reader(asyncio.Protocol):
    """Asks once, reads to the end of the stream."""

    def __init__(self, request: bytes, delays: list[int], loop: asyncio.AbstractEventLoop) -> None:
        self._request = request
        self._delays = delays
        self.first: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if not self.first.done():
            self.first.set_result(None)
        # A chunk may come in two pieces: what follows the last one that is whole is kept.
        data = self._rest + data
        end = 0
        for match in _STAMP.finditer(data):
            self._delays.append(now_ns - int(match[1]))
            end = match.end()
        self._rest = data[end:]
        if data.endswith(b"\r\n0\r\n\r\n") and not self.done.done():
            self.done.set_result(None)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("a stream ended early"))


def _same(reader: Reader) -> Reader:
    return reader


async def clients(port: int, num_streams: int, path: str) -> dict[str, Any]:
    """Open all streams, read them to their ends; delays of chunks in seconds, and how many came."""
    loop = asyncio.get_running_loop()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    delays: list[int] = []
    ends: list[asyncio.Future[None]] = []
    begins: list[asyncio.Future[None]] = []
    request = head.encode() + BODY
    for begin in range(0, num_streams, CONNECT_AT_ONCE):
        for _ in range(min(CONNECT_AT_ONCE, num_streams - begin)):
            reader = Reader(request, delays, loop)
            begins.append(reader.first)
            ends.append(reader.done)
            await loop.create_connection(partial(_same, reader), "127.0.0.1", port)
        await asyncio.gather(*begins[begin:])
    print("open", flush=True)
    cpu, num_before = time.process_time(), len(delays)
    await asyncio.gather(*ends)
    ranked = sorted(delays)
    return {
        "chunks": len(delays),
        "chunks_while_open": len(delays) - num_before,
        "delay_p50_s": ranked[len(ranked) // 2] / 1e9,
        "delay_p99_s": ranked[len(ranked) * 99 // 100] / 1e9,
        "client_cpu_s": time.process_time() - cpu,
    }


class Pipe(asyncio.Protocol):
    """One side of the relay."""

    def __init__(self, other: Pipe | None = None, port: int = 0) -> None:
        self.other = other
        self._port = port
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.other is None:
            self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        _, other = await asyncio.get_running_loop().create_connection(lambda: Pipe(self), "127.0.0.1", self._port)
        self.other = other
        other.transport.write(self._held)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._held += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


async def relay(port: int) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Pipe(port=port), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main(arguments: list[str]) -> None:
    """Run one of them."""
    import uvloop

    if arguments[0] == "engine":
        uvloop.run(engine(float(arguments[1]), int(arguments[2])))
    elif arguments[0] == "relay":
        uvloop.run(relay(int(arguments[1])))
    else:
        print(json.dumps(uvloop.run(clients(int(arguments[1]), int(arguments[2]), arguments[3]))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
