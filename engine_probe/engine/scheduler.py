"""Which tokens the next step computes: continuous batching with a token budget, chunked prefill and preemption.

Order in a step: decodes of running sequences, seniors first; their unfinished prompts; then admission from the queue,
strictly from its head. A running sequence for which no block is left makes the most junior one give way (recompute, or
swap to host memory), so the most senior always goes on: together with `waiting_queue` no wait is without bound.
Source: Yu et al. 2022 (Orca); Agrawal et al. 2024 (chunked prefill); vLLM v1 `scheduler.py`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_probe.engine.executor import Chunk, StepPlan
from engine_probe.engine.host_blocks import HostBlocks
from engine_probe.engine.kv_manager import NO_BLOCKS, KvManager
from engine_probe.engine.sequence import Sequence, State
from engine_probe.engine.waiting_queue import WaitingQueue
from engine_probe.errors import UsageError

OVERDUE = 1 << 40
"""Rank of a sequence that was admitted because it had waited past the bound: nobody makes it give way again."""
REASONS = ("blocks", "budget", "seats", "dependency")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How steps are filled.

    max_num_seqs             seats: sequences that run at once
    max_num_batched_tokens   budget of a step, tokens
    max_chunk_tokens         most tokens of one prompt in one step (None: the budget)
    chunked_prefill          False: a prompt is computed in one step, alone beside decodes if it exceeds the budget
    policy                   fcfs | shortest | priority
    preemption               recompute | swap
    watermark_ratio          share of the blocks that admission leaves available while anything runs
    max_wait_s               a wait beyond this goes before what the policy prefers
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_chunk_tokens: int | None = None
    chunked_prefill: bool = True
    policy: str = "fcfs"
    preemption: str = "recompute"
    watermark_ratio: float = 0.01
    max_wait_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise UsageError(f"max_num_seqs is {self.max_num_seqs}; expected 1 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "not every running sequence could decode in a step"
            )
        if self.max_chunk_tokens is not None and self.max_chunk_tokens < 1:
            raise UsageError(f"max_chunk_tokens is {self.max_chunk_tokens}; expected 1 or more")
        if self.preemption not in ("recompute", "swap"):
            raise UsageError(f"preemption is '{self.preemption}'; known: recompute, swap")
        if not 0.0 <= self.watermark_ratio < 1.0:
            raise UsageError(f"watermark_ratio is {self.watermark_ratio}; expected 0 or more, below 1")

    def most_prompt_tokens(self, num_prompt: int) -> int:
        """Most tokens of a prompt of that length that one step computes."""
        if not self.chunked_prefill:
            return num_prompt
        return min(num_prompt, self.max_num_batched_tokens, self.max_chunk_tokens or num_prompt)


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence got its seat.

    found_tokens   KV it found, in the cache or (is_swapped) on the host
    lookup_ns      begin and end of the look-up
    """

    sequence: Sequence
    found_tokens: int
    lookup_ns: tuple[int, int]
    is_swapped: bool = False


@dataclass(slots=True)
class Schedule:
    """A step's plan, and the decisions that made it.

    admitted    what began, or goes on after it gave way
    preempted   (sequence that gave its blocks back, request for which it did)
    held_up_by  what the head of the queue waits for: blocks | budget | seats | dependency; None where nobody waits
    """

    plan: StepPlan = field(default_factory=StepPlan)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[tuple[Sequence, str]] = field(default_factory=list)
    held_up_by: str | None = None


