"""Hotspots and hand-overs are found where the lab injects them: events -> store -> diagnose, the SQL of the evidence gives the numbers.

As `test_diagnosis_lab_causes.py`, for what lies between workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache

import pytest

from diagnosis.diagnose import diagnose
from diagnosis.lab.run import LabRun, Order, run_lab
from diagnosis.telling.verdict import Verdict
from store.interface import Batch, Store, Window
from store.open import open_store

SEVERITY = {
    "hotspot_affinity": "strong",
    "hotspot_straggler": "strong",
    "hotspot_dead_signal": "typical",
    "hotspot_tie_breaking": "strong",
    "hotspot_stale_index": "strong",
    "hotspot_unreachable_threshold": "typical",
    "transfer_wire": "typical",
    "transfer_orchestration": "typical",
    "transfer_failures": "typical",
    "decode_block_shortage": "typical",
    "prefill_backlog": "typical",
    "decode_backlog": "strong",
}
"""Fault, which has its cause's name, and how bad it is made."""
REQUESTS = 1000


pytestmark = pytest.mark.usefixtures("few_replicates")


@cache
def played(fault: str) -> LabRun:
    return run_lab(Order(fault, SEVERITY[fault], seed=4, requests=REQUESTS))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Both windows of every fault; a run's name tells only a number, and judgement could not use more."""
    opened = open_store(str(tmp_path_factory.mktemp("lab") / "store.duckdb"))
    for number, fault in enumerate(SEVERITY):
        for side, tables in (("a", played(fault).baseline), ("b", played(fault).suspect)):
            renamed = {}
            for kind, table in tables.items():
                place = table.schema.get_field_index("run_id")
                names = [f"{side}{number}"] * table.num_rows
                renamed[kind] = table.set_column(place, table.schema.field(place), [names]) if names else table
            opened.append(Batch(renamed), timeout_s=120)
    yield opened
    opened.close()


@cache
def verdict(store: Store, fault: str) -> Verdict:
    runs = [Window(run_id=f"{side}{list(SEVERITY).index(fault)}") for side in "ab"]
    return diagnose(store, *runs, metric=played(fault).fault.metric, now_ns=time.time_ns())


@pytest.mark.parametrize("fault", SEVERITY)
def test_the_injected_fault_is_the_first_cause(store: Store, fault: str) -> None:
    """It is named first, at the worker that has it, and nobody who is innocent by the lab's own word is named beside it."""
    found, run = verdict(store, fault), played(fault)
    assert found.causes, found.verdict
    first = found.causes[0]
    assert first.cause == fault, found.verdict
    assert not {cause.cause for cause in found.causes} & set(run.fault.expected.never)
    true = run.truth["subject"]
    if true["kind"] == first.subject["kind"] == "worker":
        assert first.subject["id"] == true["id"]
    assert first.interval is not None
    assert first.refuted_by
    assert first.remedy


@pytest.mark.parametrize("fault", SEVERITY)
def test_it_owns_seconds_near_the_truth(store: Store, fault: str) -> None:
    """Of the change of the mean that the fault made it owns between half and three halves."""
    found = verdict(store, fault)
    truth = played(fault).truth["attribution"][fault][played(fault).fault.metric]["mean_s"]
    owned = sum(row.mean_s for row in found.attribution if row.cause in found.causes[0].rows)
    assert 0.5 <= owned / truth <= 1.5, owned / truth


@pytest.mark.parametrize("fault", SEVERITY)
def test_rows_sum_to_the_change(store: Store, fault: str) -> None:
    """Every second of the change stands in one row."""
    found = verdict(store, fault)
    for column in ("mean_s", "p99_s", "judged_s"):
        told = sum(getattr(row, column) for row in found.attribution)
        assert told == pytest.approx(getattr(found.delta, column), abs=1e-9)


@pytest.mark.parametrize("fault", SEVERITY)
def test_sql_gives_the_number_of_the_evidence(store: Store, fault: str) -> None:
    """Each statement that comes with a query can be checked by it; who has none says who computed it."""
    for evidence in verdict(store, fault).causes[0].evidence:
        if evidence["sql"] is None:
            assert evidence["computed_by"], evidence["statement"]
            continue
        value = store.query(evidence["sql"]).column(0)[0].as_py()
        assert float(value) == pytest.approx(evidence["value"], rel=1e-6), evidence["statement"]
