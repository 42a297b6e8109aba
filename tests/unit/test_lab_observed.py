"""What is left of a lab run for who sees less: columns of spans and metrics, callers alone, a batch of a hundred lost."""

from __future__ import annotations

from functools import cache

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from diagnosis.lab.observed import LOST, MODES, SCRAPE_S, observe
from diagnosis.lab.run import LabRun, Order, run_lab
from engine_probe.adapters.provides import visible
from engine_probe.errors import UsageError

NS = 1_000_000_000


@cache
def played(how: str = "full", fault: str = "none") -> LabRun:
    return run_lab(Order(fault, requests=120, observe=how))


def known(table: pa.Table) -> set[str]:
    """Columns that some row fills."""
    return {name for name in table.column_names if table[name].null_count < table.num_rows}


def test_full_is_everything() -> None:
    """Nothing is filtered."""
    tables = played().suspect
    assert observe(tables, "full") == tables


def test_spans_and_metrics_show_what_their_adapters_declare() -> None:
    """No steps, blocks or routes; no token times, cached tokens or tenants; queue and prefill as the spans have them."""
    seen = played("otlp").suspect
    assert set(seen) == {"request", "sample", "worker", "mark"}
    declared = {name.split(".")[1] for name in visible("vllm", ("otlp", "metrics")) if name.startswith("request.")}
    assert known(seen["request"]) <= declared | {"run_id", "labels"}
    assert {"queue_s", "prefill_s", "worker"} <= known(seen["request"])
    assert set(pc.unique(seen["sample"]["name"]).to_pylist()) >= {"prefix_hits_tokens_total", "kv_usage_ratio"}


def test_pages_are_scraped_now_and_then() -> None:
    """Of each series one value in each stretch of the scrape interval: its newest."""
    full, seen = played().suspect["sample"], played("otlp").suspect["sample"]
    cells = [
        (row["worker"], row["name"], str(row["labels"]), row["at_ns"] // round(SCRAPE_S * NS))
        for row in seen.to_pylist()
    ]
    assert len(set(cells)) == len(cells)
    newest: dict[tuple[object, ...], int] = {}
    for row in full.to_pylist():
        cell = (row["worker"], row["name"], str(row["labels"]), row["at_ns"] // round(SCRAPE_S * NS))
        newest[cell] = max(newest.get(cell, 0), row["at_ns"])
    assert {cell: row["at_ns"] for cell, row in zip(cells, seen.to_pylist(), strict=True)}.items() <= newest.items()


@pytest.mark.parametrize("fault", ["none", "client_retries"])
def test_callers_alone_know_no_engine(fault: str) -> None:
    """One row a call at the client's vantage, whether the scene had callers of its own or not; no worker, no phase."""
    seen = played("client", fault).suspect
    assert set(seen) == {"request"}
    assert pc.unique(seen["request"]["vantage"]).to_pylist() == ["client"]
    assert {"token_ns", "tenant", "output_tokens"} <= known(seen["request"])
    assert not {"worker", "queue_s", "prefill_s", "cached_tokens", "prompt_blocks"} & known(seen["request"])
    ids = played("full", fault).suspect["request"]["request_id"]
    assert seen["request"].num_rows == pc.count_distinct(ids).as_py()


def test_one_batch_of_a_hundred_is_lost() -> None:
    """A worker's rows of half a second are lost together, all kinds of them; about one in a hundred; the seed decides which."""
    told = {
        "step": pa.table(
            {"worker": [f"w{i % 10}" for i in range(20_000)], "at_ns": [i * NS // 20 for i in range(20_000)]}
        ),
        "block": pa.table({"worker": ["w3"] * 4_000, "at_ns": [i * NS // 4 for i in range(4_000)]}),
    }
    seen = observe(told, "lossy", seed=5)
    assert 0.5 * LOST < 1 - seen["step"].num_rows / 20_000 < 1.5 * LOST

    def batches(table: pa.Table) -> set[tuple[str, int]]:
        return {(row["worker"], row["at_ns"] * 2 // NS) for row in table.to_pylist()}

    lost = batches(told["step"]) - batches(seen["step"])
    assert lost
    assert lost.isdisjoint(batches(seen["block"]))
    assert observe(told, "lossy", seed=5) == seen
    assert observe(told, "lossy", seed=6) != seen


@pytest.mark.parametrize("how", MODES)
def test_the_truth_knows_all(how: str) -> None:
    """What a fault cost does not depend on who looked; the truth says who did."""
    full, seen = played().truth, played(how).truth
    assert seen["attribution"] == full["attribution"]
    assert seen["observed"] == how


def test_orders_differ_by_how_they_are_observed() -> None:
    """A cell of its own for each; an unknown way is refused before anything is played."""
    assert len({Order("none", observe=how).key() for how in MODES}) == len(MODES)
    with pytest.raises(UsageError, match="'blind' is not known"):
        run_lab(Order("none", requests=60, observe="blind"))
