"""Decode steps that take longer because contexts are longer: as many sequences are not as much work, and no machine is accused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored
from tests.simulate import Rows, Setup, simulate

SETUP = Setup(
    num_requests=400,
    rate=1.5,
    prefix_tokens=64,
    tail_tokens=(100, 6000),
    output_tokens=(60, 120),
    num_blocks=40_000,
    per_token_s=0.00001,
    per_context_s=2e-6,
)
"""Keys and values of a context of 3,000 tokens take 6 ms a step to read, the rest of a step 11 ms."""
LONGER = {"tail_tokens": (3000, 12_000)}
"""Half of the prompts are as long as some before, and the mean is 2.4 times as long."""


pytestmark = pytest.mark.usefixtures("few_replicates")


def told(rows: Rows, what: str) -> Rows:
    """steps: requests, their token instants and steps; gaps: without steps; means: nor token instants."""
    hidden = {"prompt_blocks"} | ({"token_ns"} if what == "means" else set())
    requests = [{name: value for name, value in row.items() if name not in hidden} for row in rows["request"]]
    return {"request": requests, "worker": rows["worker"], **({"step": rows["step"]} if what == "steps" else {})}


def verdict_of(folder: Path, what: str, setup: Setup = SETUP, **changes: Any) -> Verdict:
    runs = [told(simulate(setup, "base"), what), told(simulate(setup, "suspect", seed=2, **changes), what)]
    with stored(folder / "s.duckdb", runs) as store:
        return judged(store, "base", "suspect", "tpot")


@pytest.mark.parametrize("what", ["steps", "gaps", "means"])
def test_longer_contexts_are_no_slower_machine(tmp_path: Path, what: str) -> None:
    verdict = verdict_of(tmp_path, what, **LONGER)
    assert verdict.delta.mean_s > 0
    assert "slow_steps" not in [cause.cause for cause in verdict.causes], verdict.verdict


def test_a_machine_that_is_slower_by_more_than_contexts_grew_is_found(tmp_path: Path) -> None:
    """Contexts grew to 2.4 times; steps four times as slow take longer than that can explain."""
    verdict = verdict_of(tmp_path, "steps", replace(SETUP, rate=0.3, num_requests=250), slow=4.0, **LONGER)
    assert "slow_steps" in [cause.cause for cause in verdict.causes], verdict.verdict


@pytest.mark.parametrize("what", ["steps", "means"])
def test_a_slower_machine_at_equal_contexts_is_found(tmp_path: Path, what: str) -> None:
    verdict = verdict_of(tmp_path, what, slow=1.4)
    assert [cause.cause for cause in verdict.causes][:1] == ["slow_steps"], verdict.verdict
