"""The engine: takes requests, plans a step, lets the executor compute it, gives tokens out, and tells all of it.

`step` is the whole loop body; who calls it (a thread, an event loop in virtual time, a test) is not its business. Not
thread-safe: `submit`, `abort` and `step` are called from one thread. Invariant: a sequence that ended holds no block.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from engine_probe.clock import Clock
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.executor import Executor, StepPlan, StepResult
from engine_probe.engine.flight import Flight
from engine_probe.engine.host_blocks import HostBlocks
from engine_probe.engine.host_costs import HostCosts, MeasuredCosts
from engine_probe.engine.kv_listeners import KvListeners
from engine_probe.engine.kv_manager import KvListener, KvManager, PrefixFeed
from engine_probe.engine.name_book import NameBook
from engine_probe.engine.scheduler import Schedule, Scheduler
from engine_probe.engine.sequence import Sequence, State
from engine_probe.engine.speculation import keep_accepted
from engine_probe.errors import PromptRefused, UsageError
from engine_probe.recording.recorder import Recorder

COUNTED = 0
"""Stands for a token where tokens are only counted."""
ONE: Items[int] = (COUNTED,)


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of a sequence ([n] ids; zeros where tokens are only counted). finish_reason: None while it goes on."""

    sequence: Sequence
    tokens: Items[int]
    finish_reason: str | None


