"""Rows that a sender delivered twice are counted once: a batch without an identity is stored at least once."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from diagnosis.delivered_twice import again
from diagnosis.diagnose import diagnose
from diagnosis.loading.workers import step_facts
from store.interface import Window
from tests.diagnosed import runs, stored
from tests.simulate import T0_NS, Rows, Setup

NOW_NS = T0_NS + 10**15
REUSES = Setup(num_requests=150, prefix_tokens=160, tail_tokens=(200, 260), output_tokens=(4, 16))
"""160 of some 390 prompt tokens are shared: what twice the steps would have computed is more than the prompts have."""


def test_rows_of_one_instant_that_say_the_same_are_one() -> None:
    """The second is told again, the third says something else, the fourth comes later; nulls are alike."""
    table = pa.table({"at_ns": [1, 1, 1, 2], "chosen": ["a", "a", "b", "b"], "load": [None, None, None, 1.0]})
    assert again(table, "at_ns", ("chosen", "load")).tolist() == [False, True, False, False]
    assert again(table, "at_ns", ("chosen",), order=pa.array([3, 2, 1, 0]).to_numpy()).tolist() == [False] * 3 + [True]
    assert again(table.slice(0, 0), "at_ns", ("chosen",)).tolist() == []


def _twice(rows: Rows) -> Rows:
    return {**rows, "step": rows["step"] + rows["step"]}


@pytest.mark.usefixtures("few_replicates")
def test_steps_that_came_twice_accuse_nobody(tmp_path: Path) -> None:
    """As many steps as were sent; the counter that lies is the one named, and not the requests that tell the truth."""
    rows = runs({"base": {}, "twice": {"seed": 2}}, REUSES)
    sent = len(rows["twice"]["step"])
    for sample in rows["twice"]["sample"]:
        if sample["name"] == "prefix_hits_tokens_total":
            sample["value"] = 0.0
    with stored(tmp_path / "kvscope.duckdb", [rows["base"], _twice(rows["twice"])]) as store:
        steps = step_facts(store, Window(run_id="twice"), T0_NS)
        found = diagnose(store, Window(run_id="base"), Window(run_id="twice"), now_ns=NOW_NS)
    assert (0 if steps is None else len(steps.at_s)) == sent
    said = [check["statement"] for check in found.quality if check["check"] == "cached_tokens"]
    assert "the counter is not telling the truth" in said[1]
