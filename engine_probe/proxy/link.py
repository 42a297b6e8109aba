"""What both ends of the proxy share: a connection that reads into one buffer of the process, and can be told to wait.

Idea: bytes are handled in the callback that brings them, so all connections read into the same 64 KiB. What is passed on
is a copy of what came, nothing more. Invariant: memory of a connection is at most `WRITE_HIGH_BYTES` and one read that wait
to be sent, because the sender on the other side is paused then.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Final, cast

READ_BYTES: Final = 65536
WRITE_HIGH_BYTES: Final = 65536
_RESET = struct.pack("ii", 1, 0)

buffer = memoryview(bytearray(READ_BYTES))


class Link(asyncio.BufferedProtocol):
    """One connection. Subclasses say what happens to bytes (`received`) and to the end (`lost`)."""

    __slots__ = (
        "_is_read_paused",
        "is_write_paused",
        "transport",
    )

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_write_paused = False
        self._is_read_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the same methods, but are of no common class.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            # A machine that dies in silence would keep a stream open for ever.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received(bytes(buffer[:nbytes]))

    def received(self, data: bytes) -> None:
        """Bytes came in."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """It can still be written to."""
        return self.transport is not None and not self.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send; what cannot be sent now waits in the transport. Nothing happens where the connection is gone."""
        if self.transport is not None and data and not self.transport.is_closing():
            self.transport.write(data)

    def write_eof(self) -> bool:
        """Say that nothing more is coming; False where this kind of connection cannot say so (TLS)."""
        if not self.is_open or self.transport is None or not self.transport.can_write_eof():
            return False
        try:
            self.transport.write_eof()
        except OSError:
            return False
        return True

    def pause_reading(self) -> None:
        if not self._is_read_paused and self.is_open and self.transport is not None:
            self._is_read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_read_paused and self.is_open and self.transport is not None:
            self._is_read_paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False

    def close(self) -> None:
        """Close once everything written is sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close now."""
        if self.transport is not None:
            self.transport.abort()

    def reset(self) -> None:
        """Close with a TCP reset once everything written is handed to the kernel: the end is not a proper one."""
        if self.transport is not None:
            sock: socket.socket | None = self.transport.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.close()
