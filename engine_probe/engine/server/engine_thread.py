"""The thread that owns the engine: takes requests from a queue, steps, hands tokens over to the event loop.

Nothing else touches the engine. Whatever a step raises ends the requests under way as failed and the engine goes on; a
second failure in a row, or blocks that do not add up after it, ends the engine: everything is answered 503 from then on.
Invariant: every ticket that was submitted gets exactly one last piece, unless it was aborted.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from engine_probe.engine.engine import Engine, Output
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.server.kv_publisher import KvPublisher
from engine_probe.engine.server.metrics_page import MetricsPage
from engine_probe.engine.server.ticket import Piece, Ticket
from engine_probe.errors import EngineError, EngineNotReady, KvscopeError, PromptRefused, RequestTimedOut

log = logging.getLogger(__name__)

IDLE_S: Final = 1.0
"""After so long without work the gauges are recorded once more, so that the record does not end in mid-load."""
BLOCKED_S: Final = 0.005
T = TypeVar("T")


class EngineThread:
    """Verbs may be called from any thread; `start` from that of the event loop which gets the pieces."""

    def __init__(self, engine: Engine, page: MetricsPage, publisher: KvPublisher | None = None) -> None:
        self._engine = engine
        self._page = page
        self._publisher = publisher
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._outbox: list[tuple[Ticket, Piece]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures_in_a_row = 0
        self._is_idle = False
        self._stopping = False
        self.dead: str | None = None
        self._thread = threading.Thread(target=self._run, name="kvscope-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """It takes requests."""
        return self._thread.is_alive() and self.dead is None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin."""
        self._loop = loop
        self._thread.start()

    def submit(self, ticket: Ticket, queued_ns: int) -> None:
        """It waits for the scheduler from `queued_ns` on (the engine may be in the middle of a step)."""
        self._inbox.put(lambda: self._submit(ticket, queued_ns))
        if not self._thread.is_alive() and self._loop is not None:  # it ended since it was asked for
            gone = Piece(error=EngineNotReady(f"the engine ended: {self.dead}"))
            self._loop.call_soon_threadsafe(ticket.deliver, ticket, gone)

    def refuse(self, sequence: Sequence, reason: str) -> None:
        """Record that it can never run; who asked has been told."""
        self._page.refused()
        self._inbox.put(lambda: self._engine.flight.rejected(sequence, reason))

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Its client is gone: it ends before the next step; nothing more is delivered."""
        self._inbox.put(lambda: self._abort(request_id, reason))

    def call(self, ask: Callable[[Engine], T]) -> Future[T]:
        """Run `ask` with the engine between two steps."""
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(ask(self._engine))
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(run)
        if not self._thread.is_alive() and not answer.done():
            answer.set_exception(EngineNotReady(f"the engine ended: {self.dead}"))
        return answer

    def close(self, timeout_s: float = 30.0) -> None:
        """End what is under way, give memory back. A second call does nothing."""
        self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # In the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if self._engine.has_work and not self._stopping:
                    self._step()
                self._hand_over()
        except Exception as error:  # a mistake of ours must not leave clients waiting for ever
            log.exception("engine thread ended")
            self._die(f"{type(error).__name__}: {error}")
        finally:
            self._end()

    def _take_commands(self) -> None:
        """Do what was asked for; wait for it where there is nothing else to do."""
        has_work = self._engine.has_work
        try:
            while True:
                command = self._inbox.get_nowait() if has_work else self._inbox.get(timeout=IDLE_S)
                command()
                has_work = True
        except queue.Empty:
            if not self._engine.has_work and not self._is_idle:
                self._is_idle = True
                self._engine.flight.stopped(self._engine)
                self._page.step(self._engine, 0)

    def _step(self) -> None:
        engine = self._engine
        self._is_idle = False
        begin_ns = engine.clock.monotonic_ns()
        try:
            outputs = engine.step()
        except Exception as error:
            self._step_failed(error)
            return
        self._failures_in_a_row = 0
        if outputs is None:
            time.sleep(BLOCKED_S)
            return
        now_ns = engine.clock.monotonic_ns()
        num_output = 0
        for output in outputs:
            num_output += len(output.tokens)
            self._output(output, now_ns)
        self._page.step(engine, num_output, (now_ns - begin_ns) / 1e9)

    def _output(self, output: Output, now_ns: int) -> None:
        sequence = output.sequence
        ticket = self._tickets.get(sequence.request_id)
        if ticket is None:
            return
        if output.finish_reason == "timeout":
            waited_s = (now_ns - sequence.arrival_ns) / 1e9
            late = RequestTimedOut(f"the request was not done after {waited_s:.1f} s; that is this engine's limit")
            self._last(ticket, Piece(error=late), "abort", now_ns)
            return
        try:
            piece = ticket.take(output.tokens, output.finish_reason)
        except Exception as error:  # a tokenizer is somebody else's: its failure is this request's, not the engine's
            log.exception("tokens did not become text")
            self._engine.end(sequence.request_id, "failed", "error")
            failed = EngineError(f"the tokens did not become text ({type(error).__name__})")
            self._last(ticket, Piece(error=failed), "error", now_ns)
            return
        if ticket.first_ns is None:
            ticket.first_ns = now_ns
            self._page.first_token(sequence, now_ns)
        elif ticket.last_ns is not None:
            self._page.next_tokens((now_ns - ticket.last_ns) / 1e9)
        ticket.last_ns = now_ns
        if piece.finish_reason is None:
            self._outbox.append((ticket, piece))
            return
        if output.finish_reason is None:
            self._engine.end(sequence.request_id, "finished", "stop")
        self._last(ticket, piece, piece.finish_reason, now_ns)

    def _last(self, ticket: Ticket, piece: Piece, reason: str, now_ns: int) -> None:
        self._tickets.pop(ticket.sequence.request_id, None)
        self._page.ended(ticket.sequence, reason, ticket.first_ns, ticket.last_ns, now_ns)
        self._outbox.append((ticket, piece))

    def _submit(self, ticket: Ticket, queued_ns: int) -> None:
        sequence = ticket.sequence
        if self.dead is not None:
            self._outbox.append((ticket, Piece(error=EngineNotReady(f"the engine ended: {self.dead}"))))
            return
        try:
            self._engine.submit(sequence, queued_ns)
        except PromptRefused as error:
            self._page.refused()
            self._outbox.append((ticket, Piece(error=error)))
            return
        except Exception as error:  # a mistake of ours costs this request alone
            log.exception("request was not taken")
            self._engine.end(sequence.request_id, "failed", "error")
            failed = EngineError(f"the request was not taken ({type(error).__name__})")
            self._outbox.append((ticket, Piece(error=failed)))
            return
        self._tickets[sequence.request_id] = ticket
        self._outbox.append((ticket, Piece()))  # it was taken: an answer may begin
        self._page.step(self._engine, 0)

    def _abort(self, request_id: str, reason: str) -> None:
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return
        self._engine.abort(request_id, reason)
        now_ns = self._engine.clock.monotonic_ns()
        self._page.ended(ticket.sequence, "abort", ticket.first_ns, ticket.last_ns, now_ns)
        self._page.step(self._engine, 0)

    def _step_failed(self, error: Exception) -> None:
        """Its requests are lost, their blocks are not."""
        log.exception("step failed")
        self._page.step_failed()
        self._failures_in_a_row += 1
        told = error if isinstance(error, KvscopeError) else EngineError(f"a step failed ({type(error).__name__})")
        self._fail_all(told)
        try:
            self._engine.check_integrity()
        except AssertionError as broken:
            self._die(f"after a step that failed ({error}), {broken}")
        if self._failures_in_a_row > 1:
            self._die(f"two steps in a row failed, the last with: {error}")

    def _fail_all(self, error: KvscopeError, state: str = "failed", reason: str = "error") -> None:
        now_ns = self._engine.clock.monotonic_ns()
        for request_id in self._engine.request_ids:
            self._engine.end(request_id, state, reason)
        for ticket in list(self._tickets.values()):
            self._last(ticket, Piece(error=error), "abort" if state == "aborted" else "error", now_ns)
        self._page.step(self._engine, 0)

    def _die(self, why: str) -> None:
        self.dead = why
        log.error("engine ended", extra={"why": why})

    def _hand_over(self) -> None:
        """Pieces to the loop, all of a step at once; block events to the publisher."""
        if self._publisher is not None:
            self._publisher.flush()
        if not self._outbox or self._loop is None:
            return
        pieces, self._outbox = self._outbox, []
        try:
            self._loop.call_soon_threadsafe(_deliver, pieces)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.warning("pieces were not delivered", extra={"pieces": len(pieces)})

    def _end(self) -> None:
        why = "the engine was stopped before the request was done" if self.dead is None else self.dead
        self.dead = self.dead or "it was stopped"
        self._fail_all(EngineNotReady(why), "aborted", "shutdown")
        while True:  # who came in at the last moment is told as well
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
        self._hand_over()
        self._engine.flight.stopped(self._engine)
        self._engine.close()


def _deliver(pieces: list[tuple[Ticket, Piece]]) -> None:
    for ticket, piece in pieces:
        ticket.deliver(ticket, piece)
