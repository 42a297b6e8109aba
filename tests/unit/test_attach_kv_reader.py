"""KV events over real sockets on loopback: order, holes, replay, restarts; nothing is lost without a mark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import zmq

from engine_probe.adapters.kv_events import KvEventDecoder
from engine_probe.attach import kv_reader
from engine_probe.attach.kv_link import KvEndpoint
from engine_probe.attach.kv_reader import KvReader
from tests.servers import free_port

T0 = 1_700_000_000.0
SALT = b"s"


def message(seq: int, *, life: float = T0, rank: int | None = 0) -> list[bytes]:
    """One PUB message that stores one block; its time is that of its life plus its number."""
    event = {
        "type": "BlockStored",
        "block_hashes": [1000 + seq],
        "parent_block_hash": None,
        "token_ids": [seq, 1, 2, 3],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return [b"kv", seq.to_bytes(8, "big"), msgspec.msgpack.encode([life + seq, [event], rank])]


class Engine:
    """A publisher that we control: a PUB socket, and a ROUTER that keeps some messages."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.pub: zmq.Socket[Any] = self.context.socket(zmq.XPUB)
        self.port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.router: zmq.Socket[Any] = self.context.socket(zmq.ROUTER)
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.kept: dict[int, list[bytes]] = {}
        self.asked: list[int] = []

    def endpoint(self, *, with_replay: bool = False, rank: int = 0) -> KvEndpoint:
        replay = f"tcp://127.0.0.1:{self.replay_port}" if with_replay else None
        return KvEndpoint(f"tcp://127.0.0.1:{self.port}", False, replay, "kv", rank)

    def wait_for_subscriber(self) -> None:
        assert self.pub.poll(5000)
        assert self.pub.recv().startswith(b"\x01")

    def send(self, *seqs: int, **options: Any) -> None:
        for seq in seqs:
            self.pub.send_multipart(message(seq, **options))

    def serve_replay(self) -> None:
        """Answer one replay request with what is kept."""
        assert self.router.poll(5000)
        client, empty, start = self.router.recv_multipart()
        self.asked.append(int.from_bytes(start, "big"))
        for seq, frames in sorted(self.kept.items()):
            if seq >= self.asked[-1]:
                self.router.send_multipart([client, empty, *frames])
        self.router.send_multipart([client, empty, b"", b"\xff" * 8, b""])


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.context.destroy(linger=0)


