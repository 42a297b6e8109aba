"""Time between a caller and an engine, by the way: what is held in front of the engine, behind it, and what could be either.

Rows are those of `test_diagnosis_reports_of_engines.py`, each request told by the engine and by its caller.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diagnosis.telling.verdict import Verdict
from tests.integration.test_diagnosis_reports_of_engines import Columns, names, served, verdict_of
from tests.simulate import Rows

INSTANTS = ("first_token_ns", "last_token_ns", "end_ns", "at_ns")
SEEN = ("request_id", "run_id", "state", "worker", "arrival_ns", *INSTANTS, "prompt_tokens", "output_tokens")
Held = Callable[[np.random.Generator, int], float]


pytestmark = pytest.mark.usefixtures("few_replicates")


def nothing(_: np.random.Generator, __: int) -> float:
    return 0.001


def around(mean_s: float) -> Held:
    """Half of the mean at least, and up to half as much more."""
    return lambda rng, _: mean_s * rng.uniform(0.5, 1.5)


def seen_twice(
    run: str, seed: int, *, before: Held = nothing, behind: Held = nothing, ahead_s: float = 0.0, workers: int = 1
) -> Rows:
    """Each request `before` s on its way into the engine, whose clock is `ahead_s` ahead, and its tokens `behind` s on their way back."""
    rng, rows = np.random.default_rng(seed), served(run, seed, told=lambda _, __: Columns())
    callers = []
    for i, row in enumerate(rows["request"]):
        row["worker"] = f"w{i % workers}"
        caller = {name: row[name] for name in SEEN} | {"vantage": "client"}
        caller["arrival_ns"] -= round(before(rng, i) * 1e9)
        late_ns = round(behind(rng, i) * 1e9)
        callers.append(caller | {name: row[name] + late_ns for name in INSTANTS})
        for name in ("arrival_ns", "first_scheduled_ns", *INSTANTS):
            row[name] += round(ahead_s * 1e9)
    rows["request"] += callers
    return rows


def mean_s(verdict: Verdict) -> dict[str, float]:
    return {row.cause: row.mean_s for row in verdict.attribution}


@pytest.mark.parametrize("ahead_s", [0.0, 0.02, 40.0], ids=["one clock", "20 ms ahead", "40 s ahead"])
def test_tokens_that_are_held_back_are_nobodys_front_end(tmp_path: Path, ahead_s: float) -> None:
    """0.15 to 0.45 s from the engine's first token to its caller's, and requests reach the engine as before, whatever its clock says."""
    suspect = seen_twice("suspect", 2, behind=around(0.3), ahead_s=ahead_s)
    verdict = verdict_of(tmp_path, seen_twice("base", 1, ahead_s=ahead_s), suspect)
    assert verdict.status == "not_observable"
    assert "front_end" not in names(verdict), verdict.verdict
    assert mean_s(verdict)["behind_engine"] == pytest.approx(0.3, abs=0.01)
    assert verdict.verdict.startswith("Behind the engine: ")
    assert "behind the engine, between its first token and the caller's" in verdict.verdict


def test_requests_that_wait_on_their_way_in_are_the_front_ends(tmp_path: Path) -> None:
    """The same seconds before the engine has the request."""
    verdict = verdict_of(tmp_path, seen_twice("base", 1), seen_twice("suspect", 2, before=around(0.3)))
    assert names(verdict) == ["front_end"], verdict.verdict
    assert mean_s(verdict)["front_end"] == pytest.approx(0.3, abs=0.01)
    assert verdict.verdict.startswith("Before the engine: ")


def test_the_one_worker_whose_tokens_come_late_is_told(tmp_path: Path) -> None:
    """Of four workers' requests those of w2 come 0.15 to 0.45 s late."""

    def late(rng: np.random.Generator, i: int) -> float:
        return 0.3 * rng.uniform(0.5, 1.5) if i % 4 == 2 else 0.001

    verdict = verdict_of(
        tmp_path, seen_twice("base", 1, workers=4), seen_twice("suspect", 2, behind=late, workers=4), metric="ttft"
    )
    assert (verdict.status, names(verdict)) == ("not_observable", []), verdict.verdict
    assert "(requests of w2)" in verdict.verdict


def test_where_both_least_ways_moved_neither_is_blamed(tmp_path: Path) -> None:
    """150 ms more on each way, and the engine's clock is set by 50 ms: by the data it may have been 200 and 100, or any other two."""

    def far(_: np.random.Generator, __: int) -> float:
        return 0.151

    suspect = seen_twice("suspect", 2, before=far, behind=lambda rng, _: 0.151 + rng.exponential(0.02), ahead_s=0.05)
    verdict = verdict_of(tmp_path, seen_twice("base", 1), suspect)
    rows = mean_s(verdict)
    assert rows["either_way"] == pytest.approx(0.3, abs=0.005)
    assert rows["behind_engine"] == pytest.approx(0.02, abs=0.005)
    assert abs(rows.get("front_end", 0.0)) < 0.002
    assert "front_end" not in names(verdict)


def test_a_clock_that_is_set_moves_no_second(tmp_path: Path) -> None:
    """The engine's clock is half a second ahead in the suspect window alone, and nothing else differs."""
    verdict = verdict_of(tmp_path, seen_twice("base", 1), seen_twice("suspect", 2, ahead_s=0.5))
    assert not {"front_end"} & set(names(verdict)), verdict.verdict
    rows = mean_s(verdict)
    assert max(abs(rows.get(name, 0.0)) for name in ("front_end", "behind_engine", "either_way")) < 0.001


def test_a_clock_that_is_set_within_the_window_tells_no_way(tmp_path: Path) -> None:
    """It jumps half a second in the middle, and tokens are held back all along: between caller and engine is all that stays true."""
    suspect = seen_twice("suspect", 2, behind=around(0.3))
    for row in [row for row in suspect["request"] if row["vantage"] == "engine"][150:]:
        for name in ("arrival_ns", "first_scheduled_ns", *INSTANTS):
            row[name] += 500_000_000
    verdict = verdict_of(tmp_path, seen_twice("base", 1), suspect)
    assert "front_end" not in names(verdict), verdict.verdict
    rows = mean_s(verdict)
    assert rows["either_way"] == pytest.approx(0.3, abs=0.01)
    assert abs(rows.get("behind_engine", 0.0)) + abs(rows.get("front_end", 0.0)) < 0.002
