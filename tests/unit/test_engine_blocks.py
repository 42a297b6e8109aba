"""KV memory of the embedded engine: what is found again, what is evicted first, what is wasted."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from engine_probe.engine.block_pool import BlockPool, Evicted
from engine_probe.engine.contiguous import ContiguousPool
from engine_probe.engine.kv_identity import KvIdentity, extend
from engine_probe.engine.memory_use import compare, measure
from engine_probe.engine.virtual_costs import CostSettings, VirtualCosts
from engine_probe.errors import UsageError
from tests.engine_bench import EngineBench

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "mooncake_conversation.jsonl.gz"


class Told:
    """Keeps what was evicted."""

    def __init__(self) -> None:
        self.hashes: list[int] = []
        self.events: list[tuple[Evicted, str | None]] = []

    def evicted(self, blocks: Evicted, cause: str | None) -> None:
        self.hashes += blocks.numbers.tolist()
        self.events.append((blocks, cause))


def hold(pool: BlockPool, hashes: list[int], now_ns: int = 0) -> list[int]:
    """Blocks for a prompt with these hashes: found ones taken, the others computed."""
    found = pool.match(hashes).tolist()
    pool.take(found, now_ns)
    fresh = pool.allocate(len(hashes) - len(found), now_ns, "r")
    assert fresh is not None
    pool.seal(fresh, hashes[len(found) :], len(found), now_ns)
    return [*found, *fresh]


def test_second_prompt_of_the_owners_example_reuses_four_tokens() -> None:
    """[101 202 303 404][505 601 602 603], then [101 202 303 404][505 601 999 888]: one block of four tokens is found."""
    bench = EngineBench(block_size=4)
    bench.request("first", [101, 202, 303, 404, 505, 601, 602, 603])
    bench.run()
    bench.request("second", [101, 202, 303, 404, 505, 601, 999, 888])
    bench.run()
    rows = bench.requests()
    assert rows["first"]["cached_tokens"] == 0
    assert rows["second"]["cached_tokens"] == rows["second"]["cached_tokens_device"] == 4
    assert rows["second"]["computed_tokens"] == 4
    assert rows["first"]["prompt_blocks"][0] == rows["second"]["prompt_blocks"][0]
    assert rows["first"]["prompt_blocks"][1] != rows["second"]["prompt_blocks"][1]


def test_a_hit_tells_how_long_the_block_lay_unused() -> None:
    """Released at 2 s and found at 5 s: 3 s; found again while the other still reads it: 0; a block that nobody has: no hit."""
    pool = BlockPool(8)
    pool.release(hold(pool, [0, 1], 10**9), 2 * 10**9)
    assert pool.take(pool.match([0, 1, 7]), 5 * 10**9).tolist() == [3.0, 3.0]
    assert pool.take(pool.match([0]), 6 * 10**9).tolist() == [0.0]
    assert pool.take([], 7 * 10**9).tolist() == []


def test_rows_of_hits_tell_the_reuse_gap() -> None:
    """A step is 10 ms: the first ends at 10 ms, the second comes a second later and finds its block unused since then."""
    bench = EngineBench(block_size=4)
    bench.request("first", [101, 202, 303, 404, 505, 601, 602, 603], max_tokens=1)
    bench.run()
    bench.clock.advance(1.0)
    bench.request("second", [101, 202, 303, 404, 999], max_tokens=1)
    bench.run()
    (hit,) = [row for row in bench.rows("block") if row["change"] == "hit"]
    assert (hit["request_id"], hit["idle_s"]) == ("second", pytest.approx(1.0))


def test_steps_tell_what_making_room_took() -> None:
    """An evicted block takes 5 ms here: the step that evicts three tells 15 ms, of which its scheduling is made; others none."""
    bench = EngineBench(num_blocks=4, costs_of=lambda clock: VirtualCosts(clock, CostSettings(0, 0, evict_s=0.005)))
    bench.request("first", 12, max_tokens=1)
    bench.run()
    bench.request("second", 15, max_tokens=1)
    bench.run()
    rows = bench.rows("step")
    assert [row["blocks_evicted"] for row in rows] == [0, 3]
    assert [row["alloc_s"] for row in rows] == [0.0, pytest.approx(0.015)]
    assert [row["schedule_s"] for row in rows] == [0.0, pytest.approx(0.015)]


def test_whole_prompt_in_the_cache_still_computes_its_last_block() -> None:
    """The next token needs the last one's output: of eight cached tokens four are used."""
    bench = EngineBench(block_size=4)
    for name in ("first", "second"):
        bench.request(name, [1, 2, 3, 4, 5, 6, 7, 8])
        bench.run()
    assert bench.requests()["second"]["cached_tokens"] == 4


