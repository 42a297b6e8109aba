"""A fleet in virtual time: workers with clocks of their own, one loop that always moves the one that is furthest behind.

So nothing is seen before it happened, but for the step a worker is in: what it will have done at its end is known when the
step begins (a router may see a request leave up to one step early). A worker whose next steps are known ahead (`decode_run`)
sleeps through what does not concern it, and is brought forward when something does. Clients may lose patience, ask again, or
wait for their answer before they ask for more.
Invariant: what comes of a run does not depend on whether workers sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from engine_probe.clock import Clock
from engine_probe.engine.decode_run import NEVER, DecodeRun, foresee
from engine_probe.engine.engine import Engine, Output
from engine_probe.engine.fleet.prefix_bits import PrefixBits
from engine_probe.engine.fleet.router import Router
from engine_probe.engine.name_book import Numbers
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import NO_NAMES
from engine_probe.engine.sequence import Sequence as EngineSequence
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.errors import PromptRefused, UsageError

FLUSH_STEPS = 1 << 12
FLUSH_BLOCKS = 1 << 16


class FrontEnd(Protocol):
    """What stands before the engine: HTTP, parsing, a tokenizer."""

    def delay_s(self, call: Call, now_ns: int) -> float:
        """Seconds from the call's arrival until the engine has it."""


@dataclass(frozen=True, slots=True)
class ConstantFrontEnd:
    """Always the same."""

    seconds: float = 0.002

    def delay_s(self, call: Call, now_ns: int) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Patience:
    """A client that has no first token after `timeout_s` gives up, and asks again up to `max_retries` times after `backoff_s`."""

    timeout_s: float
    max_retries: int = 0
    backoff_s: float = 0.1


@dataclass(slots=True)
class Tally:
    """What a run came to. Counts of requests; virtual_s: how long it lasted on its own clock."""

    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    stuck: int = 0
    retries: int = 0
    output_tokens: int = 0
    steps: int = 0
    virtual_s: float = 0.0


@dataclass(slots=True)
class Ask:
    """A call under way: which try it is, who serves it, and the numbers of its blocks' names.

    in_front_since   it is in the front end still, no engine has it
    """

    call: Call
    attempt: int
    worker: int
    names: Numbers
    has_token: bool = False
    in_front_since: int | None = None


