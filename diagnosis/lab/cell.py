"""One cell of the matrix: a run is played, stored in a store of its own, diagnosed and graded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnosis.calibration import listening
from diagnosis.cause import all_causes
from diagnosis.diagnose import diagnose
from diagnosis.facts import Facts
from diagnosis.lab.gauges import gauges
from diagnosis.lab.grade import grade
from diagnosis.lab.lately import Lately
from diagnosis.lab.play import KEPT
from diagnosis.lab.run import BASELINE, SUSPECT, LabRun, Order, run_lab, write_lab
from diagnosis.loading.load import load
from diagnosis.telling.verdict import Verdict
from diagnosis.windows import judged_vantage, vantages
from engine_probe.engine.virtual_clock import EPOCH_NS
from engine_probe.errors import KvscopeError
from engine_probe.wire.validate import validate
from store.interface import Batch, Store, Window
from store.open import open_store

if TYPE_CHECKING:
    import pyarrow as pa

Rows = Mapping[str, "pa.Table"]
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
        told, heard = judged(run)
    except KvscopeError as error:
        return {**found, "outcome": "failed", "why": f"{error.title}: {error.message}", "causes": [], "judgements": []}
    verdict = told.to_dict()
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


def judged(run: LabRun) -> tuple[Verdict, Mapping[str, float]]:
    """The verdict on a run's two windows, and the largest statistic that each threshold was asked about.

    A window's facts follow from its own rows alone, so those of a baseline that runs share are read once.
    """
    base, suspect = Window(run_id=BASELINE), Window(run_id=SUSPECT)
    known = _baselines.of(run.baseline, lambda: _Baseline(run.baseline))

    def read(store: Store, window: Window, name: str, vantage: str) -> Facts:
        return known.facts(vantage)[0] if window == base else load(store, window, name, vantage)

    with _stored(run.suspect) as store, listening() as heard:
        vantage = judged_vantage(known.vantages & vantages(store, suspect))
        if vantage is None:  # there is no verdict, and it says why
            _keep(store, run.baseline)
        verdict = diagnose(store, base, suspect, metric=run.fault.metric, vantage=vantage, now_ns=NOW_NS, load=read)
    told = known.facts(vantage)[1] if vantage else {}
    return verdict, {name: max(each[name] for each in (told, heard) if name in each) for name in {*told, *heard}}


class _Baseline:
    """What several runs are compared with: the vantages that saw it, and its facts."""

    def __init__(self, tables: Rows) -> None:
        self._tables = tables
        self._facts: dict[str, tuple[Facts, Mapping[str, float]]] = {}
        self.vantages = frozenset(tables["request"]["vantage"].unique().to_pylist())

    def facts(self, vantage: str) -> tuple[Facts, Mapping[str, float]]:
        """As seen from there, and what thresholds were asked about while they were read."""
        if vantage not in self._facts:
            with _stored(self._tables) as store, listening() as asked:
                self._facts[vantage] = load(store, Window(run_id=BASELINE), BASELINE, vantage), asked
        return self._facts[vantage]


_baselines: Lately[Rows, _Baseline] = Lately(KEPT, is_)


def forget() -> None:
    """Every baseline is read again."""
    _baselines.clear()


@contextmanager
def _stored(tables: Rows) -> Iterator[Store]:
    """One window's rows in a store of its own: the same tables and SQL as a file, and nothing to sync."""
    with open_store(":memory:", max_threads=1) as store:
        _keep(store, tables)
        yield store


def _keep(store: Store, tables: Rows) -> None:
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
