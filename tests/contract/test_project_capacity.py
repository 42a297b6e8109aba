"""`kvscope capacity` on a public production trace: the figures that are known of it, and answers to bad input."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from diagnosis.capacity.block_cache import block_trace
from diagnosis.capacity.routing_replay import replay_routing

if TYPE_CHECKING:
    from tests.conftest import Ended

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "mooncake_conversation.jsonl.gz"
SIZES = (1000, 3000, 5859, 10000, 30000, 50000, 100000, None)
# Measured by another implementation than ours (direct simulation); None: that one did not measure it.
KNOWN = {
    "lru": (0.0445, 0.0653, 0.1361, 0.2116, 0.3257, 0.3546, 0.3637, 0.3664),
    "lfu": (0.0481, 0.0750, 0.0969, 0.1322, 0.2761, 0.3438, None, 0.3664),
    "fifo": (0.0445, 0.0637, 0.1254, 0.1820, 0.2950, 0.3336, None, 0.3664),
}


@pytest.mark.parametrize("policy", KNOWN)
def test_the_known_hit_rates_of_the_mooncake_trace_come_out(policy: str, kvscope: Callable[..., Ended]) -> None:
    """Every cell of the published table within 0.002, in the order in which the sizes were asked for."""
    sizes = ",".join("inf" if size is None else str(size) for size in SIZES)
    ended = kvscope("capacity", "--trace", TRACE, "--policy", policy, "--blocks", sizes, "--json")
    assert ended.code == 0
    answer = json.loads(ended.out)
    assert [point["blocks"] for point in answer] == list(SIZES)
    for point, known in zip(answer, KNOWN[policy], strict=True):
        assert known is None or point["hit_rate"] == pytest.approx(known, abs=0.002)


def test_the_known_facts_of_the_mooncake_trace_come_out(kvscope: Callable[..., Ended]) -> None:
    """Counts exactly; shares, gaps and the knee as published."""
    ended = kvscope("capacity", "--trace", TRACE, "--blocks", "inf", "--facts", "--json")
    answer = json.loads(ended.out)
    [facts] = answer["facts"]
    assert (facts["requests"], facts["blocks"], facts["unique_blocks"]) == (12_031, 288_500, 182_790)
    assert facts["block_tokens"] == 512
    assert facts["used_once_share"] == pytest.approx(0.758, abs=0.0005)
    assert facts["reuse_share_of_top_tenth"] == pytest.approx(0.75, abs=0.005)
    assert facts["mean_input_tokens"] == pytest.approx(12_035, abs=0.5)
    assert [round(gap) for gap in facts["reuse_gap_s"].values()] == [114, 324, 519, 1578]
    # 30,000 blocks give .3257 of .3664, which is 89 %; 50,000 give 97 %.
    assert 30_000 < answer["knee"]["blocks"] < 50_000


def test_the_text_says_the_knee_the_curve_and_what_is_left_out(kvscope: Callable[..., Ended]) -> None:
    """One sentence first, then the table with the knee marked, then the facts and the limits of a replay."""
    ended = kvscope("capacity", "--trace", TRACE)
    lines = ended.out.splitlines()
    assert lines[0].startswith("At most 36.6% of the blocks asked for could be hits; LRU reaches 90% of that with ")
    assert sum("<- knee" in line for line in lines) == 1
    assert any(line.split()[:4] == ["10,000", "5,120,000", "21.16%", "57.7%"] for line in lines)
    assert lines[-1].startswith("Only prompts are replayed.")


@pytest.mark.parametrize(
    ("routing", "hit_rate", "ratio"),
    [("round_robin", 0.104, 1.04), ("prefix_affinity", 0.136, 10.0), ("affinity_with_load", 0.359, 1.01)],
)
def test_the_known_figures_of_routing_come_out(
    routing: str, hit_rate: float, ratio: float, kvscope: Callable[..., Ended]
) -> None:
    """10 workers of 5,859 blocks: hit rate within 0.005, largest over mean load within 0.05, as measured elsewhere."""
    ended = kvscope("capacity", "--trace", TRACE, "--workers", "10", "--blocks", "5859", "--routing", routing, "--json")
    assert ended.code == 0
    answer = json.loads(ended.out)
    assert answer["hit_rate"] == pytest.approx(hit_rate, abs=0.005)
    assert answer["max_over_mean_load"] == pytest.approx(ratio, abs=0.05)
    assert answer["pooled_hit_rate"] == pytest.approx(0.359, abs=0.005)
    assert sum(row["requests"] for row in answer["per_worker"]) == 12_031


@pytest.mark.parametrize("ties", ["lowest", "random"])
def test_pure_affinity_is_pinned_however_ties_are_broken(ties: str) -> None:
    """To the lowest index or to the least load: .136 and 10.0 on the Mooncake trace, by the measured table."""
    blocks = [json.loads(line)["hash_ids"] for line in gzip.decompress(TRACE.read_bytes()).splitlines()]
    replay = replay_routing(block_trace(blocks), "prefix_affinity", 10, 5859, ties=ties)
    assert replay.hit_rate == pytest.approx(0.136, abs=0.005)
    assert replay.max_over_mean_load == 10.0


def test_routing_without_json_names_the_hot_worker(kvscope: Callable[..., Ended]) -> None:
    """The first block is in every prompt, so pure affinity sends all to one of ten."""
    args = ("--workers", "10", "--blocks", "5859", "--routing", "prefix_affinity")
    lines = kvscope("capacity", "--trace", TRACE, *args).out.splitlines()
    assert (
        lines[0] == "prefix_affinity over 10 caches of 5,859 blocks (2,999,808 tokens): 13.6% of the blocks are hits."
    )
    assert lines[1] == "The busiest worker computes 10.00 times the mean."
    assert "is hot: 100% of the work" in lines[3]


ROUTING = ("--trace", TRACE, "--routing", "round_robin")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--trace", TRACE, "--blocks", "1000,many"), 2, "'many' is neither"),
        (("--trace", TRACE, "--blocks", "0"), 2, "'0' is neither"),
        (("--trace", TRACE, "--policy", "arc", "--blocks", "10"), 2, "known: lru, lfu, fifo"),
        (("--trace", TRACE, "--run", "a"), 2, "not both"),
        (("--trace", Path("no-such-trace.jsonl")), 2, "no-such-trace.jsonl"),
        (("--blox", "3"), 2, "--blox"),
        (ROUTING, 2, "give --workers N"),
        ((*ROUTING, "--workers", "0", "--blocks", "9"), 2, "--workers is 0"),
        ((*ROUTING, "--workers", "2"), 2, "give --blocks N"),
        ((*ROUTING, "--workers", "2", "--blocks", "1,2"), 2, "names 2"),
        ((*ROUTING, "--workers", "2", "--blocks", "9", "--policy", "lfu"), 2, "leave --policy lfu out"),
        ((*ROUTING, "--workers", "2", "--blocks", "9", "--facts"), 2, "leave one of them out"),
        (("--trace", TRACE, "--workers", "2"), 2, "give both or neither"),
        (("--trace", TRACE, "--routing", "best", "--workers", "2"), 2, "known: round_robin, random, least_loaded"),
    ],
)
def test_bad_input_is_named(args: tuple[object, ...], code: int, words: str, kvscope: Callable[..., Ended]) -> None:
    """Exit code and message say what was given and what would be right; nothing is on stdout."""
    ended = kvscope("capacity", *args)
    assert ended.code == code
    assert words in ended.err
    assert ended.out == ""
