"""From request rows to replayable loads, and the verdict on a cache's size; small rows worked by hand."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from diagnosis.capacity.traces import REQUEST_COLUMNS, WORKER_COLUMNS, cache_loads, common, curve_over, stored_requests
from diagnosis.capacity.verdict import capacity_verdict
from engine_probe.errors import DiagnosisError
from engine_probe.schema import table_from_rows
from store.interface import Batch, Window
from store.open import open_store

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


def _row(at_s: int, blocks: list[int] | None, **more: Any) -> dict[str, Any]:
    at_ns = START + at_s * SECOND
    row = {"request_id": f"r{at_s}", "vantage": "client", "state": "finished", "worker": "w", "prompt_blocks": blocks}
    return row | {"arrival_ns": at_ns, "at_ns": at_ns} | more


def _requests(*rows: dict[str, Any]) -> pa.Table:
    return table_from_rows("request", rows).select([*REQUEST_COLUMNS, "cached_tokens"])


def _workers(*rows: dict[str, Any]) -> pa.Table:
    return table_from_rows("worker", [{"at_ns": START, **row} for row in rows]).select(WORKER_COLUMNS)


def test_requests_are_replayed_in_order_of_arrival() -> None:
    """Rows may come in any order (clients write them as they end); the trace is by arrival."""
    [load] = cache_loads(_requests(_row(2, [3]), _row(0, [1, 2]), _row(1, [1])))
    assert [list(blocks) for blocks in load.trace.lists()] == [[0, 1], [0], [2]]
    assert load.arrival_s.tolist() == [0.0, 1.0, 2.0]


def test_a_count_that_no_float_holds_is_rounded() -> None:
    """The contract's counts are int64: the longest prompt that a row can tell is replayed like any other."""
    [load] = cache_loads(_requests(_row(0, [1], prompt_tokens=(1 << 63) - 1)))
    assert load.trace.num_requests == 1


def test_a_request_seen_from_two_vantages_counts_once() -> None:
    """The client's row is taken before the engine's; rows that name no blocks are left out."""
    [load] = cache_loads(_requests(_row(0, [1]), _row(0, [1], vantage="engine"), _row(1, None)))
    assert load.trace.num_requests == 1
    [engine] = cache_loads(_requests(_row(0, None), _row(0, [1, 2], vantage="engine")))
    assert len(engine.trace.ids) == 2


def test_a_request_that_was_delivered_twice_asks_once() -> None:
    """Two requests, one of them stored twice: the second delivery is no hit on the first."""
    rows = [_row(0, [1]), _row(0, [1]), _row(1, [2])]
    with open_store(":memory:") as store:
        store.append(Batch({"request": table_from_rows("request", rows)}))
        [load] = cache_loads(*stored_requests(store, Window()))
    assert curve_over([load], "lru", [10])[0].requested_blocks == 2
    assert curve_over([load], "lru", [10])[0].hit_blocks == 0


def test_every_worker_has_a_cache_of_its_own() -> None:
    """The same block asked for on two workers is stored twice and hits on neither; on one worker it hits."""
    apart = cache_loads(_requests(_row(0, [1], worker="a"), _row(1, [1], worker="b")))
    together = cache_loads(_requests(_row(0, [1], worker="a"), _row(1, [1], worker="a")))
    assert [load.worker for load in apart] == ["a", "b"]
    assert curve_over(apart, "lru", [10])[0].hit_blocks == 0
    assert curve_over(together, "lru", [10])[0].hit_rate == 0.5


def test_requests_whose_worker_is_unknown_share_one_cache() -> None:
    """worker null is one group, not left out."""
    [load] = cache_loads(_requests(_row(0, [1], worker=None), _row(1, [1], worker=None)))
    assert (load.worker, load.trace.num_requests) == (None, 2)


def test_warm_up_fills_the_cache_and_does_not_count() -> None:
    """phase=warmup: its block is resident afterwards; the rate is of the measured request alone."""
    loads = cache_loads(_requests(_row(0, [1], labels={"phase": "warmup"}), _row(1, [1])))
    [point] = curve_over(loads, "lru", [10])
    assert (point.hit_blocks, point.requested_blocks) == (1, 1)


def test_the_latest_geometry_of_each_worker_is_used() -> None:
    """A worker that restarted with another size has the newer one; a trace may say its block size in a label."""
    workers = _workers(
        {"worker": "w", "num_blocks": 10, "block_size": 16},
        {"worker": "w", "num_blocks": 20, "block_size": 32, "at_ns": START + 1},
    )
    [load] = cache_loads(_requests(_row(0, [1])), workers)
    assert (load.num_blocks, load.block_tokens) == (20, 32)
    [trace] = cache_loads(_requests(_row(0, [1], labels={"block_tokens": "512"})))
    assert (trace.num_blocks, trace.block_tokens) == (None, 512)


def test_nothing_to_replay_is_an_error_that_says_what_is_missing() -> None:
    """Requests without prompt_blocks cannot be replayed, and the message names the column."""
    with pytest.raises(DiagnosisError, match=r"none of the 1 requests .*request\.prompt_blocks"):
        cache_loads(_requests(_row(0, None)))


def test_common_is_the_one_value_that_all_share() -> None:
    """Equal values are common; different or unknown ones are not."""
    assert (common([3, 3]), common([3, 4]), common([3, None]), common([])) == (3, None, None, None)


def _pairs(*, num_blocks: int | None, cached: int) -> Any:
    """A and B take turns, five times each: in 1 block nothing is reused, in 2 blocks 8 of 10 are."""
    rows = [_row(i, [i % 2], cached_tokens=cached if i > 1 else 0) for i in range(10)]
    return capacity_verdict(_requests(*rows), _workers({"worker": "w", "num_blocks": num_blocks, "block_size": 16}))


def test_too_few_blocks_are_called_short_with_the_size_that_would_do() -> None:
    """1 block keeps 0 of the 8 possible hits; 2 blocks (+100 %) keep them all."""
    verdict = _pairs(num_blocks=1, cached=0)
    assert (verdict.status, verdict.num_blocks, verdict.knee_blocks, verdict.lost_blocks) == ("short", 1, 2, 8)
    assert verdict.ceiling == 0.8
    assert verdict.sentence == (
        "1 blocks are too few: they keep 0% of the reuse that this traffic offers. 2 blocks (+100%) would keep 90% of it."
    )


def test_enough_blocks_are_called_enough_and_agree_with_the_engine() -> None:
    """2 blocks keep all 8 of 10; an engine that says 16 cached tokens for each of the 8 has reused 80 %."""
    verdict = _pairs(num_blocks=2, cached=16)
    assert (verdict.status, verdict.lost_blocks, verdict.engine_ratio) == ("enough", 0, 0.8)
    assert [point.hit_rate for point in verdict.points if point.blocks == 2] == [0.8]


def test_without_the_engines_size_capacity_is_not_judged() -> None:
    """Unknown is not enough and not short."""
    assert _pairs(num_blocks=None, cached=0).status == "unknown"


def test_traffic_without_reuse_is_not_blamed_on_capacity() -> None:
    """Every block is asked for once: no size would help, and that is what is said."""
    requests = _requests(*(_row(i, [i]) for i in range(5)))
    verdict = capacity_verdict(requests, _workers({"worker": "w", "num_blocks": 1, "block_size": 16}))
    assert verdict.status == "unknown"
    assert "no prompt block is asked for twice" in verdict.sentence
