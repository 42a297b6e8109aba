"""The capacity curve on traces small enough to replay on paper."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from diagnosis.capacity.block_cache import NEVER, block_trace, needed_sizes
from diagnosis.capacity.curve import POLICIES, hit_rate_curve, smallest_size_for, trace_facts
from engine_probe.errors import DiagnosisError

A, B, C, D, X = 11, 22, 33, 44, 55


def _hits(requests: list[list[int]], policy: str, *sizes: int | None) -> list[int]:
    return [point.hit_blocks for point in hit_rate_curve(requests, policy, sizes)]


def test_lru_hits_exactly_when_the_blocks_used_since_fit() -> None:
    """The second [A B] comes after X: A needs a cache of 2 blocks, B behind it one of 3."""
    # Order of touching: B A | X | B A. Before the third request the blocks by last use are X, A, B.
    requests = [[A, B], [X], [A, B]]
    # A is second in that order, B third.
    assert needed_sizes(block_trace(requests)).tolist() == [NEVER, NEVER, NEVER, 2, 3]
    assert _hits(requests, "lru", 1, 2, 3, None) == [0, 1, 2, 2]


def test_a_block_behind_a_missing_one_is_no_hit() -> None:
    """A prefix is contiguous: C is resident, but B before it is new, so only A counts."""
    for policy in POLICIES:
        assert _hits([[A, C], [A, B, C]], policy, 10) == [1]


def test_tails_are_evicted_before_heads() -> None:
    """With 2 blocks, [A B C] leaves its head A B resident: the deepest block is touched first."""
    assert _hits([[A, B, C], [A, B, C]], "lru", 2) == [2]


def test_lfu_keeps_what_was_used_more_often() -> None:
    """A was used twice and X, Y once: in 2 blocks LFU keeps A, LRU and FIFO have pushed it out."""
    requests = [[A], [A], [B], [C], [A]]
    # LFU: A(2), then B(1), then C evicts B: A hits at the second and fifth request. LRU: C evicts A.
    assert _hits(requests, "lfu", 2) == [2]
    assert _hits(requests, "lru", 2) == [1]
    assert _hits(requests, "fifo", 2) == [1]


def test_lfu_forgets_the_count_of_an_evicted_block() -> None:
    """B's second life starts at one use, so a tie with the newer D is broken against B."""
    # Size 2. A A -> A:2. B B -> B:2, both resident. C evicts A (tie at 2, A used longest ago). A comes back with 1 and
    # evicts C (1). D evicts A (1, not 3). A then misses; B hits.
    assert _hits([[A], [A], [B], [B], [C], [A], [D], [B]], "lfu", 2) == [3]
    assert _hits([[A], [A], [B], [B], [C], [A], [D], [A]], "lfu", 2) == [2]


def test_fifo_ignores_use() -> None:
    """In 2 blocks, a hit on A does not keep it: C evicts A, which was stored first."""
    assert _hits([[A], [B], [A], [C], [A]], "fifo", 2) == [1]
    assert _hits([[A], [B], [A], [C], [A]], "lru", 2) == [2]


def test_warm_up_fills_the_cache_and_is_not_counted() -> None:
    """The uncounted first request makes the second one a hit: 1 of 1, not 1 of 2."""
    [point] = hit_rate_curve([[A], [A]], "lru", [10], counted=[False, True])
    assert (point.hit_blocks, point.requested_blocks, point.hit_rate) == (1, 1, 1.0)


def test_without_a_block_the_rate_is_unknown_and_not_zero() -> None:
    """No requests, or none with blocks: hit_rate is None."""
    for requests in ([], [[], []], [None]):
        assert [point.hit_rate for point in hit_rate_curve(requests, "lru", [1, None])] == [None, None]
        assert smallest_size_for(requests, 0.9) is None


def test_a_hash_named_twice_in_a_request_is_one_block() -> None:
    """[A A B] asks for two blocks."""
    [point] = hit_rate_curve([[A, A, B], [A, B]], "lru", [None])
    assert (point.hit_blocks, point.requested_blocks) == (2, 4)


def test_hashes_above_two_to_the_63_are_told_apart() -> None:
    """uint64 hashes keep their low bits, as lists and as an Arrow column with nulls."""
    high, next_to_it = (1 << 64) - 1, (1 << 64) - 2
    requests = [[high], None, [next_to_it], [high]]
    assert _hits(requests, "lru", None) == [1]  # type: ignore[arg-type]
    column = pa.chunked_array(
        [pa.array(requests[:2], pa.list_(pa.uint64())), pa.array(requests[2:], pa.list_(pa.uint64()))]
    )
    assert [point.hit_blocks for point in hit_rate_curve(column, "lru", [None])] == [1]


def test_the_knee_is_the_fewest_blocks_that_reach_the_share() -> None:
    """Ten hits that need 1 block and one that needs 4: 90 % of the eleven hits is ten, so one block does."""
    requests = [[A]] * 11 + [[B], [C], [D], [A]]
    assert smallest_size_for(requests, 0.9) == 1
    assert smallest_size_for(requests, 1.0) == 4


def test_facts_of_a_trace() -> None:
    """Counts, the share used once, the gaps between uses and the mean input, worked by hand."""
    trace = block_trace([[A, B], [A], [A, C]])
    facts = trace_facts(trace, np.array([0.0, 2.0, 12.0]), np.array([20.0, np.nan, 30.0]))
    assert (facts.requests, facts.blocks, facts.unique_blocks) == (3, 5, 3)
    assert facts.used_once_share == pytest.approx(2 / 3)
    assert facts.mean_input_tokens == 25.0
    # A is used at 0, 2 and 12 s: gaps 2 and 10. Nearest rank of two values: p50 the first, from p80 on the second.
    assert facts.reuse_gap_s == {"0.50": 2.0, "0.80": 10.0, "0.90": 10.0, "0.99": 10.0}
    assert facts.reuse_share_of_top_tenth == 1.0


@pytest.mark.parametrize(
    ("policy", "sizes", "words"), [("arc", [1], "known: lru, lfu, fifo"), ("lru", [0], "0 blocks")]
)
def test_what_makes_no_sense_is_refused(policy: str, sizes: list[int], words: str) -> None:
    """An unknown policy and an empty cache are errors that name what was given."""
    with pytest.raises(DiagnosisError, match=words):
        hit_rate_curve([[A]], policy, sizes)


def test_counted_must_fit_the_requests() -> None:
    """A mask of the wrong length is an error, not a shifted answer."""
    with pytest.raises(DiagnosisError, match="names 1 requests, the trace has 2"):
        hit_rate_curve([[A], [B]], "lru", [1], counted=[True])
