"""Routing, over everything a router may believe: policies, the prefix index, and the replay against plain oracles."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.capacity.block_cache import block_trace
from diagnosis.capacity.curve import hit_rate_curve
from diagnosis.capacity.routing_replay import replay_routing
from engine_probe.engine.fleet.policies import POLICIES, Candidates, Sticky, make_policy
from engine_probe.engine.fleet.prefix_index import EventFeed, PrefixIndex
from engine_probe.errors import UsageError

loads = st.floats(0, 1e9) | st.integers(0, 3).map(float)


@st.composite
def candidates(draw: Any, *, equal_matches: bool = False) -> Candidates:
    number = draw(st.integers(1, 8))
    prompt = draw(st.integers(0, 100))
    matches = st.integers(0, prompt)
    matched = [draw(matches)] * number if equal_matches else draw(st.lists(matches, min_size=number, max_size=number))
    return Candidates(
        matched,
        draw(st.lists(loads, min_size=number, max_size=number)),
        draw(st.lists(st.integers(0, 5), min_size=number, max_size=number)),
        prompt,
        draw(st.none() | st.integers(0, 3)),
    )


calls = st.lists(candidates(), min_size=1, max_size=20)
names = st.sampled_from(POLICIES)
ties = st.sampled_from(["lowest", "random"])


@given(names, ties, st.integers(0, 5), calls)
def test_the_choice_is_a_candidate_and_has_the_highest_score(
    name: str, tie: str, seed: int, asked: list[Candidates]
) -> None:
    """Whoever comes and goes between two calls, and whatever was chosen before; who was looked at has a score."""
    policy = make_policy(name, seed=seed, ties=tie)
    for among in asked:
        choice = policy.choose(among)
        assert 0 <= choice.index < len(among.load)
        assert len(choice.scores) == len(among.load)
        seen = [score for score in choice.scores if score is not None]
        assert choice.scores[choice.index] == max(seen)


@given(names, ties, st.integers(0, 5), calls)
def test_the_same_seed_and_calls_choose_the_same(name: str, tie: str, seed: int, asked: list[Candidates]) -> None:
    """A run can be repeated."""
    one, other = (make_policy(name, seed=seed, ties=tie) for _ in range(2))
    assert [one.choose(among) for among in asked] == [other.choose(among) for among in asked]


@given(ties, st.floats(0.01, 100), candidates(equal_matches=True))
def test_at_equal_matches_affinity_with_load_never_takes_a_more_loaded_one(
    tie: str, weight: float, among: Candidates
) -> None:
    """Strictly: the chosen load is the least."""
    choice = make_policy("affinity_with_load", ties=tie, load_weight=weight).choose(among)
    assert among.load[choice.index] == min(among.load)


@given(ties, candidates())
def test_least_loaded_takes_the_least_load_and_of_those_the_shortest_queue(tie: str, among: Candidates) -> None:
    """Lexicographic: load, then queue."""
    index = make_policy("least_loaded", ties=tie).choose(among).index
    assert (among.load[index], among.queue[index]) == min(zip(among.load, among.queue, strict=True))


@given(st.integers(0, 5), candidates())
def test_power_of_two_never_takes_the_most_loaded_alone_at_the_top(seed: int, among: Candidates) -> None:
    """Of two drawn the less loaded: a single largest load is taken only where there is one candidate."""
    index = make_policy("power_of_two", seed=seed).choose(among).index
    if len(among.load) > 1 and among.load.count(max(among.load)) == 1:
        assert among.load[index] < max(among.load)


@given(candidates())
def test_prefix_affinity_takes_the_longest_match(among: Candidates) -> None:
    """Load does not matter to it, unless the threshold is out of reach: then it is all that matters."""
    index = make_policy("prefix_affinity").choose(among).index
    assert among.matched[index] == max(among.matched)
    unreachable = make_policy("prefix_affinity", min_match_ratio=1.5).choose(among).index
    assert among.load[unreachable] == min(among.load)


@given(calls)
def test_a_key_stays_where_it_is_while_that_worker_is_there(asked: list[Candidates]) -> None:
    """The same key goes to the same worker as the time before, whatever the loads are by then."""
    policy, home = make_policy("sticky"), dict[Any, int]()
    for among in asked:
        index = policy.choose(among).index
        if among.key in home and home[among.key] < len(among.load):
            assert index == home[among.key]
        if among.key is not None:
            home[among.key] = index


# A tree of blocks: the parent of block b is b // 2; 1 is the root's child, so chains are like [1, 2, 5, 10].
blocks = st.integers(1, 31)
events = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.integers(0, 2), blocks),
        st.tuples(st.just("removed"), st.integers(0, 2), blocks),
        st.tuples(st.just("cleared"), st.integers(0, 2), blocks),
    ),
    max_size=60,
)


def chain(block: int) -> list[int]:
    """The prefix that ends at `block`."""
    return [] if block == 0 else [*chain(block // 2), block]


def tell(index: Any, worker: int, change: str, block: int) -> None:
    if change == "stored":
        path = chain(block)
        index.stored(worker, path, [None, *path[:-1]])
    elif change == "removed":
        index.removed(worker, [block])
    else:
        index.cleared(worker)


@given(events, blocks)
def test_the_index_matches_what_the_workers_hold(told: list[tuple[str, int, int]], asked: int) -> None:
    """Events at once and complete: against a set of blocks for each worker."""
    index, holds = PrefixIndex(3), [set[int]() for _ in range(3)]
    for change, worker, block in told:
        tell(index, worker, change, block)
        if change == "stored":
            holds[worker] |= set(chain(block))
        elif change == "removed":
            holds[worker].discard(block)
        else:
            holds[worker].clear()
    assert [index.num_blocks(worker) for worker in range(3)] == [len(held) for held in holds]
    expected = []
    for held in holds:
        path = chain(asked)
        expected.append(next((depth for depth, block in enumerate(path) if block not in held), len(path)))
    assert index.match(chain(asked)) == expected
    assert index.num_orphans == 0


@given(events, st.integers(0, 20), st.integers(0, 90))
def test_a_late_index_is_the_index_of_a_while_ago(told: list[tuple[str, int, int]], delay_s: int, now_s: int) -> None:
    """One event a second: at `now` what is told until now - delay has arrived, and nothing else."""
    late, exact = PrefixIndex(3), PrefixIndex(3)
    feed = EventFeed(late, delay_s=delay_s)
    for second, (change, worker, block) in enumerate(told):
        at_ns = second * 10**9
        if change == "stored":
            path = chain(block)
            feed.stored(at_ns, worker, path, [None, *path[:-1]])
        elif change == "removed":
            feed.removed(at_ns, worker, [block])
        else:
            feed.cleared(at_ns, worker)
        if second + delay_s <= now_s:
            tell(exact, worker, change, block)
    feed.advance(now_s * 10**9)
    for block in range(1, 32):
        assert late.match(chain(block)) == exact.match(chain(block))
    assert feed.num_pending == max(0, len(told) - max(0, now_s - delay_s + 1))


@given(events, st.integers(0, 9), st.floats(0, 1))
def test_a_lossy_feed_loses_or_delivers_each_event(told: list[tuple[str, int, int]], seed: int, loss: float) -> None:
    """What is not lost arrives; the index stays whole, and what hangs on a lost parent is counted and left out."""
    index = PrefixIndex(3)
    feed = EventFeed(index, loss_ratio=loss, seed=seed)
    for second, (_, worker, block) in enumerate(told):
        feed.stored(second, worker, [block], [block // 2 or None])
    arrived = feed.num_pending
    feed.advance(10**9)
    assert arrived + feed.num_lost == len(told)
    assert feed.num_pending == 0
    for worker in range(3):
        for block in range(2, 32):
            matched = index.match(chain(block))[worker]
            assert matched <= len(chain(block))
    held = sum(index.num_blocks(worker) for worker in range(3))
    assert held + index.num_orphans <= arrived


traces = st.lists(st.lists(st.integers(0, 12), min_size=0, max_size=6, unique=True), max_size=25)


@given(traces, names, st.integers(1, 4), st.integers(1, 8) | st.none())
def test_a_replay_is_each_workers_own_lru(requests: list[list[int]], name: str, workers: int, size: int | None) -> None:
    """The requests that a worker got, replayed alone, hit the same: the router's belief never strays from the caches."""
    given_to: list[list[list[int]]] = [[] for _ in range(workers)]
    policy = make_policy(name)
    caches = [OrderedDict[int, None]() for _ in range(workers)]
    load = [0] * workers
    for request in requests:
        matched = [
            next((depth for depth, block in enumerate(request) if block not in cache), len(request)) for cache in caches
        ]
        key = request[:2][-1] if request else None
        chosen = policy.choose(Candidates(matched, load, [0] * workers, len(request), key)).index
        load[chosen] += len(request) - matched[chosen]
        given_to[chosen].append(request)
        for block in reversed(request):
            caches[chosen][block] = None
            caches[chosen].move_to_end(block)
            if size is not None and len(caches[chosen]) > size:
                caches[chosen].popitem(last=False)
    replay = replay_routing(block_trace(requests), name, workers, size)
    for number, own in enumerate(given_to):
        worker = replay.workers[number]
        [alone] = hit_rate_curve(own, "lru", [size])
        assert (worker.requests, worker.hit_blocks) == (len(own), alone.hit_blocks)
        assert worker.load_blocks == load[number]
        assert worker.resident_blocks == len(caches[number])
    assert sum(worker.requested_blocks for worker in replay.workers) == sum(map(len, requests))


