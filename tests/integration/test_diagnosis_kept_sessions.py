"""Conversations that stay at their worker: what the router keeps there is told by conversations where no prefix has a name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diagnosis.hotspots.judge import hotspots
from store.interface import Window
from tests.diagnosed import judged, stored
from tests.simulate import Rows, ns

WORKERS, SEATS, SERVED_S, SPAN_S, NUM, SESSIONS = 4, 4, 1.0, 60.0, 600, 40
"""Four workers of 4 seats could serve 16 requests a second; 10 come, turns of 40 conversations."""


pytestmark = pytest.mark.usefixtures("few_replicates")


def fleet(run: str, seed: int, *, is_kept: bool, loud: float = 0.0) -> Rows:
    """is_kept: a conversation stays at one of four workers; else the least loaded gets each turn. loud: share of the turns that are of the
    conversations of one worker, beyond their even share."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "route": [], "worker": []}
    seats = np.zeros((WORKERS, SEATS))
    for i, at in enumerate(np.sort(rng.uniform(0, SPAN_S, NUM))):
        session = int(rng.integers(SESSIONS))
        if rng.uniform() < loud:
            session -= session % WORKERS
        least = seats.min(axis=1)
        k = session % WORKERS if is_kept else int(rng.choice(np.flatnonzero(least <= max(least.min(), at))))
        seat = int(seats[k].argmin())
        begun = max(at, seats[k][seat])
        first = begun + 0.05 * rng.uniform(0.95, 1.05)
        last = begun + SERVED_S * rng.uniform(0.95, 1.05)
        seats[k][seat] = last
        one = {"request_id": f"{run}-{i}", "run_id": run}
        candidates = [{"worker": f"w{j}"} for j in range(WORKERS)]
        rows["route"].append(
            {**one, "at_ns": ns(at) - 1, "policy": "session", "chosen": f"w{k}", "candidates": candidates}
        )
        row = {**one, "worker": f"w{k}", "vantage": "engine", "state": "finished", "prompt_tokens": 500}
        row |= {"cached_tokens": 0, "computed_tokens": 500, "output_tokens": 40, "session_id": f"s{session}"}
        row |= {"arrival_ns": ns(at), "first_scheduled_ns": ns(begun), "first_token_ns": ns(first)}
        row |= {"queue_s": begun - at, "prefill_s": first - begun, "decode_s": last - first}
        rows["request"].append({**row, **dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), ns(last))})
    for k in range(WORKERS):
        facts = {"run_id": run, "worker": f"w{k}", "at_ns": ns(-1), "flags": {"max_num_seqs": str(SEATS)}}
        rows["worker"].append(facts)
    return rows


def test_conversations_that_stay_are_the_reason(tmp_path: Path) -> None:
    runs = [fleet("base", 1, is_kept=True), fleet("suspect", 2, is_kept=True, loud=0.4)]
    with stored(tmp_path / "s.duckdb", runs) as store:
        verdict = judged(store, "base", "suspect")
        before, found = (hotspots(store, Window(run_id=run)) for run in ("base", "suspect"))
    assert before.status == "none"
    assert {(spot.kind, spot.subject["id"]) for spot in found.hotspots} == {("affinity", "w0")}
    assert "keeps conversations where they began" in found.hotspots[0].statement
    assert "turns of conversations whose turn before was there too" in " ".join(
        fact.statement for fact in found.hotspots[0].evidence
    )
    assert [cause.cause for cause in verdict.causes][:1] == ["hotspot_affinity"], verdict.verdict


def test_conversations_that_move_are_no_reason(tmp_path: Path) -> None:
    """All of one stretch goes to one worker, whatever conversation it is of."""
    moved = fleet("suspect", 2, is_kept=False)
    for row in moved["route"] + moved["request"]:
        if int(row["request_id"].rpartition("-")[2]) < NUM // 2:
            row["worker" if "worker" in row else "chosen"] = "w0"
    with stored(tmp_path / "s.duckdb", [moved]) as store:
        found = hotspots(store, Window(run_id="suspect"))
    assert "affinity" not in [spot.kind for spot in found.hotspots]
