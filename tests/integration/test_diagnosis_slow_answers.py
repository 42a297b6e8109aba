"""A GPU that is slow, told by request rows alone: its tokens take longer than as much work does at its like."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.hotspots.judge import hotspots
from store.interface import Window
from tests.diagnosed import judged, stored
from tests.simulate import Rows, Setup, simulate

WORKERS = 4
EACH = Setup(num_requests=170, rate=1.4, seats=32, output_tokens=(60, 200), num_blocks=20_000)
HIDDEN = ("token_ns", "prompt_blocks", "stalled_s", "recomputed_tokens", "self_hit_tokens", "cache_lookup_s")


pytestmark = pytest.mark.usefixtures("few_replicates")


def fleet(run: str, seed: int, slow: dict[int, float]) -> Rows:
    """Request rows of four workers, 1.4 requests a second each for two minutes."""
    rows: Rows = {"request": [], "worker": []}
    for k in range(WORKERS):
        part = simulate(EACH, run, worker=f"w{k}", seed=10 * seed + k, slow=slow.get(k, 1.0))
        rows["request"] += [
            {name: value for name, value in row.items() if name not in HIDDEN} for row in part["request"]
        ]
        rows["worker"] += part["worker"]
    return rows


@pytest.mark.parametrize("slow", [2.0, 1.4])
def test_a_slow_worker_is_named(tmp_path: Path, slow: float) -> None:
    runs = [fleet("base", 1, {}), fleet("suspect", 2, {2: slow})]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "base", "suspect", "e2e")
        before, found = (hotspots(store, Window(run_id=run)) for run in ("base", "suspect"))
    assert before.status == "none", before.verdict
    assert {(spot.kind, spot.subject["id"]) for spot in found.hotspots} == {("straggler", "w2")}
    assert [cause.cause for cause in verdict.causes][:1] == ["hotspot_straggler"], verdict.verdict
    assert verdict.causes[0].subject == {"kind": "worker", "id": "w2"}


@pytest.mark.parametrize("seed", range(3, 7))
def test_workers_of_one_pace_are_no_stragglers(tmp_path: Path, seed: int) -> None:
    with stored(tmp_path / "s.duckdb", [fleet("suspect", seed, {})]) as store:
        assert hotspots(store, Window(run_id="suspect")).status == "none"
