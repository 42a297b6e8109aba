"""A fleet that got a little more load, and one worker of it whose look-ups wait: what waits there is not the load's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.test_diagnosis_reports_of_engines import names, served, verdict_of
from tests.simulate import Rows

pytestmark = pytest.mark.usefixtures("few_replicates")


def fleet(run: str, seed: int, rates: tuple[float, ...], *, locked: tuple[int, ...] = ()) -> Rows:
    """Four workers with 300 requests each; three look-ups in five of those that are locked wait 0.3 s in the mean."""
    out: Rows = {"request": []}
    for k, rate in enumerate(rates):
        rng = np.random.default_rng(7 * seed + k)

        def told(_: int, __: float, k: int = k, rng: np.random.Generator = rng) -> dict[str, Any]:
            lookup = 0.002 + (rng.exponential(0.3) if k in locked and rng.random() < 0.6 else 0.0)
            return {"worker": f"w{k}", "cache_lookup_s": lookup, "extra_s": lookup}

        rows = served(run, seed + k, told=told, rate=rate)["request"]
        out["request"] += [{**row, "request_id": f"{row['request_id']}-{k}"} for row in rows]
    return out


@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_what_waits_at_one_worker_is_not_the_fleet_s_load(tmp_path: Path, rate: float) -> None:
    """A fifth more for all four; three of them wait 2 ms longer, and the locked one a quarter of a second."""
    base, suspect = fleet("base", 100, (rate,) * 4), fleet("suspect", 11, (1.2 * rate,) * 4, locked=(1,))
    verdict = verdict_of(tmp_path, base, suspect)
    assert (verdict.status, names(verdict)) == ("explained", ["cache_lock_contention"]), verdict.verdict
    assert verdict.causes[0].subject == {"kind": "worker", "id": "w1"}


def test_where_all_wait_longer_the_load_is_a_reason(tmp_path: Path) -> None:
    """1.4 times the load near what a worker can serve, and nothing else changed."""
    base, suspect = fleet("base", 100, (7.0,) * 4), fleet("suspect", 11, (9.8,) * 4)
    assert names(verdict_of(tmp_path, base, suspect)) == ["load_step"]


def test_several_times_the_load_is_a_reason_beside_a_lock(tmp_path: Path) -> None:
    """Twice the load at the locked worker too: without it, the lock would cost half as much."""
    base, suspect = fleet("base", 100, (2.0,) * 4), fleet("suspect", 11, (4.0,) * 4, locked=(1,))
    assert {"load_step", "cache_lock_contention"} <= set(names(verdict_of(tmp_path, base, suspect)))
