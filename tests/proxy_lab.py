"""A proxy between a raw client and raw upstreams, all in one event loop: every byte on each side is the test's own.

An upstream is a coroutine that is given each connection with a `Peer` to read requests and write answers as it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_probe.proxy.context import Context, Observers
from engine_probe.proxy.server import ProxyServer
from engine_probe.proxy.upstreams import Balancer, Policy, parse_upstream

PATIENCE_S = 20.0


class Peer:
    """One end of a connection, with what it takes to play HTTP by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> bytes:
        """The next head; b"" at the end of the connection."""
        try:
            return await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as end:
            return end.partial

    async def request(self) -> tuple[bytes, bytes]:
        """Head and body (Content-Length or none) of the next request."""
        head = await self.head()
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        body = await self.reader.readexactly(int(length[1])) if length else b""
        return head, body

    async def send(self, *parts: bytes) -> None:
        """Write each part by itself, with a turn of the loop after it."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def rest(self) -> bytes:
        """All that comes until the other side closes (or resets)."""
        found = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65536):
                found += data
        return bytes(found)

    def reset(self) -> None:
        """Close with a TCP reset."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


Script = Callable[[Peer], Awaitable[None]]


@dataclass
class Lab:
    """The proxy's port and context, and what upstreams were asked."""

    port: int
    context: Context
    server: ProxyServer
    ports: Sequence[int]
    peers: list[Peer] = field(default_factory=list)

    async def connect(self, **options: Any) -> Peer:
        """A raw client; closed with the lab at the latest."""
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port, **options))
        self.peers.append(peer)
        return peer

    async def ask(self, request: bytes) -> bytes:
        """Send one request on a connection of its own, and answer everything that comes until it closes."""
        peer = await self.connect()
        await peer.send(request)
        return await asyncio.wait_for(peer.rest(), PATIENCE_S)


@contextlib.asynccontextmanager
async def lab(
    *scripts: Script,
    observers: Observers | None = None,
    policy: Policy = "least_outstanding",
    dead: int = 0,
    **options: Any,
) -> AsyncIterator[Lab]:
    """A proxy before one upstream a script; `dead`: so many addresses where nobody listens come first."""
    failures: list[BaseException] = []
    servers = []
    for script in scripts:

        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, script: Script = script) -> None:
            try:
                await script(Peer(reader, writer))
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            except BaseException as error:
                failures.append(error)
            finally:
                writer.close()

        servers.append(await asyncio.start_server(play, "127.0.0.1", 0, limit=1 << 20))
    ports = [_dead_port() for _ in range(dead)] + [server.sockets[0].getsockname()[1] for server in servers]
    upstreams = [parse_upstream(f"up{number}=http://127.0.0.1:{port}") for number, port in enumerate(ports)]
    context = Context(Balancer(upstreams, policy), observers, loop=asyncio.get_running_loop(), **options)
    proxy = ProxyServer(context, "127.0.0.1", 0)
    await proxy.start()
    here = Lab(proxy.address[1], context, proxy, ports)
    try:
        yield here
    finally:
        await proxy.drain(0.0)
        for peer in here.peers:
            peer.writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await peer.writer.wait_closed()
        for server in servers:
            server.close()
    if failures:
        raise failures[0]


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run one story, bounded."""

    async def bounded() -> None:
        await asyncio.wait_for(story(), PATIENCE_S * 2)

    asyncio.run(bounded())


def body_of(answer: bytes) -> bytes:
    """What follows the head."""
    return answer.partition(b"\r\n\r\n")[2]


def post(body: bytes, path: str = "/v1/chat/completions", *headers: str, close: bool = True) -> bytes:
    """A request with a body of known length."""
    lines = [f"POST {path} HTTP/1.1", "Host: proxy", f"Content-Length: {len(body)}", *headers]
    lines += ["Connection: close"] if close else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def _dead_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
