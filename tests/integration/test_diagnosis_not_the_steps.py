"""Steps that seem slower: told while several are in flight, or compared beside requests that nobody recorded.

One request at a time, 20 ms a token. Numbers are ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnosis.telling.verdict import NamedCause, Verdict
from tests.diagnosed import judged, stored
from tests.simulate import Rows, ns

NUM = 300
STEP_S = 0.02


pytestmark = pytest.mark.usefixtures("few_replicates")


def served(run: str, seed: int, *, front_s: float, in_flight: float, step_s: float = STEP_S) -> Rows:
    """Requests by the engine, and their steps: each told as `in_flight` times what it takes from end to end."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "step": []}
    at, number = 0.0, 0
    for i in range(NUM):
        at += 2.5
        start = at + front_s * rng.uniform(0.9, 1.1)
        first, output = start + 0.1, int(rng.integers(40, 80))
        told = {"run_id": run, "worker": "w0"}
        for j in range(output):
            end = first + j * step_s * rng.uniform(0.999, 1.001)
            work = {"prefill_tokens": 0, "decode_tokens": 1} if j else {"prefill_tokens": 1000, "decode_tokens": 0}
            duration = in_flight * (step_s if j else 0.1)
            rows["step"].append(
                {**told, "at_ns": ns(end), "step": number, "duration_s": duration, "num_running": 1, **work}
            )
            number += 1
        row = {**told, "request_id": f"{run}-{i}", "vantage": "engine", "state": "finished", "arrival_ns": ns(at)}
        row |= {"first_scheduled_ns": ns(start), "first_token_ns": ns(first), "frontend_s": start - at, "queue_s": 0.0}
        row |= dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), ns(end))
        row |= {"prefill_s": 0.1, "decode_s": end - first, "prompt_tokens": 1000, "cached_tokens": 0}
        rows["request"].append({**row, "output_tokens": output})
    return rows