@pytest.mark.parametrize(
    "other",
    [
        KvIdentity("b", "float16", "float16", "rope", "t1"),
        KvIdentity("a", "bfloat16", "float16", "rope", "t1"),
        KvIdentity("a", "float16", "fp8", "rope", "t1"),
        KvIdentity("a", "float16", "float16", "alibi", "t1"),
        KvIdentity("a", "float16", "float16", "rope", "t2"),
        KvIdentity("af", "loat16", "float16", "rope", "t1"),
    ],
)
def test_kv_of_another_making_has_another_name(other: KvIdentity) -> None:
    """The same tokens under another model, type, position scheme or template share no block."""
    tokens = list(range(8))
    names: list[list[int]] = []
    for identity in (KvIdentity("a", "float16", "float16", "rope", "t1"), other):
        hashes: list[int] = []
        extend(hashes, tokens, 4, identity.root(b"salt"), b"salt")
        names.append(hashes)
    assert not set(names[0]) & set(names[1])


def test_lora_and_tenant_salt_share_nothing() -> None:
    """Adapters and salted tenants have roots of their own."""
    identity = KvIdentity("a")
    roots = {identity.root(b""), identity.root(b"", lora="x"), identity.root(b"", cache_salt="x"), identity.root(b"s")}
    assert len(roots) == 4


def test_tail_is_evicted_before_its_head() -> None:
    """LRU: of a released prompt 1-2-3 the deepest block goes first."""
    told = Told()
    pool = BlockPool(3, listener=told)
    pool.release(hold(pool, [1, 2, 3]), 0)
    pool.allocate(2, 5 * 10**9, "new")
    assert told.hashes == [3, 2]
    assert pool.match([1, 2, 3]).tolist() == [0]
    event, cause = told.events[0]
    assert (event.reason, event.idle_s.tolist(), event.age_s.tolist(), event.reuse_count.tolist(), cause) == (
        "capacity",
        [5.0, 5.0],
        [5.0, 5.0],
        [0, 0],
        "new",
    )


@pytest.mark.parametrize(
    ("order", "first_gone"),
    [
        ("lru", 20),  # 10 was used last
        ("fifo", 11),  # stored first; of one prompt the deepest
        ("lfu", 11),  # 10 was hit once, 11 and 20 never; 11 was released before 20
        ("length", 11),  # position 1; the others are heads
    ],
)
def test_orders_choose_different_victims(order: str, first_gone: int) -> None:
    """Prompt 10-11, then prompt 20, then 10 again: each order gives up what it should."""
    told = Told()
    pool = BlockPool(3, order=order, listener=told)
    pool.release(hold(pool, [10, 11], 1), 2)
    pool.release(hold(pool, [20], 3), 4)
    if order == "lru":
        pool.release(hold(pool, [10, 11], 5), 6)
    else:
        pool.release(hold(pool, [10], 5), 6)
    pool.allocate(1, 7, "new")
    assert told.hashes == [first_gone]


def test_unused_blocks_expire_and_used_ones_do_not() -> None:
    """A TTL of 10 ns: at 15 what was last used at 0 is gone, what was used at 6 is there, what is held never goes."""
    told = Told()
    pool = BlockPool(4, ttl_ns=10, listener=told)
    pool.release(hold(pool, [1]), 0)
    pool.release(hold(pool, [2]), 0)
    held = hold(pool, [3])
    pool.release(hold(pool, [2], 6), 6)
    pool.expire(15)
    assert told.hashes == [1]
    assert told.events[0][0].reason == "ttl"
    assert told.events[0][1] is None
    assert len(pool.match([2])) == 1
    pool.expire(100)
    assert told.hashes == [1, 2]
    assert pool.match([3]).tolist() == held


def test_match_below_the_smallest_unit_is_not_used() -> None:
    """Twelve shared tokens below a unit of 16 give no hit; sixteen do."""
    for shared, found in ((12, 0), (16, 16)):
        bench = EngineBench(block_size=4, min_reuse_tokens=16)
        for name in ("first", "second"):
            bench.request(name, [7] * shared + [ord(name[0])] * 8)
            bench.run()
        assert bench.requests()["second"]["cached_tokens"] == found


