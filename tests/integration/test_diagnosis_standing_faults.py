"""Faults of a router that both windows have, where something else rose: prompts that are slower at every worker, or more requests.

Four workers, each with one prompt at a time; prompts take 0.1 s of their own. Numbers are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored
from tests.simulate import Rows, ns

NUM = 900


pytestmark = pytest.mark.usefixtures("few_replicates")


def fleet(
    run: str,
    seed: int,
    *,
    rate: float,
    most: float = 0.25,
    prefill_s: float = 0.1,
    slow: Mapping[str, float] | None = None,
    routed: bool = True,
) -> Rows:
    """w0 gets a share `most` of the requests, the others as many each; routes tell a load of 0 for all. slow: factor by worker."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "route": []}
    names, at, free = [f"w{k}" for k in range(4)], 0.0, dict.fromkeys([f"w{k}" for k in range(4)], 0.0)
    for i in range(NUM):
        at += rng.exponential(1 / rate)
        worker = "w0" if rng.random() < most else names[1 + i % 3]
        took = prefill_s * rng.uniform(0.95, 1.05) * (slow or {}).get(worker, 1.0)
        start = max(at, free[worker])
        first = free[worker] = start + took
        output = int(rng.integers(40, 80))
        last = first + (output - 1) * 0.01
        told: dict[str, Any] = {"request_id": f"{run}-{i}", "run_id": run}
        row = {**told, "worker": worker, "vantage": "engine", "state": "finished", "arrival_ns": ns(at)}
        row |= {"first_scheduled_ns": ns(start), "first_token_ns": ns(first), "queue_s": start - at, "prefill_s": took}
        row |= dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), ns(last))
        row |= {"decode_s": last - first, "prompt_tokens": 1000, "cached_tokens": 0, "output_tokens": output}
        rows["request"].append(row)
        if routed:
            candidates = [{"worker": name, "load": 0.0} for name in names]
            route = {**told, "at_ns": ns(at), "router": "r", "policy": "least_load", "chosen": worker}
            rows["route"].append({**route, "candidates": candidates})
    return rows


def verdict_of(folder: Path, base: Rows, suspect: Rows) -> Verdict:
    with stored(folder / "s.duckdb", [base, suspect]) as store:
        return judged(store, "base", "suspect")


def names(verdict: Verdict) -> list[str]:
    return [cause.cause for cause in verdict.causes]


def test_a_dead_signal_that_both_windows_have_owns_no_slower_prefill(tmp_path: Path) -> None:
    """w0 gets 55 % in both windows; prompts take twice as long at every worker, and w0's queue follows from that."""
    base = fleet("base", 1, rate=5.0, most=0.55)
    verdict = verdict_of(tmp_path, base, fleet("suspect", 2, rate=5.0, most=0.55, prefill_s=0.2))
    assert "hotspot_dead_signal" not in names(verdict), verdict.verdict
    told = {each["cause"]: each["because"] for each in verdict.excluded}["hotspot_dead_signal"]
    assert "the baseline has it to the same extent" in told
    assert "at every worker" in told


def test_a_dead_signal_that_began_is_named(tmp_path: Path) -> None:
    """The baseline spreads evenly, and prompts take as long as before."""
    base = fleet("base", 1, rate=5.0)
    verdict = verdict_of(tmp_path, base, fleet("suspect", 2, rate=5.0, most=0.85))
    assert names(verdict)[:1] == ["hotspot_dead_signal"], verdict.verdict


def test_a_worker_that_was_always_slow_is_not_why_more_requests_wait(tmp_path: Path) -> None:
    """w3 takes twice as long in both windows; half as many again come."""
    base = fleet("base", 1, rate=8.0, slow={"w3": 2.0}, routed=False)
    suspect = fleet("suspect", 2, rate=13.0, slow={"w3": 2.0}, routed=False)
    verdict = verdict_of(tmp_path, base, suspect)
    assert "hotspot_straggler" not in names(verdict), verdict.verdict
    said = [evidence["statement"] for cause in verdict.causes for evidence in cause.evidence]
    assert not any("no more requests came" in each for each in said)


def test_a_worker_that_became_slow_is_named_though_more_requests_came(tmp_path: Path) -> None:
    """w3 was as quick as the others; a fifth more requests come."""
    base = fleet("base", 1, rate=6.5, routed=False)
    verdict = verdict_of(tmp_path, base, fleet("suspect", 2, rate=7.8, slow={"w3": 2.5}, routed=False))
    assert names(verdict)[:1] == ["hotspot_straggler"], verdict.verdict
    said = [evidence["statement"] for evidence in verdict.causes[0].evidence]
    assert not any("no more requests came" in each for each in said)
