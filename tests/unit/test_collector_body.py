"""Bodies with bounds: size, pace, memory, decompression."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from collector.intake.body import Budget, Lease, decompress, read_body
from engine_probe.errors import BadRequest, BodyTimeout, KvscopeError, TooLarge, TooManyBatches, UnknownFormat


def read(messages: Iterable[Any], headers: dict[str, str], *, limit: int = 100, budget: Budget | None = None) -> bytes:
    """What `read_body` makes of these ASGI messages; a number is a pause in seconds."""
    waiting = list(messages)

    async def receive() -> Any:
        if not waiting:
            await asyncio.sleep(3600)
        message = waiting.pop(0)
        if isinstance(message, float):
            await asyncio.sleep(message)
            message = waiting.pop(0)
        return message

    async def run() -> bytes:
        with Lease(budget or Budget(1_000, 1)) as lease:
            body = await read_body(receive, headers, lease, limit_bytes=limit, idle_s=0.05, total_s=0.2)
            return bytes(body)

    return asyncio.run(run())


def part(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def test_body_in_pieces_is_put_together() -> None:
    """The pieces of the transport are no pieces of the batch."""
    assert read([part(b"ab"), part(b""), part(b"cd", False)], {"content-length": "4"}) == b"abcd"


@pytest.mark.parametrize(
    ("messages", "headers", "error"),
    [
        ([], {"content-length": "101"}, TooLarge),
        ([], {"content-length": "9" * 5000}, BadRequest),
        ([part(b"x" * 60), part(b"x" * 60)], {}, TooLarge),
        ([part(b"x" * 60), part(b"x" * 60)], {"content-length": "60"}, TooLarge),
        ([part(b"half")], {"content-length": "8"}, BodyTimeout),
        ([part(b"half"), {"type": "http.disconnect"}], {"content-length": "8"}, BadRequest),
        ([part(b"x" * 60), part(b"x" * 60)], {"content-length": "1", "transfer-encoding": "chunked"}, TooLarge),
        ([part(b"", False)], {"content-length": "many"}, BadRequest),
        ([part(b"", False)], {"content-length": "-1"}, BadRequest),
    ],
)
def test_body_that_breaks_a_bound_is_refused_and_its_memory_given_back(
    messages: list[Any], headers: dict[str, str], error: type[KvscopeError]
) -> None:
    """Each bound has its own error, and a refused body holds nothing."""
    budget = Budget(1_000, 1)
    with pytest.raises(error):
        read(messages, headers, budget=budget)
    assert budget.used_bytes == 0


def test_trickle_is_cut_off_though_it_never_pauses_long() -> None:
    """A byte every 30 ms keeps the idle clock quiet; the whole body has its own limit."""
    trickle: list[Any] = []
    for _ in range(60):
        trickle += [0.03, part(b"x")]
    with pytest.raises(BodyTimeout):
        read(trickle, {})


def test_chunked_body_is_accounted_whatever_length_is_claimed() -> None:
    """A small Content-Length beside chunks does not hide their memory."""
    with pytest.raises(TooManyBatches):
        read([part(b"x" * 50, False)], {"content-length": "1", "transfer-encoding": "chunked"}, budget=Budget(20, 1))


def test_full_memory_refuses_at_once() -> None:
    """Waiting for each other's memory would stop everybody; refusing stops nobody."""
    budget = Budget(10, 7)
    with pytest.raises(TooManyBatches) as caught:
        read([part(b"x" * 11, False)], {}, budget=budget)
    assert caught.value.facts["retry_after_s"] == 7
    assert budget.used_bytes == 0


def _pack(data: bytes, encoding: str) -> bytes:
    packed: bytes = gzip.compress(data) if encoding == "gzip" else pa.compress(data, encoding, asbytes=True)
    return packed


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_decompression_gives_the_body_and_asks_for_its_memory(encoding: str) -> None:
    """What comes out was asked for, byte by byte."""
    data = bytes(range(256)) * 9000
    asked: list[int] = []
    assert bytes(decompress(_pack(data, encoding), encoding, 10_000_000, asked.append)) == data
    assert sum(asked) == len(data)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_several_members_are_one_body(encoding: str) -> None:
    """Senders may append compressed pieces."""
    both = _pack(b"one", encoding) + _pack(b"two", encoding)
    assert bytes(decompress(both, encoding, 100, lambda _: None)) == b"onetwo"


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_bomb_stops_at_the_limit(encoding: str) -> None:
    """No more than the limit and one chunk is ever held, whatever the body would become."""
    bomb = _pack(b"\0" * (64 << 20), encoding)
    asked: list[int] = []
    with pytest.raises(TooLarge) as caught:
        decompress(bomb, encoding, 2 << 20, asked.append)
    assert sum(asked) <= 2 << 20
    assert caught.value.facts["limit_bytes"] == 2 << 20


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize("hurt", ["cut", "junk", "other"])
def test_damaged_compression_is_told(encoding: str, hurt: str) -> None:
    """Cut off, followed by junk, or something else altogether."""
    packed = _pack(b"hello" * 100, encoding)
    body = {"cut": packed[:-3], "junk": packed + b"junk junk junk junk", "other": b"{}" * 20}[hurt]
    with pytest.raises(BadRequest, match="no sound"):
        decompress(body, encoding, 10_000, lambda _: None)


def test_refused_memory_stops_decompression() -> None:
    """The budget of all bodies counts while one is unpacked."""
    with pytest.raises(TooManyBatches), Lease(Budget(1_000, 1)) as lease:
        decompress(_pack(b"\0" * 5_000_000, "zstd"), "zstd", 10_000_000, lease.grow)


@pytest.mark.parametrize("encoding", ["", "identity", "IDENTITY", "identity, identity", " , "])
def test_plain_body_is_passed_through(encoding: str) -> None:
    """No copy is made of what is not compressed."""
    body = bytearray(b"abc")
    assert decompress(body, encoding, 1, lambda _: None) is body


@pytest.mark.parametrize("encoding", ["gzip, identity", "identity,GZIP", "x-gzip"])
def test_identity_in_a_list_of_encodings_does_nothing(encoding: str) -> None:
    """Proxies write such lists, and two headers are one list."""
    assert decompress(gzip.compress(b"rows"), encoding, 100, lambda _: None) == b"rows"


@pytest.mark.parametrize("encoding", ["br", "gzip, zstd", "deflate", "gzip, gzip", "identity, br"])
def test_unknown_encoding_is_refused(encoding: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(UnknownFormat):
        decompress(b"x", encoding, 100, lambda _: None)
