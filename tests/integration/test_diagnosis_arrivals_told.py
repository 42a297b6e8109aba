"""More requests than before are told, also where what they wait for cannot be seen or has another owner."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis.telling.verdict import Verdict
from tests.diagnosed import judged, stored
from tests.simulate import Rows, Setup, at_level, simulate

USUAL = Setup(num_requests=400, rate=3.0, seats=16)
TWICE = {"rate": 6.0, "num_requests": 600}
"""16 seats of which 6 are taken: below the knee, and prompts are computed beside more answers."""


pytestmark = pytest.mark.usefixtures("few_replicates")


def verdict_of(folder: Path, base: Rows, suspect: Rows) -> Verdict:
    with stored(folder / "s.duckdb", [base, suspect]) as store:
        return judged(store, "base", "suspect")


@pytest.mark.parametrize("is_over", [False, True])
def test_callers_alone_tell_that_arrivals_doubled(tmp_path: Path, is_over: bool) -> None:
    usual, twice = {"seed": 1}, {"seed": 2, **TWICE}
    changes = (twice, usual) if is_over else (usual, twice)
    runs = [
        at_level(simulate(USUAL, name, **each), "client")
        for name, each in zip(("base", "suspect"), changes, strict=True)
    ]
    verdict = verdict_of(tmp_path, *runs)
    assert verdict.status == "not_observable", verdict.verdict
    said = ("fell", "(-50%)") if is_over else ("rose", "(+100%)")
    assert all(f in verdict.verdict for f in (f"arrivals {said[0]} from", said[1], "cannot be seen")), verdict.verdict


def test_as_many_arrivals_are_not_spoken_of(tmp_path: Path) -> None:
    """Prefills got slower where only callers look."""
    base, suspect = simulate(USUAL, "base"), simulate(USUAL, "suspect", seed=2, per_token_s=0.0002)
    verdict = verdict_of(tmp_path, at_level(base, "client"), at_level(suspect, "client"))
    assert verdict.status == "not_observable", verdict.verdict
    assert "arrivals" not in verdict.verdict


def test_longer_answers_do_not_hide_that_more_came(tmp_path: Path) -> None:
    """No answer is as short as one before, and 45 % more are asked for: lengths own the waiting, and that more came is said beside it."""
    base = simulate(USUAL, "base", rate=2.0)
    suspect = simulate(USUAL, "suspect", seed=2, rate=2.9, num_requests=580, output_tokens=(120, 260))
    verdict = verdict_of(tmp_path, base, suspect)
    assert verdict.causes[0].cause == "length_shift", verdict.verdict
    told = " / ".join(evidence["statement"] for evidence in verdict.causes[0].evidence)
    assert "arrivals at each worker grew too, from 1.9" in told
