"""The fast replay against the plainest one: a list that is searched and shifted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.capacity.block_cache import block_trace, needed_sizes
from diagnosis.capacity.curve import hit_rate_curve

# Prefix trees, as prompts are: a request is the path from the root to a node. And any lists at all.


def _path(node: int) -> list[int]:
    path: list[int] = []
    while node:
        path.append(node)
        node //= 2
    return path[::-1]


PATHS = st.lists(st.integers(1, 63).map(_path), max_size=40)
ANY = st.lists(st.lists(st.integers(0, 12), max_size=8, unique=True), max_size=30)
REQUESTS = st.one_of(PATHS, ANY)


def _replay(requests: list[list[int]], policy: str, size: int) -> int:
    """Definition taken literally. Each entry: [block, uses, instant of last use, instant of storing]."""
    cache: list[list[int]] = []
    hits = clock = 0
    for blocks in requests:
        resident = {entry[0] for entry in cache}
        for block in blocks:
            if block not in resident:
                break
            hits += 1
        for block in reversed(blocks):
            clock += 1
            entry = next((e for e in cache if e[0] == block), None)
            if entry is not None:
                entry[1] += 1
                entry[2] = clock
                continue
            if len(cache) == size:
                key = {"lru": lambda e: e[2], "fifo": lambda e: e[3], "lfu": lambda e: (e[1], e[2])}[policy]
                cache.remove(min(cache, key=key))
            cache.append([block, 1, clock, clock])
    return hits


@given(REQUESTS, st.sampled_from(["lru", "lfu", "fifo"]))
@settings(max_examples=150, deadline=None)
def test_every_size_of_every_policy_equals_the_literal_replay(requests: list[list[int]], policy: str) -> None:
    """Hits at every size from 1 to more than there are blocks are those of the definition."""
    sizes = list(range(1, 16))
    assert [p.hit_blocks for p in hit_rate_curve(requests, policy, sizes)] == [
        _replay(requests, policy, n) for n in sizes
    ]


@given(REQUESTS)
@settings(max_examples=100, deadline=None)
def test_lru_never_hits_less_with_more_blocks(requests: list[list[int]]) -> None:
    """The curve rises, and ends at the ceiling that all policies share."""
    sizes = [*range(1, 40), None]
    hits = [p.hit_blocks for p in hit_rate_curve(requests, "lru", sizes)]
    assert hits == sorted(hits)
    assert {hit_rate_curve(requests, policy, [None])[0].hit_blocks for policy in ("lfu", "fifo")} == {hits[-1]}


@given(REQUESTS)
@settings(max_examples=100, deadline=None)
def test_a_deeper_block_never_needs_a_smaller_cache(requests: list[list[int]]) -> None:
    """Inside a request the needed size does not fall from block to block."""
    trace = block_trace(requests)
    needed = needed_sizes(trace).tolist()
    for start, end in zip(trace.offsets[:-1], trace.offsets[1:], strict=True):
        assert needed[start:end] == sorted(needed[start:end])
