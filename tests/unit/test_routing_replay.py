"""Routing replayed over caches small enough to follow on paper."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from collector.routing import document, render, routed
from diagnosis.capacity.block_cache import block_trace
from diagnosis.capacity.curve import hit_rate_curve
from diagnosis.capacity.routing_replay import RoutingReplay, replay_routing
from diagnosis.capacity.traces import REQUEST_COLUMNS, WORKER_COLUMNS, pooled_load
from engine_probe.engine.fleet.policies import POLICIES
from engine_probe.errors import DiagnosisError, UsageError
from engine_probe.schema import table_from_rows

A, B, C, D = 11, 22, 33, 44


def replayed(requests: list[list[int]], routing: str, workers: int, blocks: int | None, **more: Any) -> RoutingReplay:
    return replay_routing(block_trace(requests), routing, workers, blocks, **more)


def test_round_robin_spreads_a_prefix_over_every_cache() -> None:
    """[A B] four times over two workers: each computes it once and hits once, 4 of 8 blocks; pooled 6 of 8."""
    replay = replayed([[A, B]] * 4, "round_robin", 2, 10)
    assert (replay.hit_blocks, replay.requested_blocks, replay.hit_rate) == (4, 8, 0.5)
    assert replay.pooled_hit_rate == 0.75
    assert replay.max_over_mean_load == 1.0
    assert [(w.requests, w.hit_blocks, w.load_blocks, w.resident_blocks) for w in replay.workers] == [(2, 2, 2, 2)] * 2


def test_pure_affinity_pins_a_shared_first_block_to_one_worker() -> None:
    """A is in every prompt: whoever had it first gets all, 3 requests and all the work; the mean of two is half of it."""
    replay = replayed([[A, B], [A, C], [A, D]], "prefix_affinity", 2, 10)
    assert sorted(worker.requests for worker in replay.workers) == [0, 3]
    assert replay.max_over_mean_load == 2.0
    # 2 + 1 + 1 blocks computed, 2 of 6 hits.
    assert max(worker.load_blocks for worker in replay.workers) == 4
    assert replay.hit_blocks == 2


def test_a_load_term_leaves_the_worker_that_has_the_prefix_when_it_is_busier_than_the_mean() -> None:
    """After [A B] one worker has load 2, mean 1: its score for [A C] is 1/2 - 2, the other's 0. The other gets it."""
    replay = replayed([[A, B], [A, C]], "affinity_with_load", 2, 10)
    assert [worker.requests for worker in replay.workers] == [1, 1]
    assert (replay.hit_blocks, replay.max_over_mean_load) == (0, 1.0)


def test_sticky_follows_the_session_and_without_one_the_prefix() -> None:
    """Sessions x y x y over two workers: each keeps its own. Without names the second block (B, C) tells them apart."""
    requests = [[A, B], [A, C], [A, B], [A, C]]
    for sessions in (["x", "y", "x", "y"], None, [None] * 4):
        replay = replayed(requests, "sticky", 2, 10, sessions=sessions)
        assert [worker.requests for worker in replay.workers] == [2, 2]
        assert replay.hit_blocks == 4
    # All of one session: one worker.
    assert sorted(w.requests for w in replayed(requests, "sticky", 2, 10, sessions=["x"] * 4).workers) == [0, 4]


def test_a_full_cache_gives_up_its_own_tail_and_the_router_knows() -> None:
    """[A B C] in 2 blocks leaves A B. Then [A B D]: 2 hits, D pushes out what was used longest ago, and B A stay."""
    replay = replayed([[A, B, C], [A, B, D], [A, B, C]], "prefix_affinity", 1, 2)
    assert replay.hit_blocks == 4
    assert replay.workers[0].resident_blocks == 2


def test_warm_up_loads_workers_and_does_not_count() -> None:
    """The first of three requests is warm-up: the second hits what it stored; the rate is 2 of 2."""
    replay = replayed([[A], [A], [A]], "round_robin", 1, 5, counted=[False, True, True])
    assert (replay.hit_blocks, replay.requested_blocks, replay.workers[0].load_blocks) == (2, 2, 1)


@pytest.mark.parametrize("routing", POLICIES)
def test_one_worker_is_the_plain_capacity_replay(routing: str) -> None:
    """Whatever the policy, with one worker there is nothing to choose."""
    requests = [[A, B, C], [A, B, D], [C], [A, B, C], [D, A], [A, B, D]]
    for blocks in (1, 2, 3, None):
        [plain] = hit_rate_curve(requests, "lru", [blocks])
        replay = replayed(requests, routing, 1, blocks)
        assert (replay.hit_blocks, replay.pooled_hit_rate) == (plain.hit_blocks, plain.hit_rate)


