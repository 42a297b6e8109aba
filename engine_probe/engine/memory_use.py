"""What KV memory is used for: tokens, the unfilled ends of last blocks, shared copies saved, and the block tables themselves.

`measure` reads one engine now. `compare` puts the same requests through paged blocks and through the contiguous baseline in
the same memory, both admitting as many as they can, and tells which share of the memory in use held tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine_probe.engine.block_pool import BlockPool
from engine_probe.engine.contiguous import ContiguousPool
from engine_probe.engine.engine import Engine
from engine_probe.errors import UsageError

TABLE_ENTRY_BYTES = 4
"""An entry of a block table as kernels read it."""
BLOCK_RECORD_BYTES = 8 * 6 + 8 + 1
"""What the pool keeps of a block: six counters, its hash, a flag."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """One engine at one moment.

    token_slots     slots of referenced blocks that hold a token; shared ones count once
    wasted_slots    slots of referenced blocks that do not: the unfilled ends of last blocks, and what is reserved ahead
    shared_slots    slots that sharing saved: what the same sequences would hold more, each for itself
    cached_slots    of unreferenced blocks that hold a reusable prefix
    metadata_bytes  block tables and the pool's records
    utilisation_ratio   token_slots / slots of referenced blocks; None where none is
    """

    token_slots: int
    wasted_slots: int
    shared_slots: int
    cached_slots: int
    free_slots: int
    metadata_bytes: int
    utilisation_ratio: float | None


def measure(engine: Engine) -> MemoryUse:
    """Read `engine` now."""
    size, pool = engine.config.block_size, engine.kv.pool
    filled: dict[int, int] = {}
    held = 0
    for sequence in engine.scheduler.running:
        held += len(sequence.blocks)
        for index, block in enumerate(sequence.blocks):
            tokens = min(max(sequence.num_computed - index * size, 0), size)
            filled[block] = max(filled.get(block, 0), tokens)
    tokens = sum(filled.values())
    slots = len(filled) * size
    return MemoryUse(
        token_slots=tokens,
        wasted_slots=slots - tokens,
        shared_slots=(held - len(filled)) * size,
        cached_slots=pool.num_cached * size,
        free_slots=pool.num_free * size,
        metadata_bytes=held * TABLE_ENTRY_BYTES + pool.num_blocks * BLOCK_RECORD_BYTES,
        utilisation_ratio=tokens / slots if slots else None,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Means over time of two allocators under the same requests.

    *_ratio     slots that hold a token / all slots of the memory, while requests wait for room
    *_running   requests that run at once
    """

    paged_ratio: float
    contiguous_ratio: float
    paged_running: float
    contiguous_running: float


def compare(
    lengths: Sequence[tuple[int, int]], num_slots: int, max_context: int, *, block_size: int = 16, steps: int = 2000
) -> Comparison:
    """Serve (prompt, output) tokens of `lengths`, again and again, for so many decode steps, in `num_slots` slots.

    The contiguous baseline reserves `max_context` for each. Prompts appear at once, every running request gains a token a
    step; there is always one more waiting. Raises UsageError where a request does not fit `max_context` or the memory.
    """
    if not lengths or any(p < 1 or o < 1 or p + o > max_context for p, o in lengths) or max_context > num_slots:
        raise UsageError(
            "each request has 1 or more prompt and output tokens and fits max_context, and that the memory"
        )
    paged = _Paged(num_slots // block_size, block_size)
    naive = _Naive(num_slots, max_context)
    results = []
    for allocator in (paged, naive):
        requests = _endless(lengths)
        written, running = 0, 0
        for step in range(2 * steps):
            allocator.admit(requests)
            if step >= steps:  # the first half fills the memory
                written += allocator.num_written
                running += len(allocator.running)
            allocator.decode()
        results.append((written / steps / num_slots, running / steps))
    return Comparison(results[0][0], results[1][0], results[0][1], results[1][1])


def _endless(lengths: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    order = random.Random(1)
    while True:
        yield order.choice(lengths)


@dataclass(slots=True)
class _Running:
    name: str
    tokens: int
    left: int
    blocks: list[int]


class _Paged:
    """Blocks on demand; the youngest gives way where none is left."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool, self.size = BlockPool(num_blocks), block_size
        self.running: list[_Running] = []
        self._waiting: tuple[int, int] | None = None

    @property
    def num_written(self) -> int:
        return sum(request.tokens for request in self.running)

    def admit(self, requests: Iterator[tuple[int, int]]) -> None:
        while True:
            prompt, output = self._waiting or next(requests)
            self._waiting = None
            blocks = self.pool.allocate(-(-prompt // self.size), 0)
            if blocks is None:
                self._waiting = (prompt, output)
                return
            self.running.append(_Running("", prompt, output, blocks))

    def decode(self) -> None:
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            if request.tokens == len(request.blocks) * self.size:
                while (more := self.pool.allocate(1, 0)) is None and self.running[-1] is not request:
                    self.pool.release(self.running.pop().blocks, 0)
                if more is None:
                    self.pool.release(self.running.pop().blocks, 0)
                    break
                request.blocks += more
            request.tokens += 1
            request.left -= 1
        for request in [request for request in self.running if request.left == 0]:
            self.pool.release(request.blocks, 0)
            self.running.remove(request)


class _Naive:
    """The longest possible run for each."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.pool, self._max_context = ContiguousPool(num_slots), max_context
        self.running: list[_Running] = []
        self._number = 0

    @property
    def num_written(self) -> int:
        return sum(request.tokens for request in self.running)

    def admit(self, requests: Iterator[tuple[int, int]]) -> None:
        while self.pool.reserve(name := str(self._number), self._max_context) is not None:
            prompt, output = next(requests)
            self._number += 1
            self.running.append(_Running(name, prompt, output, []))

    def decode(self) -> None:
        for request in self.running:
            request.tokens += 1
            request.left -= 1
        for request in [request for request in self.running if request.left == 0]:
            self.pool.release(request.name)
            self.running.remove(request)
