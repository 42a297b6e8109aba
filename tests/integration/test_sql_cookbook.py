"""Every saved query runs as it stands over two windows of the lab; some are worked out again in Python from the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collector.cookbook import page, saved
from diagnosis.lab.run import Order, run_lab
from store.duckdb_store import DuckDBStore
from store.interface import Batch
from store.open import open_store
from store.sandbox.sandbox import SqlLimits, SqlRunner
from store.sql_json import json_objects
from tests.conftest import Ended

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def store() -> Iterator[DuckDBStore]:
    """One run with preemptions, one with hand-overs; 300 requests each."""
    with open_store(":memory:") as opened:
        for fault in ("preemption_recompute", "transfer_wire"):
            opened.append(Batch(run_lab(Order(fault, "strong", requests=300)).suspect, None))
        assert isinstance(opened, DuckDBStore)
        yield opened


@pytest.fixture(scope="module")
def runner() -> Iterator[SqlRunner]:
    """One runner for the book."""
    with SqlRunner(SqlLimits(timeout_s=120.0)) as made:
        yield made


def rows_of(runner: SqlRunner, store: DuckDBStore, sql: str) -> list[dict[str, Any]]:
    return json_objects(runner.run(sql, data=store.sql_data()).table)


@pytest.mark.parametrize("name", saved())
def test_query_runs_and_finds_something(name: str, store: DuckDBStore, runner: SqlRunner) -> None:
    """As a person would run it."""
    assert rows_of(runner, store, saved()[name].sql)


def test_three_hit_rates_are_those_of_the_rows(store: DuckDBStore, runner: SqlRunner) -> None:
    """Worked out again request by request."""
    requests = store.query("SELECT * FROM request WHERE vantage = 'engine' AND cached_tokens IS NOT NULL").to_pylist()
    for row in rows_of(runner, store, saved()["three_hit_rates"].sql):
        mine = [r for r in requests if (r["run_id"], r["worker"]) == (row["run_id"], row["worker"])]
        assert row["request_hit_rate"] == pytest.approx(sum(r["cached_tokens"] > 0 for r in mine) / len(mine))
        prompt = sum(r["prompt_tokens"] for r in mine)
        assert row["token_hit_rate"] == pytest.approx(sum(r["cached_tokens"] for r in mine) / prompt)


def test_blocks_evicted_too_early_are_those_that_came_back(store: DuckDBStore, runner: SqlRunner) -> None:
    """Followed block by block in Python."""
    events = store.query(
        "SELECT run_id, worker, block_hash, change, at_ns FROM block WHERE change IN ('stored', 'evicted') "
        "AND coalesce(tier, 'device') = 'device' ORDER BY at_ns, change"
    ).to_pylist()
    gone: dict[tuple[Any, ...], int] = {}
    again: dict[tuple[Any, ...], int] = {}
    for event in events:
        key = (event["run_id"], event["worker"], event["block_hash"])
        if event["change"] == "evicted":
            gone[key] = event["at_ns"]
        elif key in gone and event["at_ns"] - gone.pop(key) < 60e9:
            again[key[:2]] = again.get(key[:2], 0) + 1
    found = {(r["run_id"], r["worker"]): r["blocks"] for r in rows_of(runner, store, saved()["evicted_too_early"].sql)}
    assert found == again


def test_page_is_that_of_the_files() -> None:
    """`python -m collector.cookbook > docs/sql-cookbook.md` writes it anew."""
    assert (ROOT / "docs" / "sql-cookbook.md").read_text(encoding="utf-8") == page()


def test_each_query_says_what_it_answers() -> None:
    """In a sentence of its own."""
    titles = [one.title for one in saved().values()]
    assert len(titles) >= 20
    assert all(title and title[0].isupper() for title in titles)
    assert len(set(titles)) == len(titles)


def test_saved_query_is_run_by_its_name(tmp_path: Path, kvscope: Callable[..., Ended]) -> None:
    """And a name that is none is answered with those there are."""
    store = tmp_path / "s.duckdb"
    with open_store(str(store)):
        pass
    asked = kvscope("sql", "--saved", "marks", "--store", store, "--json")
    assert (asked.code, json.loads(asked.out)["rows"]) == (0, [])
    wrong = kvscope("sql", "--saved", "nothing", "--store", store)
    assert wrong.code == 2
    assert "slowest_requests" in wrong.err
    both = kvscope("sql", "SELECT 1", "--saved", "marks", "--store", store)
    assert both.code == 2
