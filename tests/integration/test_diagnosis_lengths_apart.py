"""Prompts or answers that are all longer than any before: no two requests can be compared, but steps can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored
from tests.simulate import Rows, Setup, at_level, simulate

USUAL = Setup(num_requests=300, rate=2.5, seats=16)
LONGER = {"tail_tokens": (1800, 2600)}
"""Retrieval of more passages: prompts of 2,600 tokens on average, where 464 were usual; the 384 that are cached stay."""


pytestmark = pytest.mark.usefixtures("few_replicates")


def without_blocks(rows: Rows) -> Rows:
    """What an engine tells of requests and steps that has no events of blocks."""
    requests = [{name: value for name, value in row.items() if name != "prompt_blocks"} for row in rows["request"]]
    return {**rows, "request": requests, "block": []}


def verdict_of(folder: Path, base: Rows, suspect: Rows, metric: str = "ttft") -> Verdict:
    with stored(folder / "s.duckdb", [base, suspect]) as store:
        return judged(store, "base", "suspect", metric)


def names(verdict: Verdict) -> list[str]:
    return [cause.cause for cause in verdict.causes]


def owns(verdict: Verdict, name: str) -> float:
    """Seconds of a row in the change of the mean, as a share of it."""
    return sum(row.mean_s for row in verdict.attribution if row.cause == name) / verdict.delta.mean_s


def test_prompts_that_got_longer_are_told_by_equal_steps(tmp_path: Path) -> None:
    """Next to as many tokens are found as before, so hardly any reuse was lost; the longer rest of the prompts owns the change, at the same pace."""
    base, suspect = simulate(USUAL, "base"), simulate(USUAL, "suspect", seed=2, **LONGER)
    verdict = verdict_of(tmp_path, without_blocks(base), without_blocks(suspect))
    assert (verdict.status, names(verdict)) == ("explained", ["length_shift"]), verdict.verdict
    assert verdict.causes[0].confidence_word == "medium"
    assert abs(owns(verdict, "reuse_lost")) < 0.02
    told = " / ".join(evidence["statement"] for evidence in verdict.causes[0].evidence)
    assert "mean prompt length in the suspect window: 2," in told
    assert "steps with the same work took 100 % of the baseline's time" in told


def test_the_end_of_longer_prompts_is_told_too(tmp_path: Path) -> None:
    base, suspect = simulate(USUAL, "base", **LONGER), simulate(USUAL, "suspect", seed=2)
    verdict = verdict_of(tmp_path, without_blocks(base), without_blocks(suspect))
    assert (verdict.status, names(verdict)) == ("explained", ["length_shift"]), verdict.verdict
    assert verdict.causes[0].ended


def test_answers_that_got_longer_are_told_by_callers_alone(tmp_path: Path) -> None:
    """Tokens come as fast as before at equal concurrency; nobody tells of the engine."""
    base, suspect = simulate(USUAL, "base"), simulate(USUAL, "suspect", seed=2, output_tokens=(120, 260))
    verdict = verdict_of(tmp_path, at_level(base, "client"), at_level(suspect, "client"), "e2e")
    assert names(verdict) == ["length_shift"], verdict.verdict


@pytest.mark.parametrize("fault", [{"slow": 1.6}, {"seats": 4}], ids=["slower steps", "fewer seats"])
def test_another_fault_at_the_same_time_is_not_put_down_to_lengths(tmp_path: Path, fault: dict[str, float]) -> None:
    """Steps got slower, or seats fewer, and answers longer: nobody can say which, and the sentence tells how lengths moved."""
    setup = replace(USUAL, rate=1.5)
    base, suspect = simulate(setup, "base"), simulate(setup, "suspect", seed=2, output_tokens=(120, 260), **fault)
    verdict = verdict_of(tmp_path, without_blocks(base), without_blocks(suspect))
    assert (verdict.status, names(verdict)) == ("not_distinguishable", []), verdict.verdict
    assert "no kind of request in common (mean output length 5" in verdict.verdict


def test_without_sight_of_the_pace_nobody_is_named(tmp_path: Path) -> None:
    """Callers see first tokens alone: longer prompts and a slower engine look alike."""
    base, suspect = simulate(USUAL, "base"), simulate(USUAL, "suspect", seed=2, **LONGER)
    verdict = verdict_of(tmp_path, at_level(base, "client"), at_level(suspect, "client"))
    assert (verdict.status, names(verdict)) == ("not_distinguishable", [])
    assert "mean prompt length 46" in verdict.verdict
