"""What an engine's loop calls: a few numbers a step, a note where a request changes, and nothing else.

A token's instant is the end of its step, so the loop records one instant a step, and of each request only where a run of
steps of one kind begins. Rows are made by another thread (`flusher.py`), some times a second. Verbs are called from one
thread, the engine's; they take no lock, wait for nothing and raise nothing: what does not fit is counted, and told by a
`gap` mark. Instants given to the recorder are nanoseconds of its clock's `monotonic_ns`.

    slot = recorder.arrive("cmpl-7", prompt_tokens=900)
    recorder.begin_step(); recorder.prefill(slot, 900, emits=1); recorder.end_step(num_running=1)
    recorder.begin_step(); recorder.decode(slot);                recorder.end_step(num_running=1)
    recorder.begin_step(); recorder.finish(slot, finish_reason="stop"); recorder.end_step(num_running=1)

Invariant: rows out + rows lost + requests open = rows in. Memory: `memory_bytes`, plus what open requests note.
"""

from __future__ import annotations

import atexit
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from engine_probe.clock import Clock
from engine_probe.events import DROP_ORDER, KINDS
from engine_probe.recording.block_log import BlockLog, Values
from engine_probe.recording.live import LiveView, look
from engine_probe.recording.request_log import DECODE, MAX_CHANGES, PREFILL, STALL, OpenRequest
from engine_probe.recording.step_ring import NAN, ROW_BYTES, UNKNOWN, StepRing
from engine_probe.sampling import Sampling

if TYPE_CHECKING:
    from engine_probe.recording.flusher import Flusher
    from engine_probe.recording.request_rows import RequestRow
    from engine_probe.sending.sink import Sink

NO_SLOT: Final = -1
"""A slot of no request: every verb takes it and does nothing."""


