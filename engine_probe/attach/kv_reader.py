"""The thread that follows an engine's KV events: orders them, fills gaps by replay, notices a new publisher.

Invariant: a message is decoded after all that came before it, or the hole is a `gap` mark. A hole is first asked for
again (replay); what the engine no longer keeps stays a hole. A sequence that falls, or goes on although the engine's
process is a new one, is a new life: what the former life published after its last message seen is a hole of unknown
size, and is said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

from engine_probe.adapters.kv_events import Fed, KvEventDecoder
from engine_probe.adapters.vllm import worker_name
from engine_probe.attach.kv_link import REPLAY_TIMEOUT_S, KvEndpoint, Replay, open_subscriber, read_message
from engine_probe.errors import UnknownFormat

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

POLL_MS: Final = 100
BURST: Final = 500
CLEARED_BEFORE_NS: Final = 1_000
REPLAY_PAUSE_S: Final = 30.0
START_CHECK_S: Final = 2.0

Emit = Callable[[Mapping[str, "pa.Table"]], None]


class _Head(msgspec.Struct, array_like=True):
    """What is needed of a batch before it is decoded: its time and its data-parallel rank."""

    ts: float
    events: msgspec.Raw
    data_parallel_rank: int | None = None


_HEAD = msgspec.msgpack.Decoder(_Head)


class KvReader:
    """Subscribes to the endpoints of one instance.

    emit            takes tables (`block`, `mark`) as they come
    process_start   Unix s at which the engine's present process started (None: unknown), asked only at a hole
    """

    def __init__(
        self,
        worker: str,
        endpoints: Sequence[KvEndpoint],
        decoder: KvEventDecoder,
        emit: Emit,
        *,
        process_start: Callable[[], float | None] = lambda: None,
        clock: Callable[[], int] = time.time_ns,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
    ) -> None:
        self._replay_timeout_s = replay_timeout_s
        self._worker = worker
        self._endpoints = tuple(endpoints)
        self._decoder = decoder
        self._emit = emit
        self._process_start = process_start
        self._clock = clock
        self._context: zmq.Context[Any] = zmq.Context()
        self._links: dict[zmq.Socket[Any], KvEndpoint] = {}
        self._last: dict[int, tuple[int, float]] = {}  # rank -> (seq, engine time) of the newest message fed
        self._no_replay_until = 0.0
        self._next_start_check = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-kv-events", daemon=True)
        self.replayed = 0
        self.refused = 0
        self.error: str | None = None

    @property
    def endpoints(self) -> Sequence[KvEndpoint]:
        return self._endpoints

    @property
    def messages(self) -> int:
        return self._decoder.counts.messages

    def start(self) -> list[str]:
        """Open the sockets and start reading; one sentence an endpoint. Raises EngineUnreachable."""
        told = []
        try:
            for endpoint in self._endpoints:
                sub, how = open_subscriber(self._context, endpoint)
                self._links[sub] = endpoint
                told.append(how)
        except BaseException:
            self._close()
            raise
        self._thread.start()
        return told

    def stop(self) -> None:
        """Take in what has arrived, ask once more for what was missed at the end, and close."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(30.0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for sub in self._links:
            poller.register(sub, zmq.POLLIN)
        try:
            self._catch_up()
            self._flush()
            while not self._stop.is_set():
                self._take(dict(poller.poll(POLL_MS)))
                self._flush()
            while ready := dict(poller.poll(0)):
                self._take(ready)
            self._catch_up()
            self._flush()
        except Exception as error:  # a mistake of ours must not end in silence
            log.exception("following KV events ended")
            self.error = f"following KV events ended by a mistake of kvscope ({type(error).__name__}: {error})"
            self._emit_gap(self._worker, self._clock(), f"KV events were not followed from here on: {self.error}.", {})
        finally:
            self._close()

    def _take(self, ready: Mapping[Any, int]) -> None:
        for sub in ready:
            for _ in range(BURST):
                try:
                    frames = sub.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                message = read_message(frames)
                if message is None:
                    self.refused += 1
                else:
                    self._message(self._links[sub], *message)

    def _message(self, link: KvEndpoint, seq: int, payload: bytes) -> None:
        """Feed one live message, after what is missing before it."""
        try:
            head = _HEAD.decode(payload)
        except (msgspec.MsgspecError, ValueError):
            self.refused += 1
            return
        rank = head.data_parallel_rank or 0
        if self._is_new_life(rank, seq, head.ts):
            # Strictly before what the new process stored, or its first blocks would look cleared.
            self._decoder.restart(self._worker, rank, round(head.ts * 1e9) - CLEARED_BEFORE_NS)
            self._ended(rank)
        gap = self._decoder.gap_before(self._worker, seq, rank)
        if gap is not None and link.replay is not None:
            self._fill(link.replay, gap[0], gap[1])
        self._feed(seq, payload)

    def _fill(self, address: str, first: int, last: int) -> None:
        if time.monotonic() < self._no_replay_until:
            return
        replay = Replay(self._context, address, first, timeout_s=self._replay_timeout_s)
        for seq, payload in replay:
            if seq > last:
                break
            self.replayed += self._feed(seq, payload)
        if not replay.answered:
            self._no_replay_until = time.monotonic() + REPLAY_PAUSE_S

    def _catch_up(self) -> None:
        """Ask every rank that can replay for all that comes after the newest message seen."""
        for link in self._links.values():
            if link.replay is not None:
                first = self._last.get(link.rank, (-1, 0.0))[0] + 1
                self._fill(link.replay, first, (1 << 63) - 1)

    def _feed(self, seq: int, payload: bytes) -> bool:
        """Decode one message; True where it was new."""
        try:
            head = _HEAD.decode(payload)
            fed: Fed = self._decoder.feed(self._worker, seq, payload, self._clock())
        except (UnknownFormat, msgspec.MsgspecError, ValueError):
            self.refused += 1
            return False
        if fed.duplicate:
            return False
        rank = head.data_parallel_rank or 0
        if fed.restarted:
            self._ended(rank)
        self._last[rank] = (seq, head.ts)
        return True

    def _is_new_life(self, rank: int, seq: int, ts: float) -> bool:
        """The sequence fell, or what looks like a hole is a new process that has already passed the former one."""
        last = self._last.get(rank)
        if last is None or seq == last[0] + 1:
            return False
        if seq <= last[0]:
            return ts > last[1]
        if time.monotonic() < self._next_start_check:
            return False
        self._next_start_check = time.monotonic() + START_CHECK_S
        start_s = self._process_start()
        return start_s is not None and last[1] < start_s <= ts

    def _ended(self, rank: int) -> None:
        """The former life's end: how many messages it still published cannot be known."""
        last = self._last.pop(rank, None)
        if last is None:
            return
        text = f"The engine's former process ended: KV events after its message {last[0]}, if any, were not seen."
        facts = {"first_seq": str(last[0] + 1), "messages": "unknown"}
        self._emit_gap(worker_name(self._worker, rank), round(last[1] * 1e9), text, facts)

    def _emit_gap(self, worker: str, at_ns: int, text: str, facts: dict[str, str]) -> None:
        from engine_probe.schema import table_from_rows

        attrs = {"source": "kv_events", "seen_by": "attach"} | facts
        row = {"mark": "gap", "worker": worker, "subject": worker, "at_ns": at_ns, "text": text, "attrs": attrs}
        self._emit({"mark": table_from_rows("mark", [row])})

    def _flush(self) -> None:
        tables = self._decoder.drain()
        if tables:
            self._emit(tables)

    def _close(self) -> None:
        for sub in self._links:
            sub.close()
        self._links.clear()
        self._context.term()
