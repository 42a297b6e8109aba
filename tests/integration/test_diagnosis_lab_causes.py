"""Each of these causes is found where the lab injects it: events -> store -> diagnose, and the SQL of its evidence gives the numbers."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import pytest

from diagnosis.diagnose import diagnose
from diagnosis.lab.run import LabRun, Order, run_lab
from diagnosis.telling.verdict import NamedCause, Verdict
from store.interface import Batch, Store, Window
from store.open import open_store

FOUND = {
    "front_end": "front_end",
    "lookup_overhead": "lookup_overhead",
    "eviction_overhead": "eviction_overhead",
    "probe_overhead": "probe_overhead",
    "small_batch": "small_batch",
    "chunk_budget": "chunk_budget",
    "ttl_expiry": "ttl_expiry",
    "reuse_below_unit": "reuse_below_unit",
    "block_leak": "block_leak",
    "client_retries": "client_retries",
    "tier_slower_than_recompute": "tier_slower_than_recompute",
    "tier_never_read": "tier_never_read",
    "tier_saves_nothing": "tier_saves_nothing",
    "cache_lock_contention": "cache_lock_contention",
    "fixed_offset": "fixed_offset",
    "prompt_uncacheable": "prompt_uncacheable",
    "recompile": "recompile",
    "adapter_swap": "adapter_swap",
    "speculation_collapse": "speculation_collapse",
}
"""Fault -> the cause that is named first."""
METRIC = {"speculation_collapse": "tpot"}
"""What it shows in, where that is not TTFT."""
SEVERITY = {
    "eviction_overhead": "strong",
    "probe_overhead": "strong",
    "small_batch": "strong",
    "ttl_expiry": "strong",
    "adapter_swap": "strong",
    "block_leak": "strong",
}
REQUESTS = {"block_leak": 1000, "client_retries": 1000}
"""A leak needs time to fill the pools."""


@cache
def played(fault: str) -> LabRun:
    return run_lab(Order(fault, SEVERITY.get(fault, "typical"), seed=3, requests=REQUESTS.get(fault, 600)))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Both windows of every fault; a run's name tells which fault it is of, and judgement must not care."""
    opened = open_store(str(Path(tmp_path_factory.mktemp("lab")) / "store.duckdb"))
    for number, fault in enumerate(FOUND):
        for side, tables in (("a", played(fault).baseline), ("b", played(fault).suspect)):
            renamed = {}
            for kind, table in tables.items():
                place = table.schema.get_field_index("run_id")
                field = table.schema.field(place)
                values = [f"{side}{number}"] * table.num_rows
                renamed[kind] = table.set_column(place, field, [values]) if table.num_rows else table
            opened.append(Batch(renamed))
    return opened


@cache
def verdict(store: Store, fault: str) -> Verdict:
    number = list(FOUND).index(fault)
    return diagnose(
        store,
        Window(run_id=f"a{number}"),
        Window(run_id=f"b{number}"),
        metric=METRIC.get(fault, "ttft"),
        now_ns=time.time_ns(),
    )


def first(found: Verdict) -> NamedCause:
    assert found.causes, found.verdict
    return found.causes[0]


@pytest.mark.parametrize("fault", FOUND)
def test_the_injected_fault_is_the_first_cause(store: Store, fault: str) -> None:
    """It is named first, and nobody who is innocent by the lab's own word is named beside it."""
    found = verdict(store, fault)
    assert first(found).cause == FOUND[fault], found.verdict
    assert not {cause.cause for cause in found.causes} & set(played(fault).fault.expected.never)


@pytest.mark.parametrize("fault", FOUND)
def test_it_owns_seconds_near_the_truth(store: Store, fault: str) -> None:
    """It owns no more than half over what the fault cost in the mean (what is given up relieves others), and at least three tenths of it."""
    found = verdict(store, fault)
    truth = played(fault).truth["attribution"][fault][METRIC.get(fault, "ttft")]["mean_s"]
    owned = sum(row.mean_s for row in found.attribution if row.cause in first(found).rows)
    assert 0.3 <= owned / truth <= 3 / 2


@pytest.mark.parametrize("fault", FOUND)
def test_rows_sum_to_the_change(store: Store, fault: str) -> None:
    """Every second of the change stands in one row."""
    found = verdict(store, fault)
    for column in ("mean_s", "p99_s", "judged_s"):
        told = sum(getattr(row, column) for row in found.attribution)
        assert told == pytest.approx(getattr(found.delta, column), abs=1e-9)


@pytest.mark.parametrize("fault", FOUND)
def test_sql_gives_the_number_of_the_evidence(store: Store, fault: str) -> None:
    """Each statement that comes with a query can be checked by it, and at least one does."""
    checked = 0
    for evidence in first(verdict(store, fault)).evidence:
        if evidence["sql"] is not None:
            value = store.query(evidence["sql"]).column(0)[0].as_py()
            assert float(value) == pytest.approx(evidence["value"], rel=1e-6), evidence["statement"]
            checked += 1
    assert checked > 0