class Scheduler:
    """Owns the running list and the queue; blocks are `kv`'s, host blocks `host`'s.

    now_ns   the engine's clock: a look-up takes time, so it moves within a step
    """

    def __init__(
        self, kv: KvManager, config: SchedulerConfig, host: HostBlocks, now_ns: Callable[[], int], max_context: int
    ) -> None:
        self.kv = kv
        self.max_context = max_context
        self.config = config
        self.host = host
        self.waiting = WaitingQueue(config.policy, round(config.max_wait_s * 1e9))
        self.running: list[Sequence] = []
        self._now_ns = now_ns
        self.watermark = int(config.watermark_ratio * kv.pool.num_blocks)
        self.num_kept = 0
        """Seats kept for siblings of what runs."""

    def add(self, sequence: Sequence) -> None:
        """It waits from `waits_since_ns` on."""
        self.waiting.push(sequence)

    def schedule(self) -> Schedule:
        """Plan the next step. Blocks of everything in the plan are allocated; nothing is computed yet."""
        now_ns = self._now_ns()
        self.kv.expire(now_ns)
        schedule = Schedule()
        budget = self._continue(schedule, now_ns)
        if self.waiting.num_again or self.waiting.num_new:
            if schedule.preempted:
                schedule.held_up_by = "blocks"
            else:
                schedule.held_up_by = self._admit(schedule, budget)
        return schedule

    def end(self, sequence: Sequence) -> None:
        """It finished, failed or was aborted: it holds nothing any more."""
        was = sequence.state
        sequence.state = State.ENDED
        if was is State.RUNNING:
            self.running.remove(sequence)
            self.num_kept -= len(sequence.forks)
        elif was is State.FORKING:
            self._leave_sibling(sequence)
        elif was is not State.ENDED:
            self.waiting.left(was)
        self.kv.free(sequence, self._now_ns())
        self.host.free(sequence)
        if sequence.forks:
            self._pass_on_prompt(sequence)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """All of its prompt but the last token is computed: its siblings begin from its blocks, each in its seat."""
        siblings, sequence.forks = sequence.forks, []
        self.num_kept -= len(siblings)
        now_ns = self._now_ns()
        for sibling in siblings:
            self.kv.fork(sequence, sibling)
            sibling.forked_from = None
            sibling.state = State.RUNNING
            sibling.scheduled_ns, sibling.num_cached = now_ns, sibling.num_computed
            insort(self.running, sibling, key=_seniority)
        return siblings

    def check_integrity(self) -> None:
        """Blocks, seats and states agree. Raises AssertionError."""
        under_way = [*self.running, *self.waiting]
        self.kv.check_integrity(under_way)
        self.host.check_integrity(under_way)
        assert all(sequence.state is State.RUNNING for sequence in self.running)
        assert self.num_kept == sum(len(sequence.forks) for sequence in self.running)
        assert len(self.running) + self.num_kept <= self.config.max_num_seqs
        assert sum(1 for _ in self.waiting) == len(self.waiting), "the queue counts wrong"
        assert all(not sequence.blocks for sequence in self.waiting), "a waiting sequence holds blocks"

    def _continue(self, schedule: Schedule, now_ns: int) -> int:
        """Decodes and unfinished prompts of what runs, seniors first. Returns the budget left."""
        plan, size = schedule.plan, self.kv.block_size
        budget = self.config.max_num_batched_tokens
        unfinished = []
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            # `is_in_prompt`, spelt out: this is done for every running sequence in every step.
            computed, num_prompt = sequence.num_computed, sequence.num_prompt
            if num_prompt + sequence.num_output - computed > 1 or (computed < num_prompt and not sequence.is_forked):
                unfinished.append(sequence)
                continue
            if sequence.is_forked or computed >= len(sequence.blocks) * size:
                copies = self._room(sequence, schedule, now_ns)
                if copies is None:
                    continue
                plan.copies += copies
                sequence.is_forked = False
                if computed < num_prompt:  # siblings part: the last prompt token is each one's own
                    plan.prefills.append(Chunk(sequence, computed, 1, emits=True))
                    continue
            plan.decodes.append(sequence)
        budget -= len(plan.decodes) + len(plan.prefills)
        for sequence in unfinished:
            if sequence.state is not State.RUNNING:
                continue
            budget -= self._prefill(sequence, plan, budget)
        return budget

    def _room(self, sequence: Sequence, schedule: Schedule, now_ns: int) -> list[tuple[int, int]] | None:
        """Room for one more token; juniors give way. None: it gave way itself."""
        while True:
            copies = self.kv.grow(sequence, sequence.num_computed + 1, now_ns)
            if copies is not None:
                return copies
            victim = self.running[-1]
            self._preempt(victim, sequence.request_id, schedule, now_ns)
            if victim is sequence:
                return None

    def _preempt(self, victim: Sequence, cause: str, schedule: Schedule, now_ns: int) -> None:
        self.running.remove(victim)
        self.num_kept -= len(victim.forks)
        victim.is_forked = False
        schedule.plan.copies = [copy for copy in schedule.plan.copies if copy[1] not in victim.blocks]
        victim.num_preemptions += 1
        victim.num_ever_computed = max(victim.num_ever_computed, victim.num_computed)
        victim.is_decoding = False
        victim.state = State.PREEMPTED
        if self.config.preemption == "swap" and victim.num_pending == 1:
            held = victim.blocks[: self.kv.blocks_for(victim.num_computed)]
            host_blocks = self.host.take(victim, len(held))
            if host_blocks is not None:
                schedule.plan.swap_out += zip(held, host_blocks, strict=True)
                victim.state = State.SWAPPED
        self.kv.free(victim, now_ns)
        if victim.state is State.PREEMPTED:
            victim.num_computed = 0
        self.waiting.push_again(victim)
        schedule.preempted.append((victim, cause))

    def _prefill(self, sequence: Sequence, plan: StepPlan, budget: int) -> int:
        """Plan the next chunk of its prompt. Returns its tokens."""
        tokens = sequence.num_pending
        if sequence.forks:
            tokens = sequence.num_prompt - 1 - sequence.num_computed  # the last one is each sibling's own
        if self.config.chunked_prefill:
            tokens = min(tokens, budget, self.config.max_chunk_tokens or tokens)
        if tokens <= 0:
            return 0
        start = sequence.num_computed
        again = max(0, min(start + tokens, sequence.num_ever_computed) - start)
        plan.prefills.append(Chunk(sequence, start, tokens, tokens == sequence.num_pending, again))
        return tokens

    def _admit(self, schedule: Schedule, budget: int) -> str | None:
        """Admit from the head of the queue until something is lacking: its name."""
        while True:
            sequence = self.waiting.next(self._now_ns())
            if sequence is None:
                return None
            if len(self.running) + self.num_kept + len(sequence.forks) >= self.config.max_num_seqs:
                return "seats"
            if budget <= 0:
                return "budget"
            if sequence.state is State.SWAPPED:
                if not self._swap_in(sequence, schedule):
                    return "blocks"
                if sequence.is_in_prompt:
                    budget -= self._prefill(sequence, schedule.plan, budget)
                else:
                    schedule.plan.decodes.append(sequence)
                    budget -= 1
                continue
            before_ns = self._now_ns()
            found = self.kv.find(sequence)
            if sequence.forks and len(found) * self.kv.block_size >= sequence.num_prompt - 1:
                found = found[:-1]  # something must be left to compute before the siblings part
            now_ns = self._now_ns()
            if not self._fits_budget(sequence, len(found) * self.kv.block_size, schedule.plan, budget):
                return "budget"
            spare = self.watermark if self.running else 0
            if not self.kv.admit(sequence, found, sequence.num_known, spare, now_ns):
                return "blocks"
            if sequence.scheduled_ns is None:
                sequence.scheduled_ns, sequence.num_cached = now_ns, sequence.num_computed
            self._seat(sequence, now_ns)
            schedule.admitted.append(Admission(sequence, sequence.num_computed, (before_ns, now_ns)))
            budget -= self._prefill(sequence, schedule.plan, budget)

    def _fits_budget(self, sequence: Sequence, found_tokens: int, plan: StepPlan, budget: int) -> bool:
        """Unchunked prompts come whole: within the budget, or as the only one of the step."""
        return self.config.chunked_prefill or sequence.num_known - found_tokens <= budget or not plan.prefills

    def _swap_in(self, sequence: Sequence, schedule: Schedule) -> bool:
        now_ns = self._now_ns()
        sequence.blocks = []
        sequence.num_sealed = 0
        computed = sequence.num_computed
        spare = self.watermark if self.running else 0
        if not self.kv.admit(sequence, NO_BLOCKS, sequence.num_known, spare, now_ns):
            return False
        sequence.num_computed = computed
        schedule.plan.swap_in += zip(sequence.blocks, sequence.host_blocks, strict=False)
        self.host.free(sequence)
        self._seat(sequence, now_ns)
        schedule.admitted.append(Admission(sequence, computed, (now_ns, now_ns), is_swapped=True))
        return True

    def _seat(self, sequence: Sequence, now_ns: int) -> None:
        was = sequence.state
        if self.waiting.is_overdue(sequence, now_ns) and was is State.WAITING:
            sequence.priority = OVERDUE
        sequence.state = State.RUNNING
        self.num_kept += len(sequence.forks)
        self.waiting.left(was)
        insort(self.running, sequence, key=_seniority)

    def _leave_sibling(self, sequence: Sequence) -> None:
        """It ended before the prompt that it waited for was computed."""
        sibling = sequence.forked_from
        assert sibling is not None, "a forking sequence has no sibling to wait for"
        sibling.forks.remove(sequence)
        self.num_kept -= sibling.state is State.RUNNING

    def _pass_on_prompt(self, ended: Sequence) -> None:
        """The sibling that computed the prompt is gone: the next one takes it over."""
        heir, *others = ended.forks
        ended.forks = []
        heir.forked_from, heir.forks = None, others
        for other in others:
            other.forked_from = heir
        heir.state = State.WAITING
        self.waiting.push(heir)


def _seniority(sequence: Sequence) -> tuple[int, int, int]:
    return (-sequence.priority, sequence.arrival_ns, sequence.number)
