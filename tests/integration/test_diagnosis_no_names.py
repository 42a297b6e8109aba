"""No cause reads a name: runs, workers, tenants and prefixes called otherwise, or a mark at the same minute, change no verdict."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from diagnosis.diagnose import diagnose
from diagnosis.lab.run import BASELINE, SUSPECT, LabRun, Order, run_lab
from engine_probe.engine.virtual_clock import EPOCH_NS
from store.interface import Batch, Window
from store.open import open_store

FAULTS = ("premature_eviction", "hotspot_straggler", "mix_shift", "slow_steps")
REQUESTS = 400
NOW_NS = EPOCH_NS + 30 * 86_400 * 10**9
WORKERS = {"w0": "prod-7", "w1": "a", "w2": "slow_steps", "w3": "healthy"}
TENANTS = {"search": "zz", "chat": "innocent", "agents": "a"}
RUNS = {BASELINE: "premature_eviction", SUSPECT: "good"}
TURNED = np.uint64(0x9E3779B97F4A7C15)
"""Other hashes: one to one, and without any order of the old ones."""
HASHES = ("prefix_hash", "block_hash", "parent_hash")


pytestmark = pytest.mark.usefixtures("few_replicates")


@cache
def played(fault: str, marked: bool = False) -> LabRun:
    return run_lab(Order(fault, "strong", seed=5, requests=REQUESTS, marked=marked))


def verdict(folder: Path, tables: Mapping[str, Mapping[str, pa.Table]], metric: str) -> dict[str, Any]:
    """Of two runs under these names: (baseline, suspect) in this order."""
    store = open_store(str(folder / "store.duckdb"))
    try:
        for rows in tables.values():
            store.append(Batch(dict(rows)), timeout_s=120)
        base, suspect = (Window(run_id=name) for name in tables)
        return diagnose(store, base, suspect, metric=metric, now_ns=NOW_NS).to_dict()
    finally:
        store.close()


def renamed(table: pa.Table, run: str) -> pa.Table:
    """The same rows with every name another one."""
    names = WORKERS | TENANTS
    for index, field in enumerate(table.schema):
        column = table.column(index)
        if field.name == "run_id":
            column = pa.array([RUNS[run]] * table.num_rows, field.type)
        elif field.name in HASHES:
            column = pc.bit_wise_xor(column, pa.scalar(TURNED, pa.uint64()))
        elif field.name == "prompt_blocks":
            lists = column.combine_chunks()
            flat = pc.bit_wise_xor(lists.flatten(), pa.scalar(TURNED, pa.uint64()))
            lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0))
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            column = pa.ListArray.from_arrays(pa.array(offsets), flat, type=field.type)
        elif field.name == "candidates":
            column = pa.array([other(row, names) for row in column.to_pylist()], field.type)
        elif pa.types.is_string(field.type):
            column = pa.array([names.get(word, word) for word in column.to_pylist()], field.type)
        table = table.set_column(index, field, column)
    return table


def other(candidates: list[dict[str, Any]] | None, names: Mapping[str, str]) -> list[dict[str, Any]] | None:
    if candidates is None:
        return None
    return [{**each, "worker": names.get(each["worker"], each["worker"])} for each in candidates]


def judged(document: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """What is said, without names: they are put back to what they were."""
    back = {new: old for old, new in names.items()}

    def subject(cause: dict[str, Any]) -> tuple[str, str | None]:
        kind, who = cause["subject"]["kind"], cause["subject"]["id"]
        return kind, None if kind == "prefix" else back.get(who, who)

    return {
        "status": document["status"],
        "causes": [(cause["cause"], subject(cause)) for cause in document["causes"]],
        "excluded": sorted(row["cause"] for row in document["excluded"]),
        "not_observable": sorted(row["cause"] for row in document["not_observable"]),
        "rows": [row["cause"] for row in document["attribution"]],
        "quality": [(row["check"], row["status"]) for row in document["quality"]],
    }


def numbers(document: dict[str, Any]) -> list[float]:
    """Every number that decides something."""
    found = [row[key] for row in document["attribution"] for key in ("mean_s", "p99_s", "judged_s")]
    found += [
        cause[key] or 0.0 for cause in document["causes"] for key in ("share_p99", "confidence", "mean_s", "p99_s")
    ]
    return found + [document["delta"][key]["value"] for key in ("mean_s", "p99_s", "judged_s")]


@pytest.mark.parametrize("fault", FAULTS)
def test_shuffled_names_give_the_identical_verdict(fault: str, tmp_path: Path) -> None:
    """The baseline is called `premature_eviction`, a sound worker `slow_steps`, a tenant `innocent`: it is all the same."""
    run = played(fault)
    for name in ("plain", "renamed"):
        (tmp_path / name).mkdir()
    plain = verdict(tmp_path / "plain", {BASELINE: run.baseline, SUSPECT: run.suspect}, run.fault.metric)
    sides = {BASELINE: run.baseline, SUSPECT: run.suspect}
    again = verdict(
        tmp_path / "renamed",
        {RUNS[side]: {kind: renamed(table, side) for kind, table in rows.items()} for side, rows in sides.items()},
        run.fault.metric,
    )
    assert judged(again, WORKERS | TENANTS) == judged(plain, {})
    assert numbers(again) == pytest.approx(numbers(plain), rel=1e-6, abs=1e-9)
    assert plain["status"] != "no_change"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mark_at_the_same_minute_changes_no_verdict(fault: str, tmp_path: Path) -> None:
    """Somebody deployed something when the fault began, and had nothing to do with it."""
    documents = []
    for marked in (False, True):
        run = played(fault, marked)
        folder = tmp_path / str(marked)
        folder.mkdir()
        documents.append(verdict(folder, {BASELINE: run.baseline, SUSPECT: run.suspect}, run.fault.metric))
    assert documents[1] == documents[0]
