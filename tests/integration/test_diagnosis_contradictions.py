"""Contradictions from events to verdict: the lab's lying counter and skewed clock at every severity, and counters that look the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diagnosis.diagnose import diagnose
from diagnosis.lab.grade import grade
from diagnosis.lab.observed import observe
from diagnosis.lab.run import BASELINE, SUSPECT, LabRun, Order, run_lab
from engine_probe.engine.virtual_clock import EPOCH_NS
from store.interface import Batch, Store, Window
from store.open import open_store
from tests.diagnosed import judged, stored
from tests.simulate import Rows, Setup, simulate

NOW_NS = EPOCH_NS + 30 * 86_400 * 10**9
QUERIES, HITS = "prefix_queries_tokens_total", "prefix_hits_tokens_total"


pytestmark = pytest.mark.usefixtures("few_replicates")


@cache
def played(fault: str, severity: str) -> LabRun:
    return run_lab(Order(fault, severity, seed=4, requests=300))


def kept(folder: Path, run: LabRun, how: str) -> Store:
    store = open_store(str(folder / "store.duckdb"))
    for rows in (run.baseline, run.suspect):
        store.append(Batch(observe(rows, how)), timeout_s=120)
    return store


@pytest.mark.parametrize(
    ("fault", "severity", "how"),
    [
        ("telemetry_contradiction", "typical", "full"),
        ("telemetry_contradiction", "typical", "otlp"),
        ("clock_skew", "mild", "full"),
        ("clock_skew", "typical", "full"),
        ("clock_skew", "strong", "full"),
    ],
)
def test_what_is_told_wrong_is_named_at_every_severity(fault: str, severity: str, how: str, tmp_path: Path) -> None:
    """It is the only cause, no latency is said to have changed, and the SQL of its evidence gives the number."""
    run = played(fault, severity)
    store = kept(tmp_path, run, how)
    try:
        verdict = diagnose(store, Window(run_id=BASELINE), Window(run_id=SUSPECT), now_ns=NOW_NS)
        assert [cause.cause for cause in verdict.causes] == [fault]
        assert verdict.status == "no_change"
        assert grade(run.fault, run.truth, verdict.to_dict()).outcome == "right"
        told = [each for cause in verdict.causes for each in cause.evidence if each["sql"] is not None]
        assert told
        for evidence in told:
            found = store.query(evidence["sql"]).column(0)[0].as_py()
            assert float(found) == pytest.approx(evidence["value"], rel=1e-6, abs=1e-9), evidence["sql"]
        if fault == "clock_skew":
            assert verdict.causes[0].subject == {"kind": "worker", "id": "w2"}
            assert verdict.causes[0].evidence[0]["value"] == pytest.approx(run.truth["severity"]["value"], abs=0.005)
    finally:
        store.close()


def counted(rows: Rows, **totals: float) -> Rows:
    """The rows with these counters in place of what they counted: from 0 to the total over the run."""
    samples = [row for row in rows["sample"] if row["name"] not in totals]
    series = [row for row in rows["sample"] if row["name"] == HITS]
    for name, total in totals.items():
        samples += [{**row, "name": name, "value": total * k / max(len(series) - 1, 1)} for k, row in enumerate(series)]
    return {**rows, "sample": samples}


@pytest.mark.parametrize("says", ["requests", "steps"])
def test_identical_counters_and_opposite_truth_get_opposite_answers(says: str, tmp_path: Path) -> None:
    """Both suspects count 0 hits of 50,000 looked-up tokens. In one no two prompts share anything, and that is so; in the other three
    quarters of every prompt came from the cache: the requests say so, or the steps alone. One counter is believed, the other is not."""
    setup = Setup(num_requests=150, output_tokens=(8, 16))
    same: dict[str, Any] = {QUERIES: 50_000.0, HITS: 0.0}
    honest = simulate(setup, "honest", prefix_tokens=0, groups=1, tail_tokens=(400, 500))
    lying = simulate(setup, "lying")
    base = simulate(setup, "base", seed=2)
    made = [base, counted(honest, **same), counted(lying, **same)]
    if says == "steps":
        for rows in made:
            for row in rows["request"]:
                row.update(cached_tokens=None, computed_tokens=None, prompt_blocks=None)
            rows["block"] = []
    store = stored(tmp_path / "store.duckdb", made)
    try:
        answers = {name: judged(store, "base", name) for name in ("honest", "lying")}
    finally:
        store.close()
    checks = {
        name: {
            row["status"]
            for row in verdict.quality
            if row["statement"].startswith(f"{name}:") and row["check"] in ("cached_tokens", "hit_counter")
        }
        for name, verdict in answers.items()
    }
    assert checks == {"honest": {"ok"}, "lying": {"contradiction"}}
    named = {name: [cause.cause for cause in verdict.causes] for name, verdict in answers.items()}
    assert "telemetry_contradiction" in named["lying"]
    assert "telemetry_contradiction" not in named["honest"]
