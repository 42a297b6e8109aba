"""Publishes KV events over ZMQ, in vLLM's format: a PUB socket for what happens, a ROUTER for what somebody missed.

The engine's thread only notes events and hands them over once a step; a thread of its own encodes and sends. A queue that
is full drops the batch and counts it; its sequence number stays used, so that a subscriber sees the hole and asks again.
Source: vLLM 0.33 `ZmqEventPublisher`; reading side: `engine_probe.attach.kv_link`.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from engine_probe.chain_hash import ROOT
from engine_probe.digits import port_number
from engine_probe.engine.block_pool import Evicted, Seconds
from engine_probe.engine.name_book import Names
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.server.kv_messages import (
    DEVICE,
    FULL_ATTENTION,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)
from engine_probe.errors import CannotListen, UsageError

END_SEQ: Final = (-1).to_bytes(8, "big", signed=True)
HWM: Final = 100_000
POLL_S: Final = 0.05
CLOSE_S: Final = 2.0


class KvPublisher:
    """A KvListener.

    endpoint, replay   `tcp://127.0.0.1:5557`, a port alone (on loopback), `tcp://*:5557`, `ipc://...`: bound here; port 0
                       takes a free one; `connect:tcp://host:5557` connects to a subscriber that binds
    now_s              Unix s, of the engine's clock
    buffer_steps       batches kept for replay
    num_stored, num_removed, num_cleared   blocks told so far (clears: events); num_dropped: batches that did not fit
    Raises UsageError, CannotListen.
    """

    def __init__(
        self,
        block_size: int,
        endpoint: str,
        now_s: Callable[[], float],
        *,
        replay: str | None = None,
        topic: str = "",
        buffer_steps: int = 10_000,
        max_queue_size: int = 100_000,
    ) -> None:
        self._size = block_size
        self._now_s = now_s
        self._topic = topic.encode()
        self._events: list[Event] = []
        self._queue: queue.Queue[tuple[int, EventBatch] | None] = queue.Queue(max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._next_seq = 0
        self.num_stored = self.num_removed = self.num_cleared = self.num_dropped = 0
        self._closing = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub: Any = None
        self._replay: Any = None
        try:
            self._pub, self.endpoint, self.binds = self._open(zmq.PUB, endpoint)
            self.replay_endpoint: str | None = None
            if replay is not None:
                self._replay, self.replay_endpoint, _ = self._open(zmq.ROUTER, replay)
        except BaseException:
            self._context.destroy(0)
            raise
        self.sources: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "bind": self.binds,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": buffer_steps,
            "hwm": HWM,
            "max_queue_size": max_queue_size,
            "topic": topic,
        }
        self._thread = threading.Thread(target=self._run, name="kvscope-kv-publisher", daemon=True)
        self._thread.start()

    # From the engine's thread (KvListener)

    def stored(self, sequence: Sequence, names: Names, above: Names, first: int, at_ns: int) -> None:
        """One event for each run of blocks that follow each other."""
        hashes, parents = names.tolist(), above.tolist()
        self.num_stored += len(hashes)
        begin = 0
        for index in range(1, len(hashes) + 1):
            if index == len(hashes) or parents[index] != hashes[index - 1]:
                self._events.append(self._chain(sequence, hashes[begin:index], parents[begin], first))
                begin = index

    def hit(self, sequence: Sequence, hashes: Names, idle_s: Seconds, at_ns: int) -> None:
        """Told by nobody in this format, unless asked for."""

    def evicted(self, hashes: Names, blocks: Evicted, cause: str | None, at_ns: int) -> None:
        self.num_removed += len(hashes)
        self._events.append(BlockRemoved(hashes.tolist(), DEVICE, 0))

    def cleared(self, at_ns: int) -> None:
        self.num_cleared += 1
        self._events.append(AllBlocksCleared())

    def flush(self) -> None:
        """What happened since the last call goes out as one batch; nothing happened: no batch."""
        if not self._events:
            return
        batch, self._events = EventBatch(self._now_s(), list(self._events), 0), []
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        try:
            self._queue.put_nowait((seq, batch))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Send what is queued, within bounded time, and close. A second call does nothing."""
        if self._closing.is_set():
            return
        self.flush()
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._context.destroy(round(CLOSE_S * 1000))

    def _chain(self, sequence: Sequence, hashes: list[int], parent: int, first: int) -> BlockStored:
        at = sequence.hashes.index(hashes[0], first)
        tokens = sequence.token_ids[at * self._size : (at + len(hashes)) * self._size]
        is_first = parent == ROOT
        salt = sequence.cache_salt
        keys: list[tuple[str, ...] | None] | None = None
        if is_first and salt is not None:
            keys = [(salt,), *(None for _ in hashes[1:])]
        return BlockStored(
            hashes,
            None if is_first else parent,
            tokens,
            self._size,
            None,
            DEVICE,
            None,
            extra_keys=keys,
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
        )

    # In the publisher's thread

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while not (self._closing.is_set() and self._queue.empty()):
            if self._replay is not None and self._replay.poll(0):
                self._answer()
            try:
                item = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if item is None:
                return
            seq, batch = item
            payload = encode(batch)
            self._kept.append((seq, payload))
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))

    def _answer(self) -> None:
        """One replay request: every kept batch from the number it names on, then the end marker."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # no replay request: whoever sent it waits for nothing that we know
        first = int.from_bytes(frames[2], "big")
        for seq, payload in self._kept:
            if seq >= first:
                self._replay.send_multipart((frames[0], b"", self._topic, seq.to_bytes(8, "big"), payload))
        self._replay.send_multipart((frames[0], b"", b"", END_SEQ, b""))

    def _open(self, kind: int, text: str) -> tuple[Any, str, bool]:
        """(socket, its address as a subscriber may use it, whether it is bound here)."""
        binds = not text.startswith("connect:")
        address = text.removeprefix("connect:").removeprefix("bind:")
        if (port := port_number(address)) is not None or address == "0":
            address = f"tcp://127.0.0.1:{port or 0}"
        opened = self._context.socket(kind)
        opened.set_hwm(HWM)
        try:
            if binds:
                opened.bind(address)
                return opened, opened.getsockopt_string(zmq.LAST_ENDPOINT), True
            opened.connect(address)
        except zmq.ZMQError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise CannotListen(f"KV events cannot be published at {address}: {error.strerror}") from error
            raise UsageError(
                f"{text!r} is no endpoint for KV events ({error.strerror}); expected a port, tcp://ADDRESS:PORT with an "
                "address of this machine, or ipc://PATH",
                endpoint=text,
            ) from error
        return opened, address, False


def is_reached_by_others(endpoint: str) -> bool:
    """Whether other machines may connect to it: token ids of prompts are read there."""
    if endpoint.startswith(("connect:", "ipc://", "inproc://")):
        return False
    address = endpoint.removeprefix("bind:")
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return bool(host) and host not in ("127.0.0.1", "localhost", "::1")
