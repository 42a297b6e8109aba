"""Frames between the collector and the child that runs a person's SQL: one byte of kind, eight of length, the body.

Both ends of a Unix socket pair use it. Invariant: a reader never takes more than it said it would (`limit`) and never
waits past its deadline, so a child gone wild can neither fill the parent's memory nor keep it waiting.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Final

from store.deadline import Deadline

READY, JOB, NEEDS, HOT, COLUMNS, BATCH, END, ERROR = b"R", b"J", b"N", b"H", b"C", b"B", b"E", b"X"

_HEADER: Final = struct.Struct("=cQ")


class TooLong(Exception):
    """The other side announced a frame longer than the limit."""


class Gone(Exception):
    """The other side closed the connection."""


def send(sock: socket.socket, kind: bytes, body: bytes | memoryview = b"", fds: list[int] | None = None) -> None:
    """Send one frame; file descriptors travel with its header. Raises Gone."""
    header = _HEADER.pack(kind, len(body))
    try:
        if fds:
            socket.send_fds(sock, [header], fds)
        else:
            sock.sendall(header)
        if len(body):
            sock.sendall(body)
    except OSError as error:  # a refused descriptor, a closed pipe, a send that timed out
        raise Gone(str(error)) from error


def receive(
    sock: socket.socket, limit: int, waiter: Waiter | None = None, max_fds: int = 0
) -> tuple[bytes, memoryview, list[int]]:
    """One frame: kind, body, file descriptors. Raises Gone, Late, TooLong.

    max_fds   descriptors beyond this number are closed by the kernel: a child must not fill the parent's table
    """
    if waiter:
        waiter.wait(sock)
    try:
        header, fds, _, _ = (
            socket.recv_fds(sock, _HEADER.size, max_fds) if max_fds else (sock.recv(_HEADER.size), [], 0, 0)
        )
    except OSError as error:
        raise Gone(str(error)) from error
    if len(header) < _HEADER.size:
        header += _exactly(sock, _HEADER.size - len(header), waiter) if header else b""
    if not header:
        raise Gone("closed")
    kind, length = _HEADER.unpack(header)
    if length > limit:
        raise TooLong(f"{length} bytes announced, {limit} allowed")
    return kind, _exactly(sock, length, waiter), list(fds)


def _exactly(sock: socket.socket, length: int, waiter: Waiter | None) -> memoryview:
    body = memoryview(bytearray(length))
    at = 0
    while at < length:
        if waiter:
            waiter.wait(sock)
        try:
            got = sock.recv_into(body[at:])
        except OSError as error:
            raise Gone(str(error)) from error
        if got == 0:
            raise Gone("closed in the middle of a frame")
        at += got
    return body


class Waiter(Deadline):
    """Waits for a socket until a deadline, looking up now and then whether the caller gave up."""

    def wait(self, sock: socket.socket) -> None:
        """Return when something can be read. Raises Late."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while True:
            self.check()
            if poll.poll(max(1, self.step_s * 1000)):
                return