def test_without_a_block_nothing_is_known() -> None:
    """No request, or none with blocks: rates and ratio are None, and the text says so."""
    replay = replayed([[], []], "round_robin", 2, 5)
    assert (replay.hit_rate, replay.max_over_mean_load, replay.pooled_hit_rate) == (None, None, None)
    assert render(replay, 16) == "No block is asked for: nothing can be said of round_robin here."


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"workers": 0}, "0 workers serve nobody"),
        ({"blocks": 0}, "0 blocks holds nothing"),
        ({"counted": [True]}, "counted names 1 requests, the trace has 2"),
        ({"sessions": []}, "sessions names 0 requests, the trace has 2"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, Any], words: str) -> None:
    """Each says what was given."""
    with pytest.raises(DiagnosisError, match=words):
        replayed([[A], [B]], "random", **({"workers": 2, "blocks": 3} | more))
    with pytest.raises(UsageError, match="no routing policy 'fastest'"):
        replayed([[A]], "fastest", 2, 3)


def _requests(*prompts: list[int], worker: str | None = None) -> pa.Table:
    rows = [
        {"request_id": f"r{i}", "vantage": "client", "state": "finished", "worker": worker, "prompt_blocks": blocks}
        | {"at_ns": i + 1, "arrival_ns": i + 1, "session_id": f"s{i % 2}", "labels": {"block_tokens": "512"}}
        for i, blocks in enumerate(prompts)
    ]
    return table_from_rows("request", rows).select([*REQUEST_COLUMNS, "session_id"])


def _workers(*sizes: int) -> pa.Table:
    rows = [{"at_ns": 1, "worker": f"w{i}", "num_blocks": size} for i, size in enumerate(sizes)]
    return table_from_rows("worker", rows).select(WORKER_COLUMNS)


def test_requests_of_all_workers_are_one_load_in_order_of_arrival() -> None:
    """Who served a request before does not matter: it is routed anew; sessions come along."""
    load = pooled_load(pa.concat_tables([_requests([A], [B], worker="w1"), _requests([C], worker="w0")]))
    assert (load.trace.num_requests, load.worker) == (3, None)
    assert sorted(str(name) for name in load.sessions) == ["s0", "s0", "s1"]


def test_the_size_is_taken_from_the_workers_where_they_agree() -> None:
    """One worker of 7 blocks: 7 each. None known: it is asked for. Two sizes: one is asked for."""
    replay, block_tokens = routed(_requests([A], [A], worker="w0"), _workers(7), "round_robin", 2, None, 0)
    assert (replay.blocks, block_tokens) == (7, 512)
    with pytest.raises(UsageError, match="give --blocks N"):
        routed(_requests([A]), _workers(), "round_robin", 2, None, 0)
    with pytest.raises(UsageError, match="--blocks names 2"):
        routed(_requests([A]), _workers(), "round_robin", 2, [1, 2], 0)


def test_the_json_has_the_two_figures_and_a_row_a_worker() -> None:
    """hit_rate and max_over_mean_load; `workers` is a number, the rows are `per_worker`."""
    answer = document(replayed([[A], [A]], "round_robin", 2, None), 3)
    assert (answer["hit_rate"], answer["max_over_mean_load"], answer["blocks"], answer["seed"]) == (0.0, 1.0, None, 3)
    assert (answer["workers"], answer["pooled_hit_rate"], answer["load"]) == (2, 0.5, "uncached blocks")
    assert [row["load_ratio"] for row in answer["per_worker"]] == [1.0, 1.0]


def test_the_text_names_the_hot_worker() -> None:
    """All on one of four: four times the mean, said in words, with what would help."""
    replay = replayed([[A, B]] * 3, "prefix_affinity", 4, 10)
    text = render(replay, 16)
    lines = text.splitlines()
    assert lines[0] == "prefix_affinity over 4 caches of 10 blocks (160 tokens): 66.7% of the blocks are hits."
    assert lines[1:3] == [
        "The busiest worker computes 4.00 times the mean.",
        "One pooled cache of all 40 blocks would hit 66.7%.",
    ]
    hot = next(worker.worker for worker in replay.workers if worker.requests)
    assert lines[3] == f"Worker {hot} is hot: 100% of the work. A load term (affinity_with_load) spreads it."
    assert max(len(line) for line in lines) <= 100
    assert "is hot" not in render(replayed([[A, B]] * 3, "prefix_affinity", 1, 10), 16)


def test_the_help_names_every_policy() -> None:
    """The option's help is written out (the verb imports nothing for --help); it is complete."""
    from collector.commands.capacity import RoutingOption

    [option] = RoutingOption.__metadata__  # type: ignore[attr-defined]
    assert all(name in option.help for name in POLICIES)