def test_reset_forgets_prefixes_and_says_so() -> None:
    """After a reset nothing is found, and a mark stands on the time axis."""
    bench = EngineBench(block_size=4)
    bench.request("first", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    bench.run()
    assert bench.engine.reset_prefix_cache() == 2
    bench.request("second", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    bench.run()
    assert bench.requests()["second"]["cached_tokens"] == 0
    assert [row["mark"] for row in bench.rows("mark")] == ["worker_up", "cache_reset"]
    assert "cleared" in [row["change"] for row in bench.rows("block")]


def test_every_eviction_names_the_request_it_was_for() -> None:
    """A pool of four blocks: the second prompt needs what the first one left behind."""
    bench = EngineBench(num_blocks=4, block_size=4)
    bench.request("first", list(range(12)), max_tokens=1)
    bench.run()
    bench.request("second", list(range(100, 112)), max_tokens=1)
    bench.run()
    evicted = [row for row in bench.rows("block") if row["change"] == "evicted"]
    assert {row["request_id"] for row in evicted} == {"second"}
    assert len(evicted) == 2  # 3 blocks and none to spare: 4 - 3 left free, so two of the first's three go


def test_memory_in_use_is_told_to_the_slot() -> None:
    """Two prompts of 10 tokens that share 8, block size 4: 12 distinct slots hold a token, 4 are the ends of last blocks."""
    bench = EngineBench(num_blocks=16, block_size=4)
    bench.request("warm", [1] * 8 + [2, 2], max_tokens=1)
    bench.run()
    for name in ("a", "b"):
        bench.request(name, [1] * 8 + [ord(name)] * 2, max_tokens=9)
    bench.engine.step()
    use = measure(bench.engine)
    assert (use.token_slots, use.wasted_slots, use.shared_slots) == (12, 4, 8)
    assert use.utilisation_ratio == 12 / 16
    assert use.cached_slots == 0
    assert use.free_slots == (16 - 4) * 4
    assert use.metadata_bytes == 6 * 4 + 16 * 57


def test_contiguous_runs_leave_gaps_that_no_request_fits() -> None:
    """30 slots, three runs of 10; the outer two leave: 20 free, and none of 15 can come."""
    pool = ContiguousPool(30)
    for name in "abc":
        assert pool.reserve(name, 10) is not None
    pool.release("a")
    pool.release("c")
    pool.check_integrity()
    assert (pool.num_free, pool.longest_free) == (20, 10)
    assert pool.reserve("d", 15) is None
    pool.release("b")
    pool.check_integrity()
    assert pool.reserve("d", 30) is not None


def test_paging_holds_tokens_where_reservation_holds_air() -> None:
    """Chat-like lengths, contexts of up to 2,048: 20 to 40 % of the memory against more than 90 %, as published."""
    rng = random.Random(2)
    lengths = [
        (min(1024, max(4, round(rng.lognormvariate(4.8, 1.1)))), min(1024, max(4, round(rng.lognormvariate(5.8, 1.0)))))
        for _ in range(300)
    ]
    found = compare(lengths, num_slots=2048 * 20, max_context=2048, steps=600)
    assert 0.20 <= found.contiguous_ratio <= 0.40
    assert found.paged_ratio > 0.90
    assert found.paged_running > 2 * found.contiguous_running


@pytest.mark.parametrize("make", [lambda: BlockPool(0), lambda: BlockPool(4, order="mru"), lambda: ContiguousPool(0)])
def test_pool_of_nonsense_is_refused(make: object) -> None:
    """No block, or an order that is not known, is misuse with a sentence."""
    with pytest.raises(UsageError, match=r"holds nothing|known: lru"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(("order", "hit_rate"), [("lru", 0.1361), ("lfu", 0.0969), ("fifo", 0.1254)])
def test_pool_hits_what_published_replays_of_a_trace_hit(order: str, hit_rate: float) -> None:
    """The Mooncake trace, one request after the other, 5,859 blocks of 512 tokens: the hit rates of the cache alone (0.002)."""
    pool, hits, asked = BlockPool(5859, order=order), 0, 0
    with gzip.open(TRACE, "rt", encoding="utf-8") as lines:
        for now_ns, line in enumerate(lines):
            hashes = [name + 1 for name in json.loads(line)["hash_ids"]]
            found = pool.match(hashes).tolist()
            pool.take(found, now_ns)
            fresh = pool.allocate(len(hashes) - len(found), now_ns)
            assert fresh is not None
            pool.seal(fresh, hashes[len(found) :], len(found), now_ns)
            pool.release([*found, *fresh], now_ns)
            hits, asked = hits + len(found), asked + len(hashes)
    pool.check_integrity()
    assert asked == 288_500
    assert hits / asked == pytest.approx(hit_rate, abs=0.002)