def test_round_robin_takes_turns() -> None:
    """0, 1, 2, 0; with two left it goes on in its turn."""
    policy = make_policy("round_robin")
    three, two = (Candidates([0] * n, [0] * n, [0] * n, 1) for n in (3, 2))
    assert [policy.choose(among).index for among in (three, three, three, three, two, two)] == [0, 1, 2, 0, 1, 0]


def test_lowest_ties_send_everything_to_one() -> None:
    """Equal loads: `lowest` always takes the first, `random` all of them in time."""
    equal = Candidates([0] * 4, [7] * 4, [1] * 4, 10)
    first, any_of = make_policy("least_loaded", ties="lowest"), make_policy("least_loaded")
    assert {first.choose(equal).index for _ in range(100)} == {0}
    assert {any_of.choose(equal).index for _ in range(100)} == {0, 1, 2, 3}


def test_prefix_affinity_breaks_ties_by_load_or_by_place() -> None:
    """Two hold 3 of 4 blocks: the less loaded, or with `lowest` the first of them."""
    among = Candidates([1, 3, 3], [0, 9, 2], [0, 0, 0], 4)
    assert make_policy("prefix_affinity").choose(among).index == 2
    assert make_policy("prefix_affinity", ties="lowest").choose(among).index == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"ties": "first"}, "lowest or random, not 'first'"),
        ({"min_match_ratio": -0.1}, "min_match_ratio is -0.1"),
        ({"load_weight": float("inf")}, "load_weight is inf"),
        ({"name": "fastest"}, "no routing policy 'fastest' here; known: round_robin, random"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(more: dict[str, Any], words: str) -> None:
    """The argument is named with its value."""
    with pytest.raises(UsageError, match=words):
        make_policy(**({"name": "prefix_affinity"} | more))


def test_an_index_or_a_feed_that_makes_no_sense_is_refused() -> None:
    """No worker, a delay below 0, a loss that is no share."""
    with pytest.raises(UsageError, match="0 workers knows nobody"):
        PrefixIndex(0)
    for more, words in (({"delay_s": -1.0}, "delay_s is -1.0"), ({"loss_ratio": 1.5}, "loss_ratio is 1.5")):
        with pytest.raises(UsageError, match=words):
            EventFeed(PrefixIndex(1), **more)


def test_sticky_forgets_the_key_unused_for_longest() -> None:
    """Room for two keys: a, b, a, c; then b is new again and may go elsewhere, a is still at home."""
    sticky = Sticky(ties="lowest", max_keys=2)

    def ask(key: str, *load: int) -> int:
        return sticky.choose(Candidates([0, 0], load, [0, 0], 1, key)).index

    assert [ask("a", 0, 1), ask("b", 0, 1), ask("a", 5, 0), ask("c", 5, 0)] == [0, 0, 0, 1]
    assert (ask("a", 5, 0), ask("b", 5, 0)) == (0, 1)


def test_an_index_that_lost_a_parent_leaves_its_children_out_until_it_is_told_again() -> None:
    """Block 2 hangs on 1: without 1 it is an orphan; told with its parent it is placed. A removed parent hides its child."""
    index = PrefixIndex(1)
    index.stored(0, [2], [1])
    assert (index.num_orphans, index.match([1, 2])) == (1, [0])
    index.stored(0, [1, 2], [None, 1])
    assert index.match([1, 2]) == [2]
    index.removed(0, [1, 9])
    assert (index.match([1, 2]), index.num_blocks(0), index.num_unknown) == ([0], 1, 1)
    index.stored(0, [1], [None])
    assert index.match([1, 2]) == [2]
    index.reset()
    assert (index.match([1, 2]), index.num_blocks(0)) == ([0], 0)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_feed_loses_is_chosen_by_its_seed(seed: int) -> None:
    """The same seed loses the same events; 0 loses none, 1 all."""

    def held(loss: float) -> tuple[int, int]:
        index = PrefixIndex(1)
        feed = EventFeed(index, loss_ratio=loss, seed=seed)
        for block in range(200):
            feed.stored(0, 0, [block], [None])
        feed.advance(0)
        return index.num_blocks(0), feed.num_lost

    assert held(0.0) == (200, 0)
    assert held(1.0) == (0, 200)
    assert held(0.5) == held(0.5)
    assert 60 < held(0.5)[0] < 140