class Recorder:
    """Records one engine instance.

    sink            where rows go; closed with the recorder
    worker, run_id  columns of every row
    constants       kind -> columns that are the same in every row of it (engine, model, policy, ...)
    sampling        which requests and blocks are kept; default all
    flush_s         seconds between flushes; 0: no thread, the owner calls `flush`
    steps, blocks, ended, rows   most steps, block events, ended requests and other rows that may wait for a flush
    max_open        most requests open at once
    """

    def __init__(
        self,
        sink: Sink,
        *,
        worker: str | None = None,
        run_id: str | None = None,
        constants: Mapping[str, Mapping[str, Any]] | None = None,
        clock: Clock | None = None,
        sampling: Sampling | None = None,
        flush_s: float = 0.5,
        steps: int = 1 << 14,
        blocks: int = 1 << 18,
        ended: int = 1 << 14,
        rows: int = 1 << 13,
        max_open: int = 1 << 16,
    ) -> None:
        from engine_probe.recording.flusher import Flusher

        self.clock = clock or Clock()
        self.sampling = sampling or Sampling()
        self.worker = worker
        common = {"worker": worker or None, "run_id": run_id or None}
        self.constants: dict[str, dict[str, Any]] = {k: {**common, **(constants or {}).get(k, {})} for k in KINDS}
        self.ring = StepRing(steps)
        self.blocks = BlockLog(blocks)
        self.ended: deque[OpenRequest] = deque()
        self.measured: deque[RequestRow] = deque()
        self.rows: deque[tuple[str, dict[str, Any]]] = deque()
        self.refused: Counter[str] = Counter()
        self._max_ended = ended
        self._room = {kind: _room(kind, rows) for kind in KINDS}
        self._keeps_all = self.sampling.rate == 1.0
        self._max_open = max_open
        self._open: dict[int, OpenRequest] = {}
        self._num_slots = 0
        self._now = self.clock.monotonic_ns
        self._step = 0
        self._in_step = False
        self._start_ns = self._now()
        self._probe_ns = 0
        self._flusher: Flusher = Flusher(self, sink, flush_s)
        atexit.register(self.close)

    @property
    def memory_bytes(self) -> int:
        """Memory of the preallocated ring, and of queues when they are full (about)."""
        return int(self.ring.capacity * ROW_BYTES + self.blocks.capacity * 48)

    @property
    def lost(self) -> dict[str, int]:
        """Rows lost so far, by kind, whatever the reason; each was or will be told by a `gap` mark."""
        full = Counter({"step": self.ring.num_lost, "block": self.blocks.num_lost})
        return dict(+(self.refused + full + self._flusher.lost))

    @property
    def probe_s(self) -> float:
        """Seconds that the recorder took of the engine's thread since the last step was written."""
        return self._probe_ns / 1e9

    # Steps

    def begin_step(self, at_ns: int | None = None) -> None:
        """An iteration begins (now, or at this instant)."""
        entered = perf_counter_ns()
        self._start_ns = self._now() if at_ns is None else at_ns
        self._in_step = True
        self._probe_ns += perf_counter_ns() - entered

    def end_step(
        self,
        *,
        num_running: int = UNKNOWN,
        num_waiting_prefill: int = UNKNOWN,
        num_waiting_decode: int = UNKNOWN,
        prefill_tokens: int = UNKNOWN,
        decode_tokens: int = UNKNOWN,
        recomputed_tokens: int = UNKNOWN,
        num_preempted: int = UNKNOWN,
        blocks_total: int = UNKNOWN,
        blocks_used: int = UNKNOWN,
        blocks_reserved: int = UNKNOWN,
        blocks_cached: int = UNKNOWN,
        blocks_evicted: int = UNKNOWN,
        wasted_slots: int = UNKNOWN,
        kv_cache_bytes: int = UNKNOWN,
        batch_size: int = UNKNOWN,
        max_seq_len: int = UNKNOWN,
        waiting_on_blocks: int = UNKNOWN,
        waiting_on_budget: int = UNKNOWN,
        waiting_on_seats: int = UNKNOWN,
        waiting_on_dependency: int = UNKNOWN,
        waiting_on_unknown: int = UNKNOWN,
        schedule_s: float = NAN,
        forward_s: float = NAN,
        sample_s: float = NAN,
        alloc_s: float = NAN,
        oldest_wait_s: float = NAN,
        kv_load_s: float = NAN,
        padding_ratio: float = NAN,
        gpu_util: float = NAN,
        memory_util: float = NAN,
        at_ns: int | None = None,
        probe_s: float | None = None,
        run: tuple[Sequence[int], Sequence[float]] | None = None,
    ) -> int:
        """The iteration ends (now, or at this instant); returns its number. What is not given is unknown.

        probe_s   what the recorder took of it, s, where that is known better than by measuring (virtual time)
        run       it stands for two or more in a row that decode the same sequences into the blocks that they have: the end of
                  each, and its forward_s; at_ns, oldest_wait_s, wasted_slots are those of the last
        """
        entered = perf_counter_ns()
        end_ns = self._now() if at_ns is None else at_ns
        step = self._step
        # fmt: off
        values = (
            self._start_ns, end_ns, self._probe_ns if probe_s is None else int(probe_s * 1e9),
            num_running, num_waiting_prefill, num_waiting_decode, prefill_tokens, decode_tokens, recomputed_tokens,
            num_preempted, blocks_total, blocks_used, blocks_reserved, blocks_cached, blocks_evicted, wasted_slots,
            kv_cache_bytes, batch_size, max_seq_len,
            waiting_on_blocks, waiting_on_budget, waiting_on_seats, waiting_on_dependency, waiting_on_unknown,
            schedule_s, forward_s, sample_s, alloc_s, oldest_wait_s, kv_load_s, padding_ratio, gpu_util, memory_util,
        )
        # fmt: on
        if run is None:
            self.ring.append(step, 1, *values)
            self._step = step + 1
        else:
            self.ring.append_run(*run, step, *values)
            self._step = step + len(run[0])
        self._in_step = False
        self._start_ns = end_ns
        # The cost of this call is known only now: it is told with the next step.
        self._probe_ns = perf_counter_ns() - entered
        return step

    # Requests

    def arrive(
        self, request_id: str, arrival_ns: int | None = None, *, queued_ns: int | None = None, **columns: Any
    ) -> int:
        """A request came in; returns its slot.

        queued_ns   when it began to wait for the scheduler, where that was later than its arrival
        columns     anything of a `request` row that is known already
        """
        entered = perf_counter_ns()
        if len(self._open) >= self._max_open:
            self.refused["request"] += 1
            return NO_SLOT
        slot = self._num_slots
        self._num_slots += 1
        kept = self._keeps_all or self.sampling.keeps_request(request_id, columns.get("prefix_hash"))
        arrival = self._now() if arrival_ns is None else arrival_ns
        self._open[slot] = OpenRequest(request_id, arrival, arrival if queued_ns is None else queued_ns, columns, kept)
        self._probe_ns += perf_counter_ns() - entered
        return slot

    def note(self, slot: int, **columns: Any) -> None:
        """More columns of the request's row: cached_tokens, prefix_hash, prompt_blocks, ..."""
        request = self._open.get(slot)
        if request is not None:
            request.columns.update(columns)

    def span(self, slot: int, phase: str, start_ns: int, end_ns: int, tokens: int | None = None) -> None:
        """A stretch that the engine measured itself: frontend, tokenize, cache_lookup, kv_load, kv_transfer, ..."""
        request = self._open.get(slot)
        if request is not None:
            if request.spans is None:
                request.spans = []
            request.spans.append((phase, start_ns, end_ns, tokens))

    def prefill(self, slot: int, tokens: int, *, emits: int = 0, recomputed: int = 0) -> None:
        """This step computes `tokens` of its prompt, `recomputed` of them again; the last chunk emits a token."""
        entered = perf_counter_ns()
        request = self._open.get(slot)
        if request is not None:
            self._change(request, PREFILL, tokens)
            request.prefill_chunks += 1
            request.recomputed_tokens += recomputed
            if emits:
                if request.emits is None:
                    request.emits = {}
                request.emits[self._step] = emits
            request.state, request.waiting_since_ns = "running", None
        self._probe_ns += perf_counter_ns() - entered

    def decode(self, slot: int, tokens: int = 1) -> None:
        """From this step on, every step gives it `tokens` tokens, until something else is said."""
        entered = perf_counter_ns()
        request = self._open.get(slot)
        if request is not None:
            self._change(request, DECODE, tokens)
            request.state, request.waiting_since_ns = "running", None
        self._probe_ns += perf_counter_ns() - entered

    def stall(self, slot: int) -> None:
        """From this step on it does not run (starved, swapped out), until prefill or decode is said."""
        entered = perf_counter_ns()
        request = self._open.get(slot)
        if request is not None:
            self._change(request, STALL, 0)
            request.state = "stalled"
            if request.waiting_since_ns is None:
                request.waiting_since_ns = self._start_ns
        self._probe_ns += perf_counter_ns() - entered

    def preempt(self, slot: int) -> None:
        """It gave its blocks back while running: a stall that is counted."""
        request = self._open.get(slot)
        if request is not None:
            request.num_preemptions += 1
            self.stall(slot)

    def finish(self, slot: int, state: str = "finished", end_ns: int | None = None, **columns: Any) -> None:
        """It ended: finished (the step under way gave it its last tokens), failed, aborted or rejected (it did not)."""
        entered = perf_counter_ns()
        request = self._open.pop(slot, None)
        if request is not None:
            request.state = state
            request.columns.update(columns)
            request.stop_step = self._step + (self._in_step and state == "finished")
            request.end_ns = self._now() if end_ns is None else end_ns
            if request.is_kept:
                if len(self.ended) < self._max_ended:
                    self.ended.append(request)
                else:
                    self.refused["request"] += 1
        self._probe_ns += perf_counter_ns() - entered

    def add(self, row: RequestRow) -> None:
        """A request that was measured elsewhere (a proxy), as it stands: instants are monotonic, sampling is the caller's.

        Unlike the other verbs it may be called from any thread.
        """
        if len(self.measured) < self._max_ended:
            self.measured.append(row)
        else:
            self.refused["request"] += 1

    # Other rows

    def block_events(
        self,
        change: str,
        block_hash: Values,
        *,
        slot: int = NO_SLOT,
        at_ns: int | None = None,
        parent_hash: Values | None = None,
        num_tokens: int | Values | None = None,
        idle_s: Values | None = None,
        age_s: Values | None = None,
        reuse_count: Values | None = None,
        tier: str | None = "device",
        reason: str | None = None,
        request_id: str | None = None,
    ) -> None:
        """The same happened to these blocks (lists or numpy arrays of one length, copied here)."""
        entered = perf_counter_ns()
        request = self._open.get(slot)
        try:
            # A plain tuple in the order of BlockEvents: making the named one costs more than all the rest.
            self.blocks.append(
                (
                    self._now() if at_ns is None else at_ns,
                    len(block_hash),
                    change,
                    tier,
                    reason,
                    request_id if request is None else request.request_id,
                    _copy(block_hash),
                    None if parent_hash is None else _copy(parent_hash),
                    num_tokens if num_tokens is None or isinstance(num_tokens, int) else _copy(num_tokens),
                    None if idle_s is None else _copy(idle_s),
                    None if age_s is None else _copy(age_s),
                    None if reuse_count is None else _copy(reuse_count),
                )
            )
        except TypeError:  # what was given is no list: counted, as everything that does not fit
            self.refused["block"] += 1
        self._probe_ns += perf_counter_ns() - entered

    def row(self, kind: str, at_ns: int | None = None, slot: int = NO_SLOT, **columns: Any) -> None:
        """A row of a rare kind (route, transfer, worker, check, sample, mark). slot: the request it belongs to."""
        entered = perf_counter_ns()
        columns["at_ns"] = self._now() if at_ns is None else at_ns
        request = self._open.get(slot)
        if request is not None:
            columns.setdefault("request_id", request.request_id)
        if self._keeps(kind, request, columns):
            if len(self.rows) < self._room.get(kind, 0):
                self.rows.append((kind, columns))
            else:
                self.refused[kind if kind in KINDS else "unknown kind"] += 1
        self._probe_ns += perf_counter_ns() - entered

    # For others

    def live(self) -> LiveView:
        """Requests that are open now, seen from any thread, a moment old."""
        return look(self.open_requests, self._now(), self.clock.offset_ns)

    @property
    def open_requests(self) -> list[OpenRequest]:
        """Requests that have not ended, from any thread, a moment old."""
        return list(self._open.values())

    def flush(self) -> None:
        """Make rows of what is there and hand them to the sink (the flush thread does this by itself)."""
        self._flusher.flush()

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush what has ended, and close the sink. Requests still open get no row."""
        atexit.unregister(self.close)
        self._flusher.close(timeout_s)

    def _change(self, request: OpenRequest, kind: int, tokens: int) -> None:
        if len(request.changes) < MAX_CHANGES:
            request.changes += (self._step, kind, tokens)
        else:
            request.is_cut = True

    def _keeps(self, kind: str, request: OpenRequest | None, columns: Mapping[str, Any]) -> bool:
        if kind not in ("route", "transfer") or self.sampling.rate == 1.0:
            return True
        if request is not None:
            return request.is_kept
        return self.sampling.keeps_request(str(columns.get("request_id", "")), columns.get("prefix_hash"))


def _room(kind: str, rows: int) -> int:
    """How full the queue may be for a row of this kind to be taken: what overload drops first is refused first."""
    return max(1, rows * (len(DROP_ORDER) + DROP_ORDER.index(kind) + 1) // (2 * len(DROP_ORDER)))


def _copy(values: Any) -> Any:
    """The engine may go on changing its list."""
    return values.copy() if hasattr(values, "copy") else list(values)
