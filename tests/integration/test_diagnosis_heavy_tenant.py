"""Consistent hashing and a tenant that grows: who waits at its worker while others are idle waits for the hotspot, not for the mix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.diagnosed import judged, stored
from tests.simulate import Rows, ns

WORKERS, SEATS, SERVED_S, SPAN_S, NUM, TENANTS = 4, 4, 1.0, 60.0, 600, 40
"""Four workers of 4 seats could serve 16 requests a second; 10 come."""


pytestmark = pytest.mark.usefixtures("few_replicates")


def fleet(run: str, seed: int, heavy: float) -> Rows:
    """Each tenant has its worker; `heavy`: share of the requests that are of one tenant. Prompts are short, answers hold the seats."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "route": [], "worker": []}
    seats = np.zeros((WORKERS, SEATS))
    for i, at in enumerate(np.sort(rng.uniform(0, SPAN_S, NUM))):
        tenant = 0 if rng.uniform() < heavy else int(rng.integers(1, TENANTS))
        k = tenant % WORKERS
        seat = int(seats[k].argmin())
        begun = max(at, seats[k][seat])
        first = begun + 0.05 * rng.uniform(0.95, 1.05)
        last = first + SERVED_S * rng.uniform(0.95, 1.05)
        seats[k][seat] = last
        one = {"request_id": f"{run}-{i}", "run_id": run}
        candidates = [{"worker": f"w{j}"} for j in range(WORKERS)]
        route = {**one, "at_ns": ns(at) - 1, "policy": "consistent_hash", "chosen": f"w{k}", "candidates": candidates}
        rows["route"].append(route)
        row = {**one, "worker": f"w{k}", "tenant": f"t{tenant}", "vantage": "engine", "state": "finished"}
        row |= {"prompt_tokens": 500, "cached_tokens": 0, "computed_tokens": 500, "output_tokens": 40}
        row |= {"arrival_ns": ns(at), "first_scheduled_ns": ns(begun), "first_token_ns": ns(first)}
        row |= {"queue_s": begun - at, "prefill_s": first - begun, "decode_s": last - first}
        rows["request"].append({**row, **dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), ns(last))})
    for k in range(WORKERS):
        facts = {"run_id": run, "worker": f"w{k}", "at_ns": ns(-1), "flags": {"max_num_seqs": str(SEATS)}}
        rows["worker"].append(facts)
    return rows


@pytest.mark.parametrize("heavy", [0.3, 0.5])
def test_those_who_wait_at_the_hot_worker_belong_to_the_hotspot(tmp_path: Path, heavy: float) -> None:
    with stored(tmp_path / "s.duckdb", [fleet("base", 1, 0.03), fleet("suspect", 2, heavy)]) as store:
        verdict = judged(store, "base", "suspect")
    assert [cause.cause for cause in verdict.causes] == ["hotspot_affinity", "mix_shift"], verdict.verdict
    assert verdict.causes[0].subject == {"kind": "worker", "id": "w0"}
    seconds = {row.cause: row.mean_s for row in verdict.attribution}
    assert seconds["hotspot_affinity"] > 2 * seconds["mix_shift"]
    assert abs(seconds.get("queue_seats", 0.0)) < 0.1 * seconds["hotspot_affinity"]


def test_one_mix_has_no_hotspot(tmp_path: Path) -> None:
    with stored(tmp_path / "s.duckdb", [fleet("base", 1, 0.03), fleet("suspect", 2, 0.03)]) as store:
        verdict = judged(store, "base", "suspect")
    assert [cause.cause for cause in verdict.causes] == [], verdict.verdict
