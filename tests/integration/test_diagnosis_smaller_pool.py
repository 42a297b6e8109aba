"""A KV pool that came back smaller, told by the workers' own rows: no step, no event, no counter and no gauge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.test_diagnosis_reports_of_engines import names, verdict_of
from tests.simulate import Rows, Setup, simulate

LARGE = Setup(num_requests=300, output_tokens=(40, 80), rate=3.0, caching=False, fixed_s=0.02)
HIDDEN = ("prompt_blocks", "num_preemptions", "stalled_s", "recomputed_tokens", "token_ns", "token_counts")


pytestmark = pytest.mark.usefixtures("few_replicates")


def blind(rows: Rows) -> Rows:
    told = [{name: value for name, value in row.items() if name not in HIDDEN} for row in rows["request"]]
    return {"request": told, "worker": rows["worker"]}


@pytest.mark.parametrize("num_blocks", [200, 150])
def test_a_pool_for_five_requests_is_named(tmp_path: Path, num_blocks: int) -> None:
    """4,000 blocks become 200, and a request wants 28 to 38: the queue grows from nothing while 32 seats are there."""
    suspect = simulate(replace(LARGE, num_blocks=num_blocks), "suspect", seed=2)
    verdict = verdict_of(tmp_path, blind(simulate(LARGE, "base")), blind(suspect))
    assert (verdict.status, names(verdict)) == ("explained", ["admission_blocked_on_blocks"]), verdict.verdict
    assert verdict.causes[0].confidence_word == "medium"


@pytest.mark.parametrize(("rate", "slow"), [(6.5, 1.0), (3.0, 2.0), (3.0, 1.0)])
def test_a_smaller_pool_that_has_room_is_no_reason(tmp_path: Path, rate: float, slow: float) -> None:
    """1,000 blocks hold them all; more requests, or slower steps, are what they are."""
    suspect = simulate(replace(LARGE, num_blocks=1000), "suspect", seed=2, rate=rate, slow=slow)
    verdict = verdict_of(tmp_path, blind(simulate(LARGE, "base")), blind(suspect))
    assert "admission_blocked_on_blocks" not in names(verdict), verdict.verdict


def test_a_kv_type_of_more_bytes_is_no_pool(tmp_path: Path) -> None:
    """Nobody tells the blocks that it leaves, and the steps are twice as long: which of the two made the queue cannot be told."""
    parts = [simulate(LARGE, "base"), simulate(LARGE, "suspect", seed=2, slow=2.0)]
    for rows, kind in zip(parts, ("fp8", "auto"), strict=True):
        for row in rows["worker"]:
            del row["num_blocks"]
            row["flags"] = {**row["flags"], "kv_cache_dtype": kind}
    assert "admission_blocked_on_blocks" not in names(verdict_of(tmp_path, *map(blind, parts)))