class Rows:
    """What a reader emitted."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []

    def take(self, tables: Mapping[str, pa.Table]) -> None:
        self.blocks += tables["block"].to_pylist() if "block" in tables else []
        self.marks += tables["mark"].to_pylist() if "mark" in tables else []

    def gaps(self) -> list[tuple[str | None, str | None]]:
        attrs = [dict(mark["attrs"]) for mark in self.marks if mark["mark"] == "gap"]
        return [(a.get("first_seq"), a.get("last_seq")) for a in attrs]


Follow = Callable[..., tuple[KvReader, Rows]]


@pytest.fixture
def follow() -> Iterator[Follow]:
    readers: list[KvReader] = []

    def start(*endpoints: KvEndpoint, **options: Any) -> tuple[KvReader, Rows]:
        rows = Rows()
        options = {"clock": lambda: round((T0 + 10_000) * 1e9), "replay_timeout_s": 0.5} | options
        reader = KvReader("w", endpoints, KvEventDecoder(SALT), rows.take, **options)
        readers.append(reader)
        reader.start()
        return reader, rows

    yield start
    for reader in readers:
        reader.stop()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen within 5 s")


def test_every_message_becomes_rows_in_order(engine: Engine, follow: Follow) -> None:
    """Three messages, three stored blocks, no mark."""
    reader, rows = follow(engine.endpoint())
    engine.wait_for_subscriber()
    engine.send(0, 1, 2)
    until(lambda: len(rows.blocks) == 3)
    reader.stop()
    assert [row["at_ns"] for row in rows.blocks] == [round((T0 + seq) * 1e9) for seq in range(3)]
    assert {row["worker"] for row in rows.blocks} == {"w"}
    assert (rows.marks, reader.refused) == ([], 0)


def test_two_ranks_are_two_workers(engine: Engine, follow: Follow) -> None:
    """Each rank has its own sequence from 0."""
    other = Engine()
    try:
        _, rows = follow(engine.endpoint(), other.endpoint(rank=1))
        engine.wait_for_subscriber()
        other.wait_for_subscriber()
        engine.send(0, 1)
        other.send(0, rank=1)
        until(lambda: len(rows.blocks) == 3)
        assert sorted(row["worker"] for row in rows.blocks) == ["w", "w", "w/dp1"]
        assert rows.marks == []
    finally:
        other.context.destroy(linger=0)


def test_a_hole_without_replay_is_a_gap_mark(engine: Engine, follow: Follow) -> None:
    """Messages 2 to 4 never came."""
    _, rows = follow(engine.endpoint())
    engine.wait_for_subscriber()
    engine.send(0, 1, 5)
    until(lambda: len(rows.blocks) == 3)
    assert rows.gaps() == [("2", "4")]


def test_a_hole_is_filled_by_replay_before_what_comes_after(engine: Engine, follow: Follow) -> None:
    """The engine still keeps 1 to 3: they are taken in their place, and nothing is said to be lost."""
    reader, rows = follow(engine.endpoint(with_replay=True))
    engine.wait_for_subscriber()
    engine.serve_replay()  # the first question, before anything was sent
    engine.kept = {seq: message(seq) for seq in range(5)}
    engine.send(0, 4)
    engine.serve_replay()
    until(lambda: len(rows.blocks) == 5)
    assert engine.asked == [0, 1]
    assert [row["at_ns"] for row in rows.blocks] == [round((T0 + seq) * 1e9) for seq in range(5)]
    assert (rows.gaps(), reader.replayed) == ([], 3)


def test_what_the_engine_no_longer_keeps_stays_a_gap(engine: Engine, follow: Follow) -> None:
    """Of the missing 1 to 4 only 3 and 4 are kept: 1 and 2 are a gap."""
    _, rows = follow(engine.endpoint(with_replay=True))
    engine.wait_for_subscriber()
    engine.serve_replay()
    engine.kept = {seq: message(seq) for seq in (3, 4, 5)}
    engine.send(0, 5)
    engine.serve_replay()
    until(lambda: len(rows.blocks) == 4)
    assert rows.gaps() == [("1", "2")]


def test_who_comes_late_asks_for_the_beginning(engine: Engine, follow: Follow) -> None:
    """Attached to an engine that has published 0 to 9 and keeps 4 to 9: 0 to 3 are a gap."""
    engine.kept = {seq: message(seq) for seq in range(4, 10)}
    reader, rows = follow(engine.endpoint(with_replay=True))
    engine.serve_replay()
    until(lambda: len(rows.blocks) == 6)
    assert (rows.gaps(), reader.replayed) == ([("0", "3")], 6)


def test_what_was_lost_at_the_end_is_asked_for_before_closing(engine: Engine, follow: Follow) -> None:
    """Nothing came after the hole, so nobody would have noticed it."""
    reader, rows = follow(engine.endpoint(with_replay=True))
    engine.wait_for_subscriber()
    engine.serve_replay()
    engine.send(0)
    until(lambda: len(rows.blocks) == 1)
    engine.kept = {seq: message(seq) for seq in range(3)}
    reader._stop.set()
    engine.serve_replay()
    reader.stop()
    assert len(rows.blocks) == 3


def test_a_sequence_that_falls_is_a_new_life(engine: Engine, follow: Follow) -> None:
    """The cache is empty then, and what the former life still published is a hole of unknown size."""
    _, rows = follow(engine.endpoint())
    engine.wait_for_subscriber()
    engine.send(0, 1, 2)
    engine.send(0, 1, life=T0 + 100)
    until(lambda: len(rows.blocks) == 6)
    assert [row["change"] for row in rows.blocks] == ["stored"] * 3 + ["cleared"] + ["stored"] * 2
    assert rows.blocks[3]["reason"] == "restart"
    assert rows.blocks[2]["at_ns"] < rows.blocks[3]["at_ns"] < rows.blocks[4]["at_ns"]
    assert rows.gaps() == [("3", None)]
    assert [mark["mark"] for mark in rows.marks].count("worker_up") == 1


def test_a_new_life_that_begins_with_a_hole_says_so(engine: Engine, follow: Follow) -> None:
    """The subscriber was late after the restart: 0 of the new life is missing too."""
    _, rows = follow(engine.endpoint())
    engine.wait_for_subscriber()
    engine.send(0, 1, 2)
    engine.send(1, life=T0 + 100)
    until(lambda: len(rows.blocks) == 5)
    assert sorted(rows.gaps(), key=str) == [("0", "0"), ("3", None)]


def test_a_new_life_that_has_passed_the_former_sequence_is_still_recognised(engine: Engine, follow: Follow) -> None:
    """2 then 7 looks like a hole 3..6; the process start time tells that 0..6 of a new life are missing."""
    _, rows = follow(engine.endpoint(), process_start=lambda: T0 + 50)
    engine.wait_for_subscriber()
    engine.send(0, 1, 2)
    engine.send(7, life=T0 + 100)
    until(lambda: len(rows.blocks) == 5)
    assert sorted(rows.gaps(), key=str) == [("0", "6"), ("3", None)]
    assert [row["change"] for row in rows.blocks] == ["stored"] * 3 + ["cleared", "stored"]


def test_a_hole_in_one_life_is_only_a_hole(engine: Engine, follow: Follow) -> None:
    """The process started long before: no restart is invented."""
    _, rows = follow(engine.endpoint(), process_start=lambda: T0 - 50)
    engine.wait_for_subscriber()
    engine.send(0, 7)
    until(lambda: len(rows.blocks) == 2)
    assert rows.gaps() == [("1", "6")]
    assert [row["change"] for row in rows.blocks] == ["stored", "stored"]


def test_an_engine_that_connects_finds_us_again_after_its_restart(follow: Follow) -> None:
    """The endpoint is an address, so the engine connects and we bind: two publishers after each other, one socket."""
    context: zmq.Context[Any] = zmq.Context()
    port = free_port()
    _, rows = follow(KvEndpoint(f"tcp://127.0.0.1:{port}", bind=True))
    for life, seen in ((T0, 2), (T0 + 100, 5)):  # the second life begins with a `cleared` row
        publisher: zmq.Socket[Any] = context.socket(zmq.XPUB)
        publisher.connect(f"tcp://127.0.0.1:{port}")
        assert publisher.poll(5000)
        publisher.recv()
        for seq in range(2):
            publisher.send_multipart(message(seq, life=life))
        until(lambda: len(rows.blocks) >= seen)  # noqa: B023
        publisher.close(linger=0)
    context.term()
    assert [row["change"] for row in rows.blocks] == ["stored", "stored", "cleared", "stored", "stored"]


def test_rubbish_is_counted_and_the_stream_goes_on(engine: Engine, follow: Follow) -> None:
    """Another protocol on the port, or a release that changed its messages."""
    reader, rows = follow(engine.endpoint())
    engine.wait_for_subscriber()
    engine.pub.send_multipart([b"kv"])
    engine.pub.send_multipart([b"kv", (0).to_bytes(8, "big"), b"\xc1rubbish"])
    engine.pub.send_multipart(
        [b"kv", (0).to_bytes(8, "big"), msgspec.msgpack.encode([T0, [{"type": "BlockStored"}], 0])]
    )
    engine.send(0)
    until(lambda: len(rows.blocks) == 1)
    assert reader.refused == 3


def test_a_dead_replay_is_not_asked_again_and_again(
    engine: Engine, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One time-out, then a pause: live events must not wait for it each time."""
    asked: list[int] = []

    class Nobody(kv_reader.Replay):
        def __init__(self, context: Any, address: str, first_seq: int, **options: Any) -> None:
            super().__init__(context, address, first_seq, **options)
            asked.append(first_seq)

        def __iter__(self) -> Iterator[tuple[int, bytes]]:
            return iter(())

    monkeypatch.setattr(kv_reader, "Replay", Nobody)
    _, rows = follow(engine.endpoint(with_replay=True))
    engine.wait_for_subscriber()
    engine.send(0, 2, 4, 6)
    until(lambda: len(rows.blocks) == 4)
    assert asked == [0]
    assert rows.gaps() == [("1", "1"), ("3", "3"), ("5", "5")]


def test_a_mistake_of_ours_is_a_gap_mark_not_a_silent_end(
    engine: Engine, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that follows has ended; people must see it on the time axis."""
    reader, rows = follow(engine.endpoint())
    engine.wait_for_subscriber()
    monkeypatch.setattr(reader._decoder, "feed", lambda *_: 1 / 0)
    engine.send(0)
    until(lambda: bool(rows.marks))
    assert reader.error is not None
    assert "ZeroDivisionError" in reader.error
    assert "were not followed from here on" in rows.marks[0]["text"]
