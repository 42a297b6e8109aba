"""The live picture: open requests as routers tell them, workers by their newest step, evictions."""

from __future__ import annotations

from typing import Any

from collector.live.live import Live
from collector.live.worker_gauges import worker_gauges
from engine_probe.schema import table_from_rows
from store import metric_catalogue as names

NOW_NS = 1_764_403_200_000_000_000
S = 1_000_000_000


def routed(request_id: str, at_ns: int = NOW_NS, chosen: str | None = "w0", **columns: Any) -> dict[str, Any]:
    return {"request_id": request_id, "at_ns": at_ns, "router": "r", "chosen": chosen} | columns


def ended(request_id: str, vantage: str = "client", worker: str | None = None) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "vantage": vantage,
        "worker": worker,
        "state": "finished",
        "arrival_ns": NOW_NS,
        "at_ns": NOW_NS,
    }


def told(live: Live, now_ns: int = NOW_NS, **rows: list[dict[str, Any]]) -> None:
    live.observe({kind: table_from_rows(kind, part) for kind, part in rows.items()}, now_ns)


def open_ids(live: Live, now_ns: int = NOW_NS) -> list[str]:
    return [one.request_id for one in live.open_requests(now_ns, 100)]


def test_routed_request_is_open_until_its_end_is_told() -> None:
    """The longest open comes first; the end takes it away."""
    live = Live(100, 3600)
    told(live, route=[routed("b", NOW_NS - S), routed("a", NOW_NS - 2 * S)])
    assert open_ids(live) == ["a", "b"]
    told(live, request=[ended("a")])
    assert open_ids(live) == ["b"]
    assert live.num_open == 1


def test_end_that_comes_before_the_decision_leaves_nothing_open() -> None:
    """Batches of different senders overtake each other."""
    live = Live(100, 3600)
    told(live, route=[routed("first")])
    told(live, request=[ended("late")])
    told(live, route=[routed("late")])
    assert open_ids(live) == ["first"]


def test_prefill_helper_does_not_end_a_request() -> None:
    """Served by two workers, a request is open until the one it was sent to has told its row."""
    live = Live(100, 3600)
    told(live, route=[routed("a", chosen="decode-0")])
    told(live, request=[ended("a", "engine", "prefill-0")])
    assert open_ids(live) == ["a"]
    told(live, request=[ended("a", "engine", "decode-0")])
    assert open_ids(live) == []


def test_without_routes_nothing_is_claimed() -> None:
    """No router: open requests are unknown, which is not the same as none."""
    live = Live(100, 3600)
    told(live, request=[ended("a")])
    assert not live.sees_routes
    assert open_ids(live) == []


def test_table_is_bounded_and_counts_what_it_forgets() -> None:
    """Too many, or unheard of for too long."""
    live = Live(3, 60)
    told(live, route=[routed(str(i), NOW_NS + i) for i in range(5)])
    assert open_ids(live) == ["2", "3", "4"]
    assert live.num_dropped == 2
    assert open_ids(live, NOW_NS + 61 * S) == []
    assert live.num_dropped == 5


def test_newest_step_of_each_worker_is_kept_whatever_the_order() -> None:
    """An older step that comes later changes nothing; unknown numbers stay unknown."""
    live = Live(10, 60)
    told(live, step=[{"worker": "a", "at_ns": NOW_NS + i, "step": i, "num_running": i} for i in (3, 9, 5)])
    told(live, step=[{"worker": "a", "at_ns": NOW_NS + 4, "step": 4}, {"worker": "b", "at_ns": NOW_NS, "step": 1}])
    workers = live.workers()
    assert (workers["a"]["step"], workers["a"]["num_running"], workers["a"]["blocks_used"]) == (9, 9, None)
    assert workers["b"]["num_running"] is None


def test_rows_of_runs_are_no_live_rows() -> None:
    """An import is history."""
    live = Live(10, 60)
    told(
        live,
        route=[routed("a", run_id="old")],
        step=[{"worker": "a", "at_ns": NOW_NS, "step": 1, "run_id": "old"}],
        worker=[{"worker": "a", "at_ns": NOW_NS, "block_size": 16, "run_id": "old"}],
    )
    assert (open_ids(live), live.workers(), live.block_sizes, live.sees_routes) == ([], {}, {}, False)


