"""Fewer seats or a smaller budget where no step tells what requests wait for: the workers' settings and the requests' times do."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored
from tests.simulate import Rows, Setup, simulate

USUAL = Setup(num_requests=300, rate=3.0, seats=16)
UNTOLD = ("token_ns", "prompt_blocks", "stalled_s")


pytestmark = pytest.mark.usefixtures("few_replicates")


def told(rows: Rows, *kinds: str, chunk: int | None = None) -> Rows:
    """Requests and workers, and kinds that are named; chunk: requests tell their prefill steps, of so many tokens each."""
    requests = []
    for row in rows["request"]:
        kept = {name: value for name, value in row.items() if name not in UNTOLD}
        if chunk is not None:
            kept["prefill_chunks"] = -(-row["computed_tokens"] // chunk)
        requests.append(kept)
    return {"request": requests, "worker": rows["worker"], **{kind: rows[kind] for kind in kinds}}


def verdict_of(folder: Path, base: Rows, suspect: Rows) -> Verdict:
    with stored(folder / "s.duckdb", [base, suspect]) as store:
        return judged(store, "base", "suspect")


def names(verdict: Verdict) -> list[str]:
    return [cause.cause for cause in verdict.causes]


@pytest.mark.parametrize("kinds", [("sample",), ()], ids=["gauges", "nothing else"])
def test_fewer_seats_are_told_by_settings_and_times(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """3 seats for 16: requests queue while three run, and scraped usage says that there was room; without it that is less sure."""
    base, suspect = simulate(USUAL, "base"), simulate(USUAL, "suspect", seed=2, seats=3)
    verdict = verdict_of(tmp_path, told(base, *kinds), told(suspect, *kinds))
    assert (verdict.status, names(verdict)) == ("explained", ["small_batch"]), verdict.verdict
    said = [evidence["statement"] for evidence in verdict.causes[0].evidence]
    assert "a worker has 3 seats (16 in the baseline)" in said
    assert any("of the KV blocks were in use" in each for each in said) == bool(kinds)
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert seconds["queue_seats"] > 0.9 * verdict.delta.mean_s


def test_fewer_seats_of_one_worker_are_told_with_it(tmp_path: Path) -> None:
    """w0 keeps its 16 seats, w1 has 3: requests queue there, and the settings of that worker alone are what changed."""
    pairs: list[list[Rows]] = []
    for run, seed, seats in (("base", 1, 16), ("suspect", 3, 3)):
        of_workers = [
            simulate(USUAL, run, seed=seed + place, worker=f"w{place}", seats=seats if place else 16)
            for place in (0, 1)
        ]
        pairs.append([told(rows, "sample") for rows in of_workers])
    merged = [{kind: [row for rows in pair for row in rows[kind]] for kind in pair[0]} for pair in pairs]
    verdict = verdict_of(tmp_path, *merged)
    assert names(verdict) == ["small_batch"], verdict.verdict
    assert verdict.causes[0].subject == {"kind": "worker", "id": "w1"}
    assert "a worker has 3 seats (16 in the baseline)" in [each["statement"] for each in verdict.causes[0].evidence]


def test_seats_that_are_filled_by_more_requests_are_the_load_s(tmp_path: Path) -> None:
    """As many seats as before, three times the requests."""
    base, suspect = simulate(USUAL, "base", seats=6), simulate(USUAL, "suspect", seed=2, seats=6, rate=9.0)
    verdict = verdict_of(tmp_path, told(base, "sample"), told(suspect, "sample"))
    assert names(verdict) == ["load_step"], verdict.verdict


def test_seats_of_a_full_pool_are_not_what_is_missing(tmp_path: Path) -> None:
    """Fewer seats, and scraped usage says that more requests would have found no blocks."""
    base, suspect = simulate(USUAL, "base"), simulate(USUAL, "suspect", seed=2, seats=3)
    for row in suspect["sample"]:
        if row["name"] == "kv_usage_ratio":
            row["value"] = 0.95
    assert "small_batch" not in names(verdict_of(tmp_path, told(base, "sample"), told(suspect, "sample")))


@pytest.mark.parametrize("is_set", [True, False], ids=["the setting is told", "it is not"])
def test_a_smaller_budget_is_told_by_settings_and_chunks(tmp_path: Path, is_set: bool) -> None:
    """96 tokens a step for 4,096, prompts of 464 and nothing cached: five steps for one. Without the setting more chunks prove nothing."""
    base = simulate(USUAL, "base", caching=False)
    suspect = simulate(USUAL, "suspect", seed=2, caching=False, budget=96, fixed_s=0.01)
    parts = told(base, chunk=4096), told(suspect, chunk=96)
    if not is_set:
        for part in parts:
            part["worker"] = [{**row, "flags": {"max_num_seqs": "16"}} for row in part["worker"]]
    verdict = verdict_of(tmp_path, *parts)
    if is_set:
        assert names(verdict)[0] == "chunk_budget", verdict.verdict
        said = [evidence["statement"] for evidence in verdict.causes[0].evidence]
        assert "a step may compute 96 tokens (4,096 in the baseline)" in said
    else:
        assert "chunk_budget" not in names(verdict)
