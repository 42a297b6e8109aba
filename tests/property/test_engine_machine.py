"""The whole engine, driven as people drive it: whatever comes, blocks add up and every request ends once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_probe.errors import PromptRefused
from tests.engine_bench import EngineBench


class EngineMachine(RuleBasedStateMachine):
    """Requests that share prefixes come, go on, are aborted; caches are reset; time passes."""

    @initialize(
        num_blocks=st.integers(3, 24),
        policy=st.sampled_from(["fcfs", "shortest", "priority"]),
        preemption=st.sampled_from(["recompute", "swap"]),
        eviction=st.sampled_from(["lru", "lfu", "fifo", "length"]),
        chunked=st.booleans(),
        caching=st.booleans(),
        budget=st.integers(4, 20),
        seats=st.integers(1, 4),
        ttl_s=st.none() | st.just(0.05),
        timeout_s=st.none() | st.just(0.2),
        swap_blocks=st.integers(0, 12),
        min_reuse_tokens=st.sampled_from([0, 8]),
    )
    def begin(
        self,
        num_blocks: int,
        policy: str,
        preemption: str,
        chunked: bool,
        caching: bool,
        budget: int,
        seats: int,
        **kv: Any,
    ) -> None:
        scheduler = {
            "policy": policy,
            "preemption": preemption,
            "chunked_prefill": chunked,
            "max_num_batched_tokens": budget,
            "max_num_seqs": seats,
            "max_wait_s": 0.1,
        }
        self.bench = EngineBench(num_blocks, scheduler=scheduler, prefix_caching=caching, **kv)
        self.wanted: dict[str, int] = {}
        self.ended: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.refused: set[str] = set()

    @rule(
        group=st.integers(0, 2),
        shared=st.integers(0, 12),
        own=st.integers(0, 12),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
    )
    def submit(self, group: int, shared: int, own: int, max_tokens: int, priority: int) -> None:
        name = f"r{len(self.wanted) + len(self.refused)}"
        ids = [group] * shared + [100 + len(self.wanted)] * own
        room = self.bench.engine.max_context
        if not 0 < len(ids) < room:
            with pytest.raises(PromptRefused):
                self.bench.request(name, ids or 0, max_tokens)
            self.refused.add(name)
            return
        self.bench.request(name, ids, max_tokens, priority=priority)
        self.wanted[name] = min(max_tokens, room - len(ids))

    @rule(group=st.integers(0, 2), prompt=st.integers(1, 12), number=st.integers(2, 4), max_tokens=st.integers(1, 8))
    def submit_siblings(self, group: int, prompt: int, number: int, max_tokens: int) -> None:
        first = len(self.wanted) + len(self.refused)
        names = [f"r{first + index}" for index in range(number)]
        room, seats = self.bench.engine.max_context, self.bench.engine.config.scheduler.max_num_seqs
        if prompt >= room or (prompt > 1 and number > seats):
            with pytest.raises(PromptRefused):
                self.bench.siblings(names, [group] * prompt, max_tokens)
            self.refused.add(names[0])
            return
        self.bench.siblings(names, [group] * prompt, max_tokens)
        self.wanted.update(dict.fromkeys(names, min(max_tokens, room - prompt)))

    @rule()
    def step(self) -> None:
        for output in self.bench.engine.step() or []:
            name = output.sequence.request_id
            self.tokens[name] += len(output.tokens)
            if output.finish_reason is not None:
                self.ended[name] += 1
                whole = self.tokens[name] == self.wanted[name]
                assert whole or output.finish_reason == "timeout", f"{name} ended with the wrong number of tokens"

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        if self.bench.engine.abort(name):
            self.ended[name] += 1

    @rule()
    def reset(self) -> None:
        self.bench.engine.reset_prefix_cache()

    @rule(ms=st.integers(1, 60))
    def wait(self, ms: int) -> None:
        self.bench.clock.advance(ms / 1000)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "bench"):
            self.bench.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        engine = self.bench.engine
        for _ in range(2000):
            if not engine.has_work:
                break
            self.step()
        assert not engine.has_work, "a request never ended"
        engine.check_integrity()
        assert engine.kv.pool.num_referenced == 0, "an ended request leaked blocks"
        assert engine.host.num_free == engine.host.num_blocks
        rows = Counter(row["request_id"] for row in self.bench.rows("request"))
        assert rows == Counter({*self.wanted, *self.refused}), "a request has no row, or two"
        assert not self.bench.recorder.lost
        for row in self.bench.rows("request"):
            if row["state"] == "finished":
                assert row["output_tokens"] == sum(row["token_counts"]) == self.wanted[row["request_id"]]
                assert row["computed_tokens"] + row.get("cached_tokens", 0) == row["prompt_tokens"]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
