"""The load of one worker stands still for the router: what it then gets is neither more load nor chance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diagnosis.hotspots.judge import hotspots
from store.interface import Window
from tests.diagnosed import judged, stored
from tests.simulate import Rows, ns

SEATS, SERVED_S, SPAN_S, NUM = 4, 1.0, 60.0, 600
"""Four workers of 4 seats could serve 16 requests a second; 10 come."""


pytestmark = pytest.mark.usefixtures("few_replicates")


def fleet(run: str, seed: int, *, frozen: float | None = None, to: int | None = None) -> Rows:
    """The least loaded of four workers gets each request; frozen: what the router reads of w1, whatever runs there; to: the worker
    that gets all."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "route": [], "sample": [], "worker": []}
    seats = np.zeros((4, SEATS))
    spans: list[list[tuple[float, float, float]]] = [[], [], [], []]
    for i, at in enumerate(np.sort(rng.uniform(0, SPAN_S, NUM))):
        has = [float(sum(1 for came, _, last in mine if came <= at < last)) for mine in spans]
        believed = [frozen if k == 1 and frozen is not None else has[k] for k in range(4)]
        least = [k for k in range(4) if believed[k] == min(believed)]
        k = int(rng.choice(least)) if to is None else to
        seat = int(seats[k].argmin())
        begun = max(at, seats[k][seat])
        first = begun + 0.05 * rng.uniform(0.95, 1.05)
        last = begun + SERVED_S * rng.uniform(0.95, 1.05)
        seats[k][seat] = last
        spans[k].append((at, begun, last))
        one = {"request_id": f"{run}-{i}", "run_id": run}
        rows["route"].append(
            {
                **one,
                "at_ns": ns(at) - 1,
                "policy": "least_load",
                "chosen": f"w{k}",
                "candidates": [{"worker": f"w{j}", "load": believed[j], "score": -believed[j]} for j in range(4)],
            }
        )
        row = {**one, "worker": f"w{k}", "vantage": "engine", "state": "finished", "prompt_tokens": 500}
        row |= {"cached_tokens": 0, "computed_tokens": 500, "output_tokens": 40}
        row |= {"arrival_ns": ns(at), "first_scheduled_ns": ns(begun), "first_token_ns": ns(first)}
        row |= {"queue_s": begun - at, "prefill_s": first - begun, "decode_s": last - first}
        rows["request"].append({**row, **dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), ns(last))})
    for second in range(round(SPAN_S)):
        for k in range(4):
            running = sum(1 for _, begun, last in spans[k] if begun <= second < last)
            waiting = sum(1 for at, begun, _ in spans[k] if at <= second < begun)
            for name, value in (("requests_running", running), ("requests_waiting", waiting)):
                told = {"run_id": run, "worker": f"w{k}", "at_ns": ns(second), "name": name, "value": float(value)}
                rows["sample"].append(told)
    for k in range(4):
        facts = {"run_id": run, "worker": f"w{k}", "at_ns": ns(-1), "flags": {"max_num_seqs": str(SEATS)}}
        rows["worker"].append(facts)
    return rows


@pytest.mark.parametrize("frozen", [0.0, 1.0])
def test_a_worker_whose_load_stands_still_is_named(tmp_path: Path, frozen: float) -> None:
    """Its metrics endpoint hangs: the router goes on to read what it read last, and the others' loads live."""
    runs = [fleet("base", 1), fleet("suspect", 2, frozen=frozen)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "base", "suspect")
        before, found = (hotspots(store, Window(run_id=run)) for run in ("base", "suspect"))
        spot = found.hotspots[0]
        for fact in spot.evidence:
            if fact.sql is not None and fact.value is not None:
                assert store.query(fact.sql).column(0)[0].as_py() == pytest.approx(fact.value)
    assert before.status == "none"
    assert [(each.kind, each.subject["id"]) for each in found.hotspots] == [("dead_signal", "w1")]
    assert any(f"a load of {frozen:g} of w1 at every decision" in fact.statement for fact in spot.evidence)
    assert [cause.cause for cause in verdict.causes] == ["hotspot_dead_signal"], verdict.verdict


def test_workers_that_got_nothing_are_counted_by_what_was_scraped_of_them(tmp_path: Path) -> None:
    """Nobody tells of routes: that as many requests came as before to workers that were all there is no more load a worker."""
    runs = [{**rows, "route": []} for rows in (fleet("base", 1), fleet("suspect", 2, to=1))]
    assert {row["worker"] for row in runs[1]["request"]} == {"w1"}
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "base", "suspect")
    assert "load_step" not in [cause.cause for cause in verdict.causes], verdict.verdict


def test_workers_that_are_gone_are_more_load_for_the_others(tmp_path: Path) -> None:
    """The same requests at one worker, and nothing was scraped of the others."""
    runs = [{**rows, "route": []} for rows in (fleet("base", 1), fleet("suspect", 2, to=1))]
    runs[1]["sample"] = [row for row in runs[1]["sample"] if row["worker"] == "w1"]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "base", "suspect")
    assert [cause.cause for cause in verdict.causes] == ["load_step"], verdict.verdict
