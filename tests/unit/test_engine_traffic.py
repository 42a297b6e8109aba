"""Made-up traffic and traces as calls: what is held fixed stays fixed, equal prefixes have equal blocks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector.engine_runs.report import cache_only
from engine_probe.engine.kv_identity import KvIdentity, extend
from engine_probe.engine.traffic.call import Call, made_up_blocks
from engine_probe.engine.traffic.synthetic import Lengths, Traffic
from engine_probe.engine.traffic.tokens import with_tokens
from engine_probe.engine.traffic.trace import trace_calls
from engine_probe.errors import KvscopeError, UsageError


def test_another_rate_asks_the_same_in_the_same_order() -> None:
    """Paired runs: at twice the rate the n-th call is the same but for its instant, which is half."""
    slow, fast = (list(Traffic(num_requests=50, rate=rate).calls()) for rate in (5.0, 10.0))
    for one, other in zip(slow, fast, strict=True):
        assert (one.request_id, one.prompt_tokens, one.output_tokens, list(one.blocks)) == (
            other.request_id,
            other.prompt_tokens,
            other.output_tokens,
            list(other.blocks),
        )
        assert one.at_ns == pytest.approx(2 * other.at_ns, abs=2)


def test_other_lengths_keep_the_arrivals() -> None:
    """Longer answers change nothing else."""
    short, long = (list(Traffic(num_requests=50, output_tokens=Lengths(n, n)).calls()) for n in (8, 80))
    assert [call.at_ns for call in short] == [call.at_ns for call in long]
    assert [call.prompt_tokens for call in short] == [call.prompt_tokens for call in long]


@pytest.mark.parametrize("arrivals", ["poisson", "even", "bursty"])
def test_mean_rate_is_the_rate(arrivals: str) -> None:
    """4,000 calls at 20 a second take about 200 s, whatever their process."""
    calls = list(Traffic(num_requests=4000, rate=20.0, arrivals=arrivals, groups=1).calls())
    assert calls[-1].at_ns / 1e9 == pytest.approx(200, rel=0.15)
    assert [call.at_ns for call in calls] == sorted(call.at_ns for call in calls)


def test_bursts_come_closer_than_chance() -> None:
    """The squared coefficient of variation of the gaps: 1 for Poisson, more in bursts, 0 when even."""
    spread = {}
    for arrivals in ("even", "poisson", "bursty"):
        at = [call.at_ns for call in Traffic(num_requests=3000, rate=20.0, arrivals=arrivals).calls()]
        gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
        mean = sum(gaps) / len(gaps)
        spread[arrivals] = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
    assert spread["even"] < 0.01
    assert spread["poisson"] == pytest.approx(1.0, abs=0.15)
    assert spread["bursty"] > 1.5


def test_share_and_prefix_are_what_is_asked_for() -> None:
    """One group shared by all: every prompt begins with its 4 blocks; the rest is its own."""
    calls = list(
        Traffic(num_requests=20, groups=1, shared_ratio=1.0, shared_tokens=64, own_tokens=Lengths(32, 32)).calls()
    )
    heads = {tuple(call.blocks[:4]) for call in calls}
    tails = [block for call in calls for block in call.blocks[4:]]
    assert len(heads) == 1
    assert len(tails) == len(set(tails)) == 20 * 2
    assert {call.prompt_tokens for call in calls} == {96}
    assert len({call.prefix_hash for call in calls}) == 1


def test_uncacheable_prompts_share_no_block() -> None:
    """Something new stands before the shared text: the prefix hash tells of it, no block does."""
    calls = list(Traffic(num_requests=20, groups=1, shared_ratio=1.0, shared_tokens=64, uncacheable=True).calls())
    blocks = [block for call in calls for block in call.blocks]
    assert len(blocks) == len(set(blocks))
    assert len({call.prefix_hash for call in calls}) == 1


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(1, 64))
def test_blocks_of_two_texts_are_distinct(one: int, other: int, count: int) -> None:
    """Within a text and between texts; a longer text begins like a shorter one of its name."""
    blocks = made_up_blocks(one, count)
    assert len(set(blocks)) == count
    assert all(0 < block < 2**63 for block in blocks)
    assert made_up_blocks(one, count + 3)[:count] == blocks
    assert made_up_blocks(one, 3, first=count) == made_up_blocks(one, count + 3)[count:]
    if one != other:
        assert not set(blocks) & set(made_up_blocks(other, count))


def test_equal_blocks_become_equal_tokens_and_distinct_ones_do_not() -> None:
    """Two calls that share three blocks share 48 tokens, and the names that the engine will give them."""
    root = KvIdentity("m").root(b"s")
    calls = [
        with_tokens(Call(name, 0, 70, 1, [11, 22, 33, own]), 16, 512, root=root, salt=b"s", first_id=3)
        for name, own in (("a", 44), ("b", 55))
    ]
    first, second = (list(call.token_ids) for call in calls)
    assert len(first) == len(second) == 70
    assert first[:48] == second[:48]
    assert first[48:64] != second[48:64]
    assert first[64:] != second[64:]
    assert min(first + second) >= 3
    names: list[int] = []
    extend(names, first, 16, root, b"s")
    assert list(calls[0].blocks) == names
    assert list(calls[1].blocks[:3]) == names[:3]


def write_trace(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_ids_of_a_trace_are_cut_into_blocks(tmp_path: Path) -> None:
    """1,000 tokens of ids 7 and 8: 62 blocks of 16, 32 of them those of id 7; at double speed in half the time."""
    trace = write_trace(
        tmp_path / "t.jsonl",
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [7]},
    )
    first, second = trace_calls(trace, 16, speed=2.0)
    assert (len(first.blocks), len(second.blocks)) == (62, 32)
    assert list(first.blocks[:32]) == list(second.blocks)
    assert (second.at_ns, second.output_tokens) == (1_500_000_000, 1)
    assert [len(call.blocks) for call in trace_calls(trace, 512)] == [1, 1]
    assert [len(call.blocks) for call in trace_calls(trace, 1024)] == [0, 0]
    assert len(list(trace_calls(trace, 16, limit=1))) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}, "line 1: a request of 0 prompt"),
        ({"timestamp": 0, "input_length": 5}, "output_length"),
        ({"timestamp": "soon", "input_length": 5, "output_length": 1, "hash_ids": []}, "line 1"),
        ({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": ["x"]}, "line 1"),
        (
            {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1.5]},
            "hash_ids is not a list of block ids",
        ),
        (
            {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": 7},
            "hash_ids is not a list of block ids",
        ),
        ({"timestamp": None, "input_length": 5, "output_length": 1, "hash_ids": []}, "timestamp is None"),
        ({"timestamp": -5, "input_length": 5, "output_length": 1, "hash_ids": []}, "timestamp is -5"),
        ({"timestamp": 9e300, "input_length": 5, "output_length": 1, "hash_ids": []}, "timestamp is 9e"),
        ({"timestamp": 0, "input_length": True, "output_length": 1, "hash_ids": []}, "input_length is True"),
        ({"timestamp": 0, "input_length": 5, "output_length": 5.5, "hash_ids": []}, "output_length is 5.5"),
        (
            {"timestamp": 0, "input_length": 1 << 63, "output_length": 1, "hash_ids": []},
            "expected a count of tokens, at most",
        ),
    ],
)
def test_line_that_is_no_request_is_named(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    """File and line are named, and what is wrong."""
    with pytest.raises(KvscopeError, match=says):
        list(trace_calls(write_trace(tmp_path / "t.jsonl", line), 16))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Traffic(num_requests=0),
        lambda: Traffic(rate=0.0),
        lambda: Traffic(rate=float("nan")),
        lambda: Traffic(arrivals="tidal"),
        lambda: Traffic(shared_ratio=1.5),
        lambda: Traffic(groups=0),
        lambda: Lengths(0, 5),
        lambda: Lengths(9, 5),
        lambda: list(trace_calls(Path("t"), 500)),
        lambda: list(trace_calls(Path("t"), 16, speed=0.0)),
    ],
)
def test_traffic_that_makes_no_sense_is_misuse(make: Any) -> None:
    """Each is refused with a sentence."""
    with pytest.raises(UsageError):
        make()


def test_caches_alone_are_counted_in_the_engines_unit() -> None:
    """Twice the same 40 tokens in blocks of 16: two blocks are found, 32 of 80 tokens; the last 8 are in no block."""
    calls = [Call(name, 0, 40, 1, made_up_blocks(7, 2)) for name in ("a", "b")]
    figures = cache_only(calls, "round_robin", 1, 100, 16, seed=0)
    assert figures["hit_rate"] == figures["pooled_hit_rate"] == pytest.approx(0.4)
