"""Evictions that got dear, told by requests' own time of allocating, and by block events or a counter: no step is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosed import judged, stored
from tests.integration.test_diagnosis_reports_of_engines import names, ns, served, verdict_of
from tests.simulate import Rows

COUNTER = "blocks_evicted_total"


pytestmark = pytest.mark.usefixtures("few_replicates")


def evicting(run: str, seed: int, each_s: float, *, num: int = 20, tells: str = "events") -> Rows:
    """Each request has this many blocks evicted, and waits so long for each of them and 1 ms beside."""
    alloc = num * each_s + 0.001
    rows = served(run, seed, told=lambda _, __: {"alloc_s": alloc, "extra_s": alloc})
    told = {"worker": "w0", "run_id": run}
    rows["worker"] = [{**told, "at_ns": ns(-3.0), "block_size": 16, "num_blocks": 8000}]
    at = [row["first_scheduled_ns"] for row in rows["request"]]
    if tells == "events":
        rows["block"] = [
            {**told, "at_ns": when, "change": change, "block_hash": 100 * i + block + ahead, "tier": "device"}
            for i, when in enumerate(at)
            for block in range(num)
            for change, ahead in (("stored", 10**6), ("evicted", 0))
        ]
    if tells == "counter":
        rows["sample"] = [{**told, "at_ns": t, "name": COUNTER, "value": num * (i + 1.0)} for i, t in enumerate(at)]
    return rows


@pytest.mark.parametrize("tells", ["events", "counter"])
def test_evictions_that_take_fifty_times_as_long_are_named_without_steps(tmp_path: Path, tells: str) -> None:
    """0.1 ms a block become 5 ms: 98 ms a request, and all who wait behind it."""
    parts = [evicting("base", 1, 0.0001, tells=tells), evicting("suspect", 2, 0.005, tells=tells)]
    with stored(tmp_path / "s.duckdb", parts) as store:
        verdict = judged(store, "base", "suspect", "ttft")
        assert (verdict.status, names(verdict)) == ("explained", ["eviction_overhead"]), verdict.verdict
        counted = verdict.causes[0].evidence[1]
        assert store.query(counted["sql"]).column(0)[0].as_py() == counted["value"]
    assert counted["value"] == (
        20 * 300 if tells == "events" else 20 * 299
    )  # a counter tells of what came after its first reading


def test_who_only_evicts_more_blocks_pays_no_more_for_each(tmp_path: Path) -> None:
    """Twenty times as many blocks at 0.1 ms: the pool is short of room, and that is another cause's."""
    verdict = verdict_of(tmp_path, evicting("base", 1, 0.0001), evicting("suspect", 2, 0.0001, num=400))
    assert "eviction_overhead" not in names(verdict), verdict.verdict


def test_time_of_allocating_alone_is_no_eviction(tmp_path: Path) -> None:
    """Nobody tells whether anything was evicted."""
    verdict = verdict_of(
        tmp_path, evicting("base", 1, 0.0001, tells="nothing"), evicting("suspect", 2, 0.005, tells="nothing")
    )
    assert "eviction_overhead" not in names(verdict)
    assert "eviction_overhead" in [unseen["cause"] for unseen in verdict.not_observable]
