"""Frames between the collector and a child that may have gone wild."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from store.deadline import Late
from store.sandbox import wire

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected sockets."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def soon() -> wire.Waiter:
    return wire.Waiter(time.monotonic() + 5)


def test_a_frame_arrives_whole(pair: Pair) -> None:
    """Kind and body come out as they went in, larger than any socket buffer too."""
    body = os.urandom(3_000_000)
    sender = threading.Thread(target=wire.send, args=(pair[1], wire.BATCH, body))
    sender.start()
    kind, got, fds = wire.receive(pair[0], 4_000_000, soon())
    sender.join()
    assert (kind, bytes(got), fds) == (wire.BATCH, body, [])


def test_a_file_descriptor_travels_with_a_frame(pair: Pair) -> None:
    """The receiver reads the file that the sender opened."""
    with os.fdopen(os.memfd_create("test"), "w+b") as file:
        file.write(b"hot rows")
        file.flush()
        wire.send(pair[1], wire.HOT, b"{}", [file.fileno()])
    _, _, (fd,) = wire.receive(pair[0], 10, soon(), max_fds=1)
    try:
        assert os.pread(fd, 100, 0) == b"hot rows"
    finally:
        os.close(fd)


def test_descriptors_that_were_not_asked_for_do_not_stay_open(pair: Pair) -> None:
    """A child cannot fill the parent's table of open files."""
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull, "rb") as file:
        wire.send(pair[1], wire.BATCH, b"rows", [file.fileno()] * 4)
    assert wire.receive(pair[0], 10, soon())[2] == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_frame_longer_than_allowed_is_not_read(pair: Pair) -> None:
    """A child cannot make the parent allocate: the announced length is checked first."""
    pair[1].sendall(struct.pack("=cQ", wire.BATCH, 2**62))
    with pytest.raises(wire.TooLong, match="bytes announced, 1000 allowed"):
        wire.receive(pair[0], 1000, soon())


@pytest.mark.parametrize("sent", [b"", b"B", struct.pack("=cQ", b"B", 10), struct.pack("=cQ", b"B", 10) + b"half"])
def test_a_closed_connection_is_gone_at_any_place(pair: Pair, sent: bytes) -> None:
    """Before, in the middle of and after the header."""
    pair[1].sendall(sent)
    pair[1].close()
    with pytest.raises(wire.Gone):
        wire.receive(pair[0], 1000, soon())


def test_silence_ends_at_the_deadline(pair: Pair) -> None:
    """A frame whose rest never comes does not keep the parent."""
    pair[1].sendall(struct.pack("=cQ", b"B", 10) + b"half")
    with pytest.raises(Late):
        wire.receive(pair[0], 1000, wire.Waiter(time.monotonic() + 0.05))


def test_a_caller_who_gives_up_is_heard(pair: Pair) -> None:
    """Long before the deadline, when the event is set."""
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Late):
        wire.receive(pair[0], 1000, wire.Waiter(time.monotonic() + 3600, cancelled))


def test_sending_to_a_dead_child_is_gone(pair: Pair) -> None:
    """Not a broken pipe's signal, nor an OSError."""
    pair[1].close()
    with pytest.raises(wire.Gone):
        wire.send(pair[0], wire.JOB, b"x" * 1_000_000)
