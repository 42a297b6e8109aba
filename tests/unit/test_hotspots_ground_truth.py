"""The two pure-affinity rows of the ground truth (a public trace over ten workers) are found in the first minute.

The trace is replayed as the ground truth replays it: the router knows every cache at once, and nothing takes time. In its
first minute no cache of 5,859 blocks is full, so nothing is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diagnosis.hotspots.judge import hotspots
from engine_probe.engine.fleet.policies import Candidates, make_policy
from engine_probe.engine.fleet.prefix_index import PrefixIndex
from engine_probe.engine.traffic.call import Call
from engine_probe.engine.traffic.trace import trace_calls
from store.interface import Store, Window
from store.open import open_store
from tests.store_rows import START_NS, S, batch

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "mooncake_conversation.jsonl.gz"
BLOCK, WORKERS, BLOCKS = 512, 10, 5859


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    calls = [call for call in trace_calls(TRACE, BLOCK, limit=400) if call.at_ns < 60 * S]
    opened = open_store(str(tmp_path_factory.mktemp("trace") / "kvscope.duckdb"))
    for name, policy, ties in (
        ("lowest", "prefix_affinity", "lowest"),
        ("least", "prefix_affinity", "random"),
        ("with_load", "affinity_with_load", "random"),
        ("round_robin", "round_robin", "random"),
    ):
        opened.append(batch(_replayed(calls, name, policy, ties)))
    yield opened
    opened.close()


def _replayed(calls: list[Call], run: str, policy: str, ties: str) -> dict[str, list[dict[str, Any]]]:
    index, chooser = PrefixIndex(WORKERS), make_policy(policy, ties=ties)
    load, rows = [0.0] * WORKERS, {"route": [], "request": []}  # type: dict[str, list[dict[str, Any]]]
    for call in calls:
        matched = index.match(call.blocks)
        choice = chooser.choose(Candidates(matched, load, [0.0] * WORKERS, len(call.blocks), call.request_id))
        chosen, at_ns = choice.index, START_NS + call.at_ns
        index.stored(chosen, call.blocks, [None, *call.blocks[:-1]])
        assert index.num_blocks(chosen) <= BLOCKS
        load[chosen] += len(call.blocks) - matched[chosen]
        common = {"request_id": call.request_id, "run_id": run, "at_ns": at_ns}
        candidates = [
            {"worker": f"w{i}", "matched_tokens": matched[i] * BLOCK, "load": load[i], "score": choice.scores[i]}
            for i in range(WORKERS)
        ]
        rows["route"].append({**common, "policy": policy, "chosen": f"w{chosen}", "candidates": candidates})
        rows["request"].append(
            {
                **common,
                "worker": f"w{chosen}",
                "vantage": "engine",
                "state": "finished",
                "arrival_ns": at_ns,
                "prompt_tokens": call.prompt_tokens,
                "cached_tokens": matched[chosen] * BLOCK,
                "prompt_blocks": list(call.blocks),
            }
        )
    return rows


@pytest.mark.parametrize("run", ["lowest", "least"])
def test_pure_affinity_is_found_in_the_first_minute(store: Store, run: str) -> None:
    """The block that all requests share pins them to one worker: affinity, told after the first ten seconds."""
    found = hotspots(store, Window(START_NS, START_NS + 60 * S, run))
    [spot] = found.hotspots
    assert (spot.kind, spot.cause) == ("affinity", "hotspot_affinity")
    assert spot.num_requests == found.num_decisions
    assert spot.detected_ns <= START_NS + 10 * S
    # every request shares it: ten tenths of what comes, so ten workers of ten
    assert spot.advice.replicas == WORKERS
    # nothing tells how long anything took
    assert spot.regret_s is None
    assert any("regret" in what for what in found.cannot_tell)


@pytest.mark.parametrize("run", ["with_load", "round_robin"])
def test_policies_that_spread_the_trace_are_no_hotspot(store: Store, run: str) -> None:
    """The rows of the ground truth whose largest load is 1.01 and 1.04 times the mean."""
    assert hotspots(store, Window(START_NS, START_NS + 60 * S, run)).status == "none"