def streamed(run: str, seed: int, *, gap_s: float, finished: int | None = None, running: float | None = None) -> Rows:
    """Requests by callers who know their worker, and what the engine counts."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": [], "sample": []}
    told = {"run_id": run, "worker": "w0"}
    for i in range(NUM):
        at, output = 2.5 * i, int(rng.integers(40, 80))
        first = at + 0.2 * rng.uniform(0.9, 1.1)
        tokens = [ns(first + j * gap_s * rng.uniform(0.999, 1.001)) for j in range(output)]
        row = {**told, "request_id": f"{run}-{i}", "vantage": "client", "state": "finished", "arrival_ns": ns(at)}
        row |= {"first_token_ns": tokens[0], "token_ns": tokens, "prompt_tokens": 1000, "output_tokens": output}
        rows["request"].append(row | dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), tokens[-1]))
    counted = {"requests_finished_total": finished, "requests_running": running}
    for name, value in counted.items():
        for share in np.linspace(0.0, 1.0, 11).tolist() if value is not None else ():
            known = float(value or 0.0) * (share if name.endswith("_total") else 1.0)
            rows["sample"].append({**told, "at_ns": ns(2.5 * NUM * share), "name": name, "value": known})
    return rows


def verdict_of(folder: Path, base: Rows, suspect: Rows, metric: str) -> Verdict:
    with stored(folder / "s.duckdb", [base, suspect]) as store:
        return judged(store, "base", "suspect", metric)


def names(verdict: Verdict) -> list[str]:
    return [cause.cause for cause in verdict.causes]


def test_steps_of_which_two_are_in_flight_are_no_slower(tmp_path: Path) -> None:
    """Durations sum to twice the time that they cover, tokens come as before; 0.3 s more before the engine."""
    base = served("base", 1, front_s=0.003, in_flight=1.0)
    verdict = verdict_of(tmp_path, base, served("suspect", 2, front_s=0.3, in_flight=2.0), "e2e")
    assert names(verdict) == ["front_end"], verdict.verdict
    assert {row.cause: row.mean_s for row in verdict.attribution}.get("slow_steps", 0.0) == pytest.approx(0.0, abs=0.01)


def test_steps_that_overlap_are_still_compared(tmp_path: Path) -> None:
    """Two in flight in both windows, and tokens come half as often."""
    base = served("base", 1, front_s=0.003, in_flight=2.0)
    slower = served("suspect", 2, front_s=0.003, in_flight=2.0, step_s=1.5 * STEP_S)
    verdict = verdict_of(tmp_path, base, slower, "e2e")
    assert names(verdict) == ["slow_steps"], verdict.verdict
    assert verdict.calibration["slow_factor"] == pytest.approx(1.5, abs=0.02)


def slower_beside(folder: Path, *, finished: int | None = None, running: float | None = None) -> NamedCause:
    """The cause of 20 -> 34 ms a token where the engine counts this in the suspect window; in the baseline it counts what is recorded."""
    usual_finished, usual_running = None if finished is None else NUM, None if running is None else 0.5
    base = streamed("base", 1, gap_s=0.02, finished=usual_finished, running=usual_running)
    suspect = streamed("suspect", 2, gap_s=0.034, finished=finished, running=running)
    verdict = verdict_of(folder, base, suspect, "tpot")
    assert names(verdict) == ["slow_steps"], verdict.verdict
    return verdict.causes[0]


@pytest.mark.parametrize("engine", [{"finished": 5 * NUM}, {"running": 8.0}], ids=["counter", "gauge"])
def test_gaps_beside_requests_that_nobody_recorded_are_a_guess(tmp_path: Path, engine: dict[str, Any]) -> None:
    """The engine finished five times what is recorded, or runs eight at once: fuller batches look the same."""
    cause = slower_beside(tmp_path, **engine)
    assert cause.confidence_word == "low"
    said = [evidence["statement"] for evidence in cause.evidence]
    assert any("batches that others fill look the same" in each for each in said)
    assert not any("at equal batch size" in each for each in said)


def test_gaps_are_sure_where_the_engine_counts_the_recorded_requests(tmp_path: Path) -> None:
    """As many finished as are recorded: the batch is known, and the machine is slower. Without any count that is less sure."""
    told = slower_beside(tmp_path, finished=NUM)
    (tmp_path / "untold").mkdir()
    untold = slower_beside(tmp_path / "untold")
    assert any("at equal batch size" in evidence["statement"] for evidence in told.evidence)
    assert (told.certainty or 0.0) > 0.8 > (untold.certainty or 0.0)


def crowded(run: str, seed: int, *, kept: float, wait_s: float) -> Rows:
    """Ten requests a second by callers, more and fewer at once in turn and tokens slower with it; `kept`: share that is recorded."""
    rng = np.random.default_rng(seed)
    rows: Rows = {"request": []}
    at = 0.0
    for i in range(10 * NUM):
        swing = 1.0 + 0.5 * np.sin(at / 40.0)
        at += rng.exponential(0.1 / swing)
        if rng.random() >= kept:
            continue
        output = int(rng.integers(60, 80))
        first = at + (0.2 + wait_s) * rng.uniform(0.9, 1.1)
        tokens = [ns(first + j * 0.018 * (0.5 + 0.5 * swing)) for j in range(output)]
        row: dict[str, Any] = {
            "run_id": run,
            "worker": "w0",
            "request_id": f"{run}-{i}",
            "vantage": "client",
            "state": "finished",
        }
        row |= {"arrival_ns": ns(at), "first_token_ns": tokens[0], "token_ns": tokens, "prompt_tokens": 1000}
        row |= {"output_tokens": output}
        rows["request"].append(row | dict.fromkeys(("last_token_ns", "end_ns", "at_ns"), tokens[-1]))
    return rows


def test_a_sample_that_nobody_tells_of_is_no_slower_machine(tmp_path: Path) -> None:
    """A fifth of the callers' rows in the suspect window, and first tokens 0.3 s later: fewer at once by the rows, at the same pace."""
    base = crowded("base", 1, kept=1.0, wait_s=0.0)
    verdict = verdict_of(tmp_path, base, crowded("suspect", 2, kept=0.2, wait_s=0.3), "e2e")
    assert "slow_steps" not in names(verdict), verdict.verdict
    told = {each["cause"]: each["because"] for each in verdict.excluded}["slow_steps"]
    assert "requests did not decode slower by as much" in told
