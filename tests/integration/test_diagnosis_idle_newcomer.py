"""A worker that is new gets nothing yet from a router that goes by prefix: more than an even share is no hotspot where nobody waits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diagnosis.hotspots.judge import hotspots
from store.interface import Window
from tests.diagnosed import stored
from tests.simulate import Rows, ns

SPAN_S, TOKEN_S, PREFIXES = 60.0, 0.0003, 24


def grown(seed: int, *, rate: float, found: int, hidden: tuple[str, ...] = (), seats: int | None = None) -> Rows:
    """24 prefixes at w0 and w1, and an idle w2. Each prompt is computed as fast as if it were alone; seats: prompts that are at once."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "route": [], "worker": []}
    free = np.zeros((2, seats or 1))
    for i, at in enumerate(np.sort(rng.uniform(0, SPAN_S, int(rate * SPAN_S)))):
        prefix = int(rng.integers(PREFIXES))
        k, prompt = prefix % 2, int(rng.integers(800, 1200))
        seat = int(free[k].argmin())
        begun = at + 0.001 if seats is None else max(at, free[k][seat])
        first = begun + (prompt - found) * TOKEN_S * rng.uniform(0.95, 1.05)
        free[k][seat] = first
        last = first + 0.5 * rng.uniform(0.9, 1.1)
        one = {"request_id": f"r{i}", "run_id": "r"}
        candidates = [{"worker": f"w{j}", "score": float(j == k)} for j in range(3)]
        rows["route"].append(
            {
                **one,
                "at_ns": ns(at) - 1,
                "policy": "prefix",
                "chosen": f"w{k}",
                "prefix_hash": prefix + 1,
                "candidates": candidates,
            }
        )
        row = {**one, "worker": f"w{k}", "vantage": "engine", "state": "finished", "prompt_tokens": prompt}
        row |= {
            "cached_tokens": found,
            "computed_tokens": prompt - found,
            "output_tokens": 40,
            "prefix_hash": prefix + 1,
        }
        row |= {"arrival_ns": ns(at), "first_scheduled_ns": ns(begun), "first_token_ns": ns(first)}
        row |= {"queue_s": begun - at, "prefill_s": first - begun, "decode_s": last - first}
        row |= dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), ns(last))
        rows["request"].append({name: value for name, value in row.items() if name not in hidden})
    rows["worker"] = [{"run_id": "r", "worker": f"w{k}", "at_ns": ns(-1)} for k in range(3)]
    return rows


UNTOLD = ("cached_tokens", "computed_tokens")


@pytest.mark.parametrize(
    ("rate", "found", "hidden"),
    [(10.0, 50, ()), (30.0, 50, ()), (10.0, 600, UNTOLD), (10.0, 600, ("prompt_tokens", *UNTOLD))],
)
def test_where_nobody_lost_time_nothing_is_accused(
    tmp_path: Path, rate: float, found: int, hidden: tuple[str, ...]
) -> None:
    with stored(tmp_path / "s.duckdb", [grown(1, rate=rate, found=found, hidden=hidden)]) as store:
        seen = hotspots(store, Window(run_id="r"))
    assert seen.status == "none", seen.verdict


@pytest.mark.parametrize("hidden", [(), UNTOLD])
def test_those_who_wait_beside_it_have_a_hotspot(tmp_path: Path, hidden: tuple[str, ...]) -> None:
    """One prompt at a time of 0.3 s, and 3.2 a second come to each of two workers: they wait, and the third is idle."""
    with stored(tmp_path / "s.duckdb", [grown(1, rate=6.4, found=0, hidden=hidden, seats=1)]) as store:
        found = hotspots(store, Window(run_id="r"))
    assert {spot.kind for spot in found.hotspots} == {"affinity"}, found.verdict
