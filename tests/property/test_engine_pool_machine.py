"""The block pool against a model that a child could follow: who holds what, and what may be found."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_probe.engine.block_pool import BlockPool, Evicted


class PoolMachine(RuleBasedStateMachine):
    """Holders take, seal, share and release; the pool never loses, doubles or hands out a block that is in use."""

    @initialize(
        num_blocks=st.integers(1, 12),
        order=st.sampled_from(["lru", "lfu", "fifo", "length"]),
        ttl_ns=st.none() | st.integers(1, 5),
    )
    def begin(self, num_blocks: int, order: str, ttl_ns: int | None) -> None:
        self.now = 0
        self.told: list[str] = []
        self.gone: list[int] = []
        self.pool = BlockPool(num_blocks, order=order, ttl_ns=ttl_ns, listener=self)
        self.holders: list[list[int]] = []
        self.released: dict[int, int] = {}
        self.names = 0
        self.resident: set[int] = set()

    def evicted(self, blocks: Evicted, cause: str | None) -> None:
        names = set(blocks.numbers.tolist())
        assert len(blocks.numbers) == len(blocks.idle_s) == len(blocks.age_s) == len(blocks.reuse_count)
        assert all(age >= idle >= 0 for age, idle in zip(blocks.age_s, blocks.idle_s, strict=True))
        assert names <= self.resident, "a block was evicted that was not there"
        self.resident -= names
        self.told.append(blocks.reason)

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        available, held = self.pool.num_available, {b for blocks in self.holders for b in blocks}
        blocks = self.pool.allocate(count, self.now, "r")
        assert (blocks is None) == (count > available)
        if blocks is not None:
            assert len(set(blocks)) == count
            assert not held & set(blocks), "a block in use was given away"
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def seal(self, data: Any) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        fresh = [b for b in blocks if not self.pool.is_shared(b)]
        names = list(range(self.names, self.names + len(fresh)))
        self.names += len(fresh)
        assert self.pool.seal(fresh, names, 0, self.now).tolist() == list(range(len(names)))
        self.resident |= set(names)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def find_and_take(self, data: Any) -> None:
        names = data.draw(st.lists(st.integers(0, self.names - 1), unique=True, max_size=5))
        found = self.pool.match(names).tolist()
        assert len(found) == next((i for i, name in enumerate(names) if name not in self.resident), len(names))
        cached = self.pool.num_cached_of(found)
        before = self.pool.num_available
        idle_s = self.pool.take(found, self.now)
        assert len(idle_s) == len(found)
        in_use = {block for blocks in self.holders for block in blocks}
        for block, idle in zip(found, idle_s.tolist(), strict=True):
            assert idle == (0 if block in in_use else (self.now - self.released[block]) / 1e9)
        self.holders.append(found)
        assert self.pool.num_available == before - cached

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks, self.now)
        self.released |= dict.fromkeys(blocks, self.now)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: Any) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.share(blocks)
        self.holders.append(list(blocks))

    @rule(passed=st.integers(0, 4))
    def expire(self, passed: int) -> None:
        self.now += passed
        self.pool.expire(self.now)

    @rule()
    def clear(self) -> None:
        assert self.pool.clear() == len(self.resident)
        self.resident.clear()

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = {b for blocks in self.holders for b in blocks}
        assert self.pool.num_referenced == len(held)
        for block in held:
            assert self.pool.num_references(block) == sum(blocks.count(block) for blocks in self.holders)
        for name in self.resident:
            assert len(self.pool.match([name])) == 1


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
