"""One cell of the matrix: a run is played, stored in a store of its own, diagnosed and graded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnosis.calibration import listening
from diagnosis.cause import all_causes
from diagnosis.diagnose import diagnose
from diagnosis.lab.gauges import gauges
from diagnosis.lab.grade import grade
from diagnosis.lab.run import BASELINE, SUSPECT, LabRun, Order, run_lab, write_lab
from engine_probe.engine.virtual_clock import EPOCH_NS
from engine_probe.errors import KvscopeError
from engine_probe.validate import validate
from store.interface import Batch, Store, Window
from store.open import open_store

if TYPE_CHECKING:
    import pyarrow as pa

NOW_NS = EPOCH_NS + 30 * 86_400 * 10**9
"""Of a diagnosis of virtual runs: later than all of them, and the same at every run."""
SHOWN = ("cause", "subject", "share_p99", "p99_s", "mean_s", "confidence", "certainty")


def run_cell(order: Order, keep: Path | None = None) -> dict[str, Any]:
    """The graded result as a plain document. keep: a folder for the rows (None: they are thrown away).

    What cannot be judged at all (a defect of ours) is a result too: outcome `failed`, with the error.
    """
    begun = time.perf_counter()
    run = run_lab(order)
    if keep is not None:
        write_lab(run, keep)
    played = time.perf_counter()
    found: dict[str, Any] = {
        "key": order.key(),
        **asdict(order),
        "family": run.fault.family,
        "metric": run.fault.metric,
        "expected": list(run.fault.expected.causes),
        "is_silent": run.fault.expected.is_silent,
        "has_cause": any(name in all_causes() for name in run.fault.expected.causes),
        "truth": _shown_truth(run),
        "gauges": {BASELINE: gauges(run.baseline), SUSPECT: gauges(run.suspect)},
    }
    try:
        with listening() as heard:
            verdict = judged(run)
    except KvscopeError as error:
        return {**found, "outcome": "failed", "why": f"{error.title}: {error.message}", "causes": [], "judgements": []}
    graded = grade(run.fault, run.truth, verdict)
    return {
        **found,
        **asdict(graded),
        "status": verdict["status"],
        "carried_by": verdict["carried_by"] if verdict["carried_by"] == "mean" else verdict["quantile"],
        "unexplained": unexplained(verdict),
        "noted": {name: float(f"{value:.6g}") for name, value in sorted(heard.items())},
        "verdict": verdict["verdict"],
        "causes": [{name: cause[name] for name in SHOWN} for cause in verdict["causes"]],
        "quality": sorted({row["check"] for row in verdict["quality"] if row["status"] != "ok"}),
        "rows": {kind: table.num_rows for kind, table in run.suspect.items()},
        "play_s": round(played - begun, 2),
        "judge_s": round(time.perf_counter() - played, 2),
    }


def judged(run: LabRun) -> dict[str, Any]:
    """The verdict on a run's two windows, as a document."""
    with open_store(":memory:") as store:  # the same tables and SQL as a file, and nothing to sync
        _keep(store, run.baseline)
        _keep(store, run.suspect)
        verdict = diagnose(
            store,
            Window(run_id=BASELINE),
            Window(run_id=SUSPECT),
            metric=run.fault.metric,
            now_ns=NOW_NS,
        )
        return verdict.to_dict()


def _keep(store: Store, tables: Mapping[str, pa.Table]) -> None:
    """As an import would: judged by the contract, then stored."""
    for kind, table in tables.items():
        validate(kind, table, NOW_NS)
    store.append(Batch(tables), timeout_s=120)


def unexplained(verdict: Mapping[str, Any]) -> float | None:
    """Share of the change that carries the verdict that no named cause owns; None where nobody is named or nothing moved."""
    name = "mean_s" if verdict["carried_by"] == "mean" else "judged_s"
    moved = verdict["delta"][name]["value"]
    return verdict["unexplained"][name] / moved if verdict["causes"] and moved else None


def _shown_truth(run: LabRun) -> dict[str, Any]:
    metric = run.fault.metric
    return {
        name: {key: told[metric][key] for key in ("mean_s", "p99_s")}
        | {"p99_without_s": told[metric]["without"]["p99_s"]}
        for name, told in run.truth["attribution"].items()
        if metric in told
    }