class VirtualFleet:
    """Engines on virtual clocks behind one router.

    equal_steps workers may sleep; False: every step is taken for itself, which comes to the same and takes longer
    in_flight   None: calls come when they come (open loop). A number: so many clients, each asks for the next call when its
                answer is there (closed loop); the calls' instants do not count then
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        router: Router,
        *,
        front_end: FrontEnd | None = None,
        patience: Patience | None = None,
        in_flight: int | None = None,
        equal_steps: bool = True,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        if not engines:
            raise UsageError("a fleet has at least one worker")
        if in_flight is not None and in_flight < 1:
            raise UsageError(f"in_flight is {in_flight}; expected 1 or more")
        self.engines = list(engines)
        self.router = router
        self.tally = Tally()
        self._front_end = front_end or ConstantFrontEnd()
        self._patience = patience
        self._in_flight = in_flight
        for engine in engines:
            engine.gives_all = False
        self._may_sleep = equal_steps
        self._book = engines[0].kv.book
        assert all(engine.kv.book is self._book for engine in engines), "workers of a fleet have one book of names"
        self._on_progress = on_progress
        self._clocks = [_virtual(engine.clock, engine.config.worker) for engine in engines]
        self._router_clock = _virtual(router.recorder.clock, "router")
        self._asleep: list[DecodeRun | None] = [None] * len(engines)
        self._due = [NEVER] * len(engines)
        """When each worker is to be stepped: when its next step begins, or the first that is not slept through."""
        self._now_ns = 0
        """When the step or event under way began."""
        # Which events a feed loses is drawn in their order over all workers.
        self._evictions_show = router.looks_up and router.feed.loss_ratio > 0
        self._events: list[tuple[int, int, Callable[[int], object], bool]] = []
        self._num_events = 0
        self._asks: dict[str, Ask] = {}
        self._calls: Iterator[Call] = iter(())

    def at(self, at_ns: int, action: Callable[[int], object]) -> None:
        """Do this at that instant of the run's clock (a fault begins, a cache is reset); it is given the instant."""
        self._at(at_ns, action, wakes=True)

    def cancel_at(self, request_id: str, at_ns: int, reason: str = "client_gone") -> None:
        """Its client goes away for good at that instant."""
        self._at(at_ns, lambda now_ns: self.cancel(request_id, now_ns, reason))

    def cancel(self, request_id: str, at_ns: int, reason: str = "client_gone") -> bool:
        """Its client goes away for good. False where the request has not come, or ended."""
        ask = self._asks.get(request_id)
        if ask is None:
            return False
        if not self._abort(ask, at_ns, reason):
            return False
        self.tally.aborted += 1
        self._end(request_id, at_ns)
        return True

    def run(self, calls: Iterable[Call]) -> Tally:
        """Serve the calls, in order of their arrival, to the last; rows go where the recorders' sinks lead."""
        self._calls = iter(calls)
        for _ in range(self._in_flight or 1):
            self._next_call(0)
        last_ns = 0
        while True:
            due_ns = min(self._due)
            event_ns = self._events[0][0] if self._events else NEVER
            if due_ns < event_ns:
                self._now_ns = due_ns
                self._move(self._due.index(due_ns), event_ns)
                continue
            if event_ns == NEVER:
                break
            at_ns, _, action, wakes = heappop(self._events)
            self._now_ns, last_ns = at_ns, max(last_ns, at_ns)
            if not wakes:
                action(at_ns)
                continue
            for worker in range(len(self.engines)):
                self._wake(worker, at_ns)
            action(at_ns)
            for worker, engine in enumerate(self.engines):
                engine.disturbed()
                self._look(worker)
        for engine in self.engines:
            engine.flight.stopped(engine)
            engine.flight.recorder.flush()
        self.router.recorder.flush()
        self.tally.virtual_s = max(last_ns, *(clock.now for clock in self._clocks)) / 1e9
        return self.tally

    def check_integrity(self) -> None:
        """Every engine's blocks and requests add up. Raises AssertionError."""
        for engine in self.engines:
            engine.check_integrity()

    def _at(self, at_ns: int, action: Callable[[int], object], *, wakes: bool = False) -> None:
        """wakes: it may look at every worker, and change any. Others wake whom they touch."""
        self._num_events += 1
        heappush(self._events, (at_ns, self._num_events, action, wakes))

    def _move(self, worker: int, event_ns: int) -> None:
        """It is due: it sleeps if it may, or takes a step."""
        run = self._asleep[worker]
        if run is not None:
            self._bring_forward(run, NEVER)
        ahead = None if run is not None and not run.goes_on else self._foresee(worker)
        if ahead is None:
            self._asleep[worker] = None
            self._step(worker, event_ns)
            ahead = self._foresee(worker)
        self._asleep[worker] = ahead
        self._look(worker)
        recorder = self.engines[worker].flight.recorder
        if recorder.blocks.num_waiting > FLUSH_BLOCKS or recorder.ring.head - recorder.ring.tail > FLUSH_STEPS:
            recorder.flush()

    def _foresee(self, worker: int) -> DecodeRun | None:
        return foresee(self.engines[worker], evictions_show=self._evictions_show) if self._may_sleep else None

    def _wake(self, worker: int, at_ns: int) -> None:
        """It has done what begins before this instant, and is ready for anything."""
        run = self._asleep[worker]
        if run is not None:
            self._bring_forward(run, at_ns)
            self._asleep[worker] = None
            self._look(worker)

    def _bring_forward(self, run: DecodeRun, until_ns: int) -> None:
        steps = run.advance(until_ns)
        self.tally.steps += steps
        self.tally.output_tokens += steps * run.batch

    def _look(self, worker: int) -> None:
        """When it is due next."""
        run = self._asleep[worker]
        if run is not None:
            self._due[worker] = run.end_ns
        else:
            self._due[worker] = self._clocks[worker].now if self.engines[worker].has_work else NEVER

    def _step(self, worker: int, event_ns: int) -> None:
        engine, clock = self.engines[worker], self._clocks[worker]
        given = engine.num_given
        outputs = engine.step()
        self.tally.steps += 1
        self.tally.output_tokens += engine.num_given - given
        if outputs is None:
            self._wait(engine, clock, event_ns)
            return
        for output in outputs:
            self._note(output, clock.now)

    def _wait(self, engine: Engine, clock: VirtualClock, event_ns: int) -> None:
        """Nothing can be computed until something happens."""
        deadline_ns = engine.next_deadline_ns
        until_ns = event_ns if deadline_ns is None else min(event_ns, deadline_ns)
        if until_ns < NEVER:
            clock.advance_to(until_ns)
            return
        for request_id in engine.request_ids:
            engine.abort(request_id, "stuck")
            self._end(request_id, clock.now)
            self.tally.stuck += 1

    def _next_call(self, now_ns: int) -> None:
        call = next(self._calls, None)
        if call is None:
            return
        at_ns = call.at_ns if self._in_flight is None else now_ns
        if at_ns < now_ns:
            raise UsageError(f"call {call.request_id} comes at {at_ns} ns, before its forerunner; sort the calls")
        self._at(at_ns, lambda at: self._arrive(call, at))

    def _arrive(self, call: Call, at_ns: int) -> None:
        if self._in_flight is None:
            self._next_call(at_ns)
        if self._on_progress is not None:
            self._on_progress(1)
        self._ask(call, at_ns, 0)

    def _ask(self, call: Call, at_ns: int, attempt: int) -> None:
        if self._book.is_full:
            self._forget_names()
        names = self._book.number(call.blocks if call.names is None else call.names)
        if self.router.looks_up:
            self._tell_feed(at_ns)
        # Its rows are judged by its clock when they are flushed: one that stood still would have them in the future.
        self._router_clock.advance_to(at_ns)
        worker = self.router.route(call, at_ns, names)
        engine, clock = self.engines[worker], self._clocks[worker]
        front_s = self._front_end.delay_s(call, at_ns) + self.router.decision_s
        queued_ns = at_ns + round(front_s * 1e9)
        ask = self._asks[call.request_id] = Ask(call, attempt, worker, names, in_front_since=at_ns)

        def submit(_: int) -> None:
            if self._asks.get(call.request_id) is not ask:
                return  # its client went away meanwhile
            ask.in_front_since = None
            self._wake(worker, queued_ns)
            self._submit(call, at_ns, queued_ns, attempt, engine, clock)
            engine.disturbed()
            self._look(worker)

        self._at(queued_ns, submit)

    def _forget_names(self) -> None:
        """Of blocks that nobody holds, knows of, or asks for."""
        count, index = self._book.num_given, self.router.feed.index
        held = np.logical_or.reduce([engine.holds_names() for engine in self.engines])
        if isinstance(index, PrefixBits):
            held |= index.holds(count)
        for ask in self._asks.values():
            held[ask.names] = True
        for names, parents in self.router.feed.pending():
            held[np.array([*names, *parents], dtype=np.int64)] = True
        self._book.forget(held)

    def _tell_feed(self, at_ns: int) -> None:
        """Evictions of those that sleep, where the router would have heard of them by now."""
        before_ns = at_ns - self.router.feed.delay_ns
        for run in self._asleep:
            if run is not None and run.next_eviction_ns <= before_ns:
                self._bring_forward(run, at_ns)

    def _submit(
        self, call: Call, at_ns: int, queued_ns: int, attempt: int, engine: Engine, clock: VirtualClock
    ) -> None:
        """The call is with its engine, and waits there from `queued_ns` on."""
        spans = [("frontend", at_ns, queued_ns)]
        self._enter(self._made(call, at_ns, attempt, spans, self._tokens_here(call)), queued_ns, engine, clock)
        self._wait_patiently(call, at_ns, queued_ns, attempt)

    def _tokens_here(self, call: Call) -> int:
        """Tokens that the engine which gets the call generates of it."""
        return call.output_tokens

    def _made(
        self, call: Call, at_ns: int, attempt: int, spans: Sequence[tuple[str, int, int]], output_tokens: int
    ) -> EngineSequence:
        ask = self._asks.get(call.request_id)
        columns = {
            "model": call.model,
            "workload": call.workload,
            "session_id": call.session_id,
            "turn": call.turn,
            "prefix_hash": call.prefix_hash,
            "route_id": call.request_id,
            "labels": dict(call.labels),
            "attempt": attempt,
            "retry_count": attempt,
        }
        return EngineSequence(
            call.request_id,
            call.prompt_tokens,
            SamplingParams(max_tokens=output_tokens),
            at_ns,
            prompt_hashes=call.blocks,
            priority=call.priority,
            tenant=call.tenant,
            columns={name: value for name, value in columns.items() if value is not None},
            early_spans=spans,
            names=NO_NAMES if ask is None else ask.names,
        )

    def _enter(self, sequence: EngineSequence, queued_ns: int, engine: Engine, clock: VirtualClock) -> None:
        clock.advance_to(queued_ns)
        try:
            engine.submit(sequence, queued_ns)
        except PromptRefused:
            self.tally.rejected += 1
            self._end(sequence.request_id, queued_ns)

    def _wait_patiently(self, call: Call, at_ns: int, queued_ns: int, attempt: int) -> None:
        if self._patience is not None and call.request_id in self._asks:
            due_ns = at_ns + round(self._patience.timeout_s * 1e9)
            self._at(max(due_ns, queued_ns), lambda at: self._lose_patience(call, attempt, at))

    def _lose_patience(self, call: Call, attempt: int, at_ns: int) -> None:
        ask, patience = self._asks.get(call.request_id), self._patience
        if ask is None or patience is None or ask.attempt != attempt or ask.has_token:
            return
        self._abort(ask, at_ns, "client_timeout")
        self.tally.aborted += 1
        self._end(call.request_id, at_ns, goes_on=attempt < patience.max_retries)
        if attempt < patience.max_retries:
            self.tally.retries += 1
            again_ns = at_ns + round(patience.backoff_s * 1e9)
            self._at(again_ns, lambda at: self._ask(call, at, attempt + 1))

    def _abort(self, ask: Ask, at_ns: int, reason: str) -> bool:
        """It ends where it is. False where it ended already."""
        self._wake(ask.worker, at_ns)
        if ask.in_front_since is not None:
            spans = [("frontend", ask.in_front_since, at_ns)]
            tokens = self._tokens_here(ask.call)
            self._gone(ask, self._made(ask.call, ask.in_front_since, ask.attempt, spans, tokens), at_ns, reason)
            return True
        self._clocks[ask.worker].advance_to(at_ns)
        is_done = self.engines[ask.worker].abort(ask.call.request_id, reason)
        self._look(ask.worker)
        return is_done

    def _gone(self, ask: Ask, sequence: EngineSequence, at_ns: int, reason: str) -> None:
        """It ends before its engine has it: a row that tells how far it came."""
        flight = self.engines[ask.worker].flight
        flight.arrived(sequence, at_ns)
        flight.ended(sequence, "aborted", reason, at_ns)

    def _note(self, output: Output, now_ns: int) -> None:
        ask = self._asks.get(output.sequence.request_id)
        if ask is not None and output.tokens:
            ask.has_token = True
        if output.finish_reason is not None:
            if output.finish_reason == "timeout":
                self.tally.aborted += 1
            else:
                self.tally.finished += 1
            self._end(output.sequence.request_id, now_ns)

    def _end(self, request_id: str, now_ns: int, *, goes_on: bool = False) -> None:
        ask = self._asks.pop(request_id, None)
        if ask is None:
            return
        self._left(ask.worker)
        if self._in_flight is not None and not goes_on:
            self._next_call(now_ns)

    def _left(self, worker: int) -> None:
        """One that was sent there is there no more."""
        self.router.board.ended(worker)


def _virtual(clock: Clock, whose: str) -> VirtualClock:
    if not isinstance(clock, VirtualClock):
        raise UsageError(f"{whose} does not run in virtual time")
    return clock
