"""Steps in which all that runs decodes and nothing else can happen: known ahead, and done when somebody wants to know.

A fleet in virtual time spends most of its steps like that. While nobody comes, ends or gives way, a step's time follows from
how far the sequences are, so their ends are worked out at once; blocks are taken and rows written when the run is brought
forward. It ends before the step in which anything else may happen: a last token, a block that cannot be had, a deadline, an
expiry, a wait past its bound. A queue is no hindrance while its head is held up by what only an end can bring.
Invariant: clock, blocks and rows are those of the same steps taken one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from engine_probe.engine.sequence import Sequence, State

if TYPE_CHECKING:
    from engine_probe.engine.engine import Engine

HORIZON = 64
"""Steps that are foreseen at most; what comes between makes the rest of them void."""
SHORTEST = 2
NEVER = 1 << 62


class DecodeRun:
    """`num_steps` steps of one engine that begin at `begins`, of which some are done."""

    __slots__ = (
        "_begins",
        "_done",
        "_ends",
        "_engine",
        "_evicting",
        "_extra_ns",
        "_forward_s",
        "_growing",
        "_held_up_by",
        "_num_unfilled",
        "_sequences",
        "batch",
        "end_ns",
        "goes_on",
    )

    def __init__(
        self,
        engine: Engine,
        sequences: list[Sequence],
        begins: list[int],
        ends: list[int],
        forward_s: list[float],
        growing: list[tuple[int, Sequence]],
        evicting: list[int],
        extra_ns: dict[int, int],
        held_up_by: str | None,
        *,
        goes_on: bool,
    ) -> None:
        self._engine = engine
        self._sequences = sequences
        self._begins, self._ends, self._forward_s = begins, ends, forward_s
        self._growing = growing
        self._evicting = evicting
        self._extra_ns = extra_ns
        self._held_up_by = held_up_by
        self._done = 0
        size = engine.kv.block_size
        self._num_unfilled = sum([len(sequence.blocks) * size - sequence.num_computed for sequence in sequences])
        """Slots of their blocks that hold no token yet."""
        self.batch = len(sequences)
        self.end_ns = ends[-1]
        """Begin of the first step that is not part of it."""
        self.goes_on = goes_on
        """It ended at the horizon: that step may begin another."""

    @property
    def next_eviction_ns(self) -> int:
        """When its next step begins that evicts a block; NEVER where none does."""
        at = bisect_left(self._evicting, self._done)
        return self._begins[self._evicting[at]] if at < len(self._evicting) else NEVER

    def advance(self, until_ns: int) -> int:
        """Do the steps that begin before this instant. Returns how many were done."""
        first, stop = self._done, bisect_left(self._begins, until_ns)
        if stop <= first:
            return 0
        engine, flight, ends = self._engine, self._engine.flight, self._ends
        clock, growing, size = engine.clock, self._growing, engine.kv.block_size
        flight.decoding(self._sequences)
        # What happened between the steps before is told with the first.
        owes = flight.owes(engine)
        step = first
        while step < stop:
            begin_ns = self._begins[step]
            clock.advance_to(begin_ns)  # type: ignore[attr-defined]  # only virtual time knows ahead
            engine.kv.alloc_ns = 0
            while growing and growing[-1][0] == step:
                engine.kv.append_block(growing.pop()[1], begin_ns)
                self._num_unfilled += size
            until = min(growing[-1][0], stop) if growing else stop
            if owes or step in self._extra_ns:
                until = step + 1
            owes = False
            until = min(until, bisect_left(ends, flight.next_sample_ns, step) + 1)
            self._num_unfilled -= self.batch * (until - step)
            flight.decoded(
                engine,
                self.batch,
                begin_ns,
                ends[step:until],
                self._forward_s[step:until],
                self._extra_ns.get(step, self._extra_ns[-1]),
                self._held_up_by,
                self._begins[until - 1],
                self._num_unfilled,
            )
            step = until
        clock.advance_to(ends[stop - 1])  # type: ignore[attr-defined]  # as above
        for sequence in self._sequences:
            sequence.num_computed += stop - first
            sequence.num_output += stop - first
        self._done = stop
        return stop - first


def foresee(engine: Engine, *, evictions_show: bool) -> DecodeRun | None:
    """The run that begins now; None where the next step, or the one after it, may be another.

    evictions_show   somebody outside must see evictions in their order among those of other engines: none is part of a run
    """
    scheduler, pool = engine.scheduler, engine.kv.pool
    running, size = scheduler.running, engine.kv.block_size
    held_up_by = None
    if len(scheduler.waiting):
        held_up_by = engine.stands_still
        if held_up_by is None:
            return None
    most, max_context = HORIZON, engine.max_context
    for sequence in running:
        computed, known = sequence.num_computed, sequence.num_prompt + sequence.num_output
        if known - computed != 1 or computed < sequence.num_prompt or sequence.is_forked or sequence.token_ids:
            return None
        left = min(sequence.params.max_tokens - sequence.num_output, max_context - known) - 1
        if left < most:
            if left < SHORTEST:
                return None
            most = left
    if not running or scheduler.num_kept:
        return None
    lookup_ns = _lookup_ns(engine) if held_up_by == "blocks" else 0
    if lookup_ns is None:
        return None
    growing = _growing(running, size, most)
    free, cached = pool.num_free, pool.num_cached
    evicting: list[int] = []
    extra_ns = {-1: lookup_ns}
    for step, _ in reversed(growing):
        if free:
            free -= 1
            continue
        if not cached or evictions_show:
            most = step
            break
        evicting.append(step)
        extra_ns[step] = extra_ns.get(step, lookup_ns) + engine.costs.foresee_evict(cached)
        cached -= 1
    if most < SHORTEST:
        return None
    times = engine.executor.foresee(running, most)
    if times is None:
        return None
    steps_ns, forward_s = times
    if lookup_ns or evicting:
        steps_ns = [taken + extra_ns.get(step, lookup_ns) for step, taken in enumerate(steps_ns)]
    now_ns = engine.clock.monotonic_ns()
    begins = list(accumulate(steps_ns, initial=now_ns))
    ends = begins[1:]
    begins.pop()
    most = bisect_left(begins, engine.nothing_until_ns(now_ns))
    if most < SHORTEST:
        return None
    del begins[most:], ends[most:]
    evicting = [step for step in evicting if step < most]
    return DecodeRun(
        engine, list(running), begins, ends, forward_s, growing, evicting, extra_ns, held_up_by, goes_on=most == HORIZON
    )


def _growing(running: list[Sequence], size: int, most: int) -> list[tuple[int, Sequence]]:
    """(step, sequence that needs one more block in it), the last first; of one step the most junior first."""
    found = []
    for order, sequence in enumerate(running):
        step = len(sequence.blocks) * size - sequence.num_computed
        while step < most:
            found.append((step, order, sequence))
            step += size
    found.sort(reverse=True)
    return [(step, sequence) for step, _, sequence in found]


def _lookup_ns(engine: Engine) -> int | None:
    """What each step takes to look again for the blocks of the queue's head; None where that is not known ahead."""
    head = engine.scheduler.waiting.next(engine.clock.monotonic_ns())
    assert head is not None, "a queue that is held up has a head"
    if not engine.kv.prefix_caching or head.state is State.SWAPPED:
        return 0
    return engine.costs.foresee_lookup(min(len(head.names), (head.num_known - 1) // engine.kv.block_size))