def test_an_engine_that_is_only_scraped_has_gauges_too() -> None:
    """The newest sample of each name, its series summed; a worker whose steps are told needs none."""
    live = Live(10, 60)

    def sample(worker: str, name: str, value: float, at_ns: int = NOW_NS) -> dict[str, Any]:
        return {"worker": worker, "name": name, "value": value, "at_ns": at_ns}

    told(
        live,
        sample=[
            sample("llama", "requests_running", 1.0, NOW_NS - 5),
            sample("llama", "requests_running", 2.0),
            sample("llama", "requests_running", 3.0),
            sample("llama", "kv_usage_ratio", 0.25),
            sample("llama", "gpu_util", 0.9),
            sample("vllm", "requests_running", 7.0),
        ],
        step=[{"worker": "vllm", "at_ns": NOW_NS, "step": 1, "num_running": 8}],
        worker=[{"worker": "vllm", "at_ns": NOW_NS, "block_size": 16, "num_blocks": 100}],
    )
    assert live.scraped() == {"llama": {"requests_running": (NOW_NS, 5.0), "kv_usage_ratio": (NOW_NS, 0.25)}}
    assert live.block_sizes == {"vllm": 16}
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in worker_gauges(live)
        for sample in metric.samples
    }
    assert found[(names.REQUESTS_RUNNING.name, "llama")] == 5.0
    assert found[(names.REQUESTS_RUNNING.name, "vllm")] == 8
    assert found[(names.KV_USAGE.name, "llama")] == 0.25
    assert found[(names.KV_CAPACITY.name, "vllm")] == 100
    assert (names.REQUESTS_WAITING.name, "llama", "") not in found, "not told"


def test_gauges_of_blocks_sum_to_the_capacity() -> None:
    """100 blocks: 60 used, 30 cached, so 10 are free; 64 of 60 * 16 slots are wasted. Without the cached ones free is not known."""
    live = Live(10, 60)
    step = {"at_ns": NOW_NS, "step": 1, "blocks_total": 100, "blocks_used": 60, "wasted_slots": 64}
    told(
        live,
        step=[step | {"worker": "a", "blocks_cached": 30}, step | {"worker": "b"}],
        worker=[{"worker": "a", "at_ns": NOW_NS, "block_size": 16}],
    )
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in worker_gauges(live)
        for sample in metric.samples
    }
    states = {state: found[(names.KV_BLOCKS.name, "a", state)] for state in ("used", "cached", "free")}
    assert states == {"used": 60, "cached": 30, "free": 10}
    assert found[(names.KV_USAGE.name, "a")] == 0.6
    assert found[(names.KV_FRAGMENTATION.name, "a")] == 64 / 960
    assert (names.KV_BLOCKS.name, "b", "free") not in found
    assert (names.KV_FRAGMENTATION.name, "b") not in found


def test_a_new_worker_takes_the_place_of_the_one_that_is_silent_for_longest() -> None:
    """A fleet whose workers have a new name after every start: the newest are seen however many there were before."""
    live = Live(100, 3600, max_workers=2)
    for number in range(5):
        at_ns = NOW_NS + number * S
        told(live, worker=[{"worker": f"w{number}", "at_ns": at_ns, "block_size": 16}])
        told(live, step=[{"worker": f"w{number}", "at_ns": at_ns, "step": 1, "num_running": number}])
    assert list(live.workers()) == ["w3", "w4"]
    assert live.block_sizes == {"w3": 16, "w4": 16}
    told(live, step=[{"worker": "late", "at_ns": NOW_NS, "step": 1}])
    assert list(live.workers()) == ["w3", "w4"]


def test_gauges_have_labels_of_a_bounded_length() -> None:
    """Two names of a megabyte that differ in their last letter stay two workers, and the page stays small."""
    live = Live(100, 3600)
    long = ["w" * 1_000_000 + letter for letter in "ab"]
    told(live, step=[{"worker": name, "at_ns": NOW_NS, "step": 1, "num_running": 1} for name in long])
    (running,) = [metric for metric in worker_gauges(live) if metric.name == names.REQUESTS_RUNNING.name]
    found = {sample.labels["worker"] for sample in running.samples}
    assert len(found) == 2
    assert max(map(len, found)) <= 200