class Engine:
    """One worker.

    recorder   its clock is the engine's clock
    listeners  hear of block changes too (a router's index, a publisher of KV events)
    book       numbers of block names, where several engines have one; feed: hears of blocks by them
    costs      what bookkeeping costs in virtual time; default: it takes the time that it takes
    """

    flight_class: type[Flight] = Flight

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        recorder: Recorder,
        *,
        costs: HostCosts | None = None,
        listeners: Items[KvListener] = (),
        book: NameBook | None = None,
        feed: PrefixFeed | None = None,
    ) -> None:
        _refuse_mismatch(config, executor)
        self.config = config
        self.executor = executor
        self.clock: Clock = recorder.clock
        self.costs: HostCosts = costs or MeasuredCosts()
        self._owns_book = book is None
        book = book or NameBook()
        self.flight = self.flight_class(recorder, config, book)
        self.kv = KvManager(
            executor.num_blocks,
            config.block_size,
            salt=config.salt,
            prefix_caching=config.prefix_caching,
            eviction=config.eviction,
            ttl_s=config.ttl_s,
            min_reuse_tokens=config.min_reuse_tokens,
            costs=self.costs,
            listener=KvListeners((self.flight, *listeners)),
            book=book,
            feed=feed,
            clock_ns=self.clock.monotonic_ns,
        )
        self.host = HostBlocks(config.swap_blocks)
        self.max_context = min(executor.max_context, executor.num_blocks * config.block_size)
        self.scheduler = Scheduler(self.kv, config.scheduler, self.host, self.clock.monotonic_ns, self.max_context)
        self._by_id: dict[str, Sequence] = {}
        self._deadlines: list[tuple[int, int, Sequence]] = []
        self._num_submitted = 0
        self.num_awaited = 0
        """Requests that will wait here when their KV has come from elsewhere."""
        self._eos = executor.eos_token_ids
        self.gives_all = True
        self.num_given = 0
        """Tokens so far."""
        self.stands_still: str | None = None
        """What holds up the head of the queue where another step would change nothing about it: blocks | seats; else None."""
        self.flight.started(self)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def has_work(self) -> bool:
        """Something runs or waits."""
        return bool(self._by_id)

    @property
    def request_ids(self) -> list[str]:
        """Requests under way, in the order in which they came."""
        return list(self._by_id)

    @property
    def next_deadline_ns(self) -> int | None:
        """When the next request runs out of time."""
        while self._deadlines and self._deadlines[0][2].finish_reason is not None:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def submit(self, sequence: Sequence, queued_ns: int | None = None) -> None:
        """It waits for its first step from `queued_ns` on (default: now).

        Raises PromptRefused where it can never run; that is recorded too.
        """
        if self._owns_book and self.kv.book.is_full:
            self.kv.book.forget(self.holds_names())
        reason = self._refusal(sequence)
        now_ns = self.clock.monotonic_ns() if queued_ns is None else queued_ns
        if reason is not None:
            self.flight.rejected(sequence, reason)
            raise PromptRefused(reason, request_id=sequence.request_id)
        self._take(sequence, now_ns)
        self.scheduler.add(sequence)

    def submit_siblings(self, sequences: Items[Sequence], queued_ns: int | None = None) -> None:
        """Several answers to one prompt: it is computed once, its blocks are shared until somebody writes one.

        Raises PromptRefused where they can never run; none of them was taken then.
        """
        first, *others = sequences
        is_shared = first.num_prompt > 1
        reason = next((why for sequence in sequences if (why := self._refusal(sequence))), None)
        seats = self.config.scheduler.max_num_seqs
        if len({sequence.request_id for sequence in sequences}) < len(sequences):
            reason = f"two answers to request {first.request_id} have one id; each needs its own"
        elif is_shared and len(sequences) > seats:
            reason = (
                f"{len(sequences)} answers to request {first.request_id} need as many seats; this engine has {seats}"
            )
        if reason is not None:
            self.flight.rejected(first, reason)
            raise PromptRefused(reason, request_id=first.request_id)
        now_ns = self.clock.monotonic_ns() if queued_ns is None else queued_ns
        for sequence in sequences:
            self._take(sequence, now_ns)
        if not is_shared:
            for sequence in sequences:
                self.scheduler.add(sequence)
            return
        for sequence in others:
            sequence.state, sequence.forked_from = State.FORKING, first
        first.forks = others
        self.scheduler.add(first)

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """Its client went away, or gave up: it ends now, at whatever point it is. False where it is not under way."""
        return self.end(request_id, "aborted", reason)

    def end(self, request_id: str, state: str, reason: str) -> bool:
        """It ends now, between two steps: finished (its text has what it was to stop at), failed, or aborted.

        False where it is not under way.
        """
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return False
        self.scheduler.end(sequence)
        self.stands_still = None
        sequence.finish_reason = reason
        self.flight.ended(sequence, state, reason)
        return True

    def step(self) -> list[Output] | None:
        """One iteration; the tokens that came of it, and requests that ran out of time. None: nothing could be done.

        Where `gives_all` is off, a sequence that goes on after its first token is left out; `num_given` counts its tokens too.
        """
        expired = self._expire_requests()
        begin_ns = self.clock.monotonic_ns()
        self.flight.begin_step(begin_ns)
        self.kv.alloc_ns = 0
        schedule = self.scheduler.schedule()
        plan = schedule.plan
        if plan.is_empty:
            self.flight.skip_step(schedule)
            return expired or None
        planned_ns = self.clock.monotonic_ns()
        self.flight.planned(schedule)
        result = self.executor.execute(plan)
        if result.accepted:
            result = keep_accepted(self, plan, result)
        outputs = self._take_in(plan, result)
        self.flight.end_step(self, schedule, result, (planned_ns - begin_ns) / 1e9)
        has_ended = bool(expired)
        for output in outputs:
            if output.finish_reason is not None:
                has_ended = True
                self.flight.ended(output.sequence, "finished", output.finish_reason)
        self.stands_still = None if has_ended else _standing(schedule)
        return expired + outputs

    def disturbed(self) -> None:
        """Somebody else changed its blocks or its requests: what held up its queue may do so no more."""
        self.stands_still = None

    def nothing_until_ns(self, now_ns: int) -> int:
        """Until when nothing happens of itself, but for steps."""
        until_ns = 1 << 62
        deadline_ns, expiry_ns = self.next_deadline_ns, self.kv.pool.next_expiry_ns
        if deadline_ns is not None:
            until_ns = deadline_ns
        if expiry_ns is not None:
            until_ns = min(until_ns, expiry_ns)
        oldest = self.scheduler.waiting.oldest()
        if oldest is not None:
            overdue_ns = oldest.waits_since_ns + self.scheduler.waiting.max_wait_ns + 1
            if overdue_ns > now_ns:
                until_ns = min(until_ns, overdue_ns)
        return until_ns

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; what runs keeps its blocks. Returns how many blocks were forgotten."""
        self.stands_still = None
        return self.kv.clear(self.clock.monotonic_ns())

    def holds_names(self) -> npt.NDArray[np.bool_]:
        """[numbers given by its book] whether a block holds that name, or a request under way has it."""
        held = self.kv.pool.holds(self.kv.book.num_given)
        for sequence in self._by_id.values():
            held[sequence.names] = True
        return held

    def check_integrity(self) -> None:
        """Raise AssertionError where blocks, seats, states and open requests disagree."""
        self.scheduler.check_integrity()
        forking = sum(sequence.state is State.FORKING for sequence in self._by_id.values())
        assert len(self._by_id) == self.num_running + self.num_waiting + forking, "an ended sequence is under way"

    def close(self) -> None:
        """Abort what is under way and give memory back."""
        for request_id in list(self._by_id):
            self.abort(request_id, "shutdown")
        self.executor.close()

    def _take(self, sequence: Sequence, now_ns: int) -> None:
        sequence.number = self._num_submitted
        self._num_submitted += 1
        sequence.waits_since_ns = now_ns
        if sequence.deadline_ns is None and self.config.timeout_s is not None:
            sequence.deadline_ns = sequence.arrival_ns + round(self.config.timeout_s * 1e9)
        if sequence.deadline_ns is not None:
            heappush(self._deadlines, (sequence.deadline_ns, sequence.number, sequence))
        self._by_id[sequence.request_id] = sequence
        self.stands_still = None
        self.flight.arrived(sequence, now_ns)

    def _refusal(self, sequence: Sequence) -> str | None:
        if sequence.num_prompt < 1:
            return f"request {sequence.request_id} has no prompt token; give at least one"
        if sequence.num_prompt >= self.max_context:
            return (
                f"request {sequence.request_id} has {sequence.num_prompt} prompt tokens; this engine takes "
                f"{self.max_context - 1} and one to generate (KV blocks: {self.executor.num_blocks} of "
                f"{self.config.block_size} tokens, model: {self.executor.max_context})"
            )
        if sequence.request_id in self._by_id:
            return f"request id {sequence.request_id} is under way already; give another"
        at_once = self.config.scheduler.most_prompt_tokens(sequence.num_prompt)
        return self.executor.refusal(at_once, sequence.num_prompt)

    def _expire_requests(self) -> list[Output]:
        now_ns = self.clock.monotonic_ns()
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, _, sequence = heappop(self._deadlines)
            if sequence.finish_reason is None:
                self.abort(sequence.request_id, "timeout")
                expired.append(Output(sequence, (), "timeout"))
        return expired

    def _take_in(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Tokens reach their sequences; what is complete is sealed; what has enough ends."""
        now_ns = self.clock.monotonic_ns()
        for chunk in plan.prefills:
            chunk.sequence.num_computed += chunk.num_tokens
            self.kv.seal(chunk.sequence, now_ns)
            if chunk.sequence.forks and chunk.sequence.num_pending == 1:
                for sibling in self.scheduler.fork(chunk.sequence):
                    self.flight.forked(sibling, chunk.sequence, now_ns)
        size = self.config.block_size
        for sequence in plan.decodes:
            sequence.num_computed += 1
            if sequence.num_computed % size == 0:
                self.kv.seal(sequence, now_ns)
        outputs = []
        if not self.gives_all and result.tokens is None and not result.accepted:
            emitting = plan.emitting
            self.num_given += len(emitting)
            for sequence in emitting:
                sequence.num_output += 1
                if sequence.num_output == 1 or sequence.num_left <= 0 or sequence.num_known >= self.max_context:
                    outputs.append(self._given(sequence, ONE, self._finish_reason(sequence, COUNTED, is_counted=True)))
            return outputs
        for index, sequence in enumerate(plan.emitting):
            sequence.num_output += 1
            if result.tokens is None:
                more = result.accepted[index] if index < len(result.accepted) else 0
                tokens: Items[int] = (COUNTED,) * (1 + more)
            else:
                tokens = (result.tokens[index],)
                sequence.token_ids.append(tokens[0])
            self.num_given += len(tokens)
            reason = self._finish_reason(sequence, tokens[-1], is_counted=result.tokens is None)
            outputs.append(self._given(sequence, tokens, reason))
        return outputs

    def _given(self, sequence: Sequence, tokens: Items[int], reason: str | None) -> Output:
        if reason is not None:
            sequence.finish_reason = reason
            del self._by_id[sequence.request_id]
            self.scheduler.end(sequence)
        return Output(sequence, tokens, reason)

    def _finish_reason(self, sequence: Sequence, token: int, *, is_counted: bool) -> str | None:
        if not is_counted:
            if token in sequence.params.stop_token_ids:
                return "stop"
            if token in self._eos and not sequence.params.ignore_eos:
                return "stop"
        if sequence.num_left <= 0 or sequence.num_known >= self.max_context:
            return "length"
        return None


def _standing(schedule: Schedule) -> str | None:
    """What holds up the queue's head, if the next step finds it as this one did: nothing was prefilled, moved or given up."""
    plan = schedule.plan
    if schedule.held_up_by not in ("blocks", "seats") or schedule.admitted or schedule.preempted:
        return None
    return None if plan.prefills or plan.copies or plan.swap_in or plan.swap_out else schedule.held_up_by


def _refuse_mismatch(config: EngineConfig, executor: Executor) -> None:
    """Where an executor holds blocks itself, they are of the engine's size, and there are enough on the host."""
    size = getattr(executor, "block_size", config.block_size)
    if size != config.block_size:
        raise UsageError(
            f"the engine's blocks have {config.block_size} tokens, the executor's {size}; give both one size"
        )
    host = getattr(executor, "num_host_blocks", config.swap_blocks)
    if host < config.swap_blocks:
        raise UsageError(
            f"swap_blocks is {config.swap_blocks}, and the executor has {host} host blocks; give it as many"
        )
