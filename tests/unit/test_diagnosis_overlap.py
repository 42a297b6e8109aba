"""Steps of which several are in flight take the time from end to end; others stay as they are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from diagnosis.checks.overlap import overlapping_steps
from diagnosis.facts import StepFacts
from diagnosis.loading.workers import step_facts
from store.interface import Window
from tests.diagnosed import stored
from tests.factories import facts, request_facts
from tests.simulate import T0_NS, Rows


def steps_of(folder: Path, *steps: tuple[str, float, float, int]) -> StepFacts:
    """Of rows (worker, end s, duration s, number)."""
    rows: Rows = {
        "step": [
            {"run_id": "a", "worker": worker, "at_ns": T0_NS + round(end * 1e9), "duration_s": took, "step": number}
            for worker, end, took, number in steps
        ]
    }
    with stored(folder / "s.duckdb", [rows]) as store:
        found = step_facts(store, Window(run_id="a"), T0_NS)
    assert found is not None
    return found


def said(steps: StepFacts) -> str | None:
    made = overlapping_steps(facts(request_facts([0.0, 1.0]), steps=steps, name="suspect"))
    return None if made is None else made.statement


def two_in_flight(worker: str, numbers: Sequence[int]) -> list[tuple[str, float, float, int]]:
    """Ten steps that end every 0.1 s, each told as 0.2 s."""
    return [(worker, 0.2 + 0.1 * k, 0.2, number) for k, number in enumerate(numbers)]


def test_a_step_begins_where_the_one_before_it_ended(tmp_path: Path) -> None:
    """The first takes its 0.2 s, the nine after it 0.1 s each: 2.0 s told of 1.1 s. One after a pause keeps its own."""
    found = steps_of(tmp_path, *two_in_flight("w0", range(10)), ("w0", 3.0, 0.2, 10))
    assert found.duration_s.tolist() == pytest.approx([0.2, *[0.1] * 9, 0.2])
    assert found.overlaps == {"w0": pytest.approx(2.2 / 1.3)}
    assert "those of w0 are told to take 1.7 times the time that they cover" in (said(found) or "")


def test_steps_that_follow_each_other_stay_as_they_are_told(tmp_path: Path) -> None:
    """Ends 0.1 s apart and 0.1 s each, two of them 5 ms longer by the clock; another worker's steps are none of theirs."""
    told = [("w0", 0.1 * k, 0.1 + 0.005 * (k in (3, 4)), k) for k in range(1, 9)]
    found = steps_of(tmp_path, *told, *two_in_flight("w1", range(10)))
    assert found.duration_s[:8].tolist() == pytest.approx([took for _, _, took, _ in told])
    assert set(found.overlaps) == {"w1"}


def test_several_schedulers_under_one_name_have_each_their_own_steps(tmp_path: Path) -> None:
    """Two ranks number their steps alike: a step of one does not end the other's."""
    found = steps_of(tmp_path, *two_in_flight("w0", [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]))
    assert np.allclose(found.duration_s, 0.2)
    assert said(found) is None
