"""Every query of docs/sql.md runs over two real recordings; several are computed again in Python from the same rows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from collector.commands.import_ import import_source
from engine_probe.readers.detect import open_source
from engine_probe.readers.source import RECORDINGS_SALT, ReadOptions
from store.duckdb_store import DuckDBStore
from store.interface import Window
from store.metrics import nearest_rank
from store.open import open_store
from store.sandbox.sandbox import SqlLimits, SqlRunner

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sql.md").read_text(encoding="utf-8")
QUERIES: dict[str, str] = {
    title.splitlines()[-1]: text for title, text in re.findall(r"\n\n([^`]+?):\n\n```sql\n(.*?)```", PAGE, re.DOTALL)
}
RUNS = {"ample": "a-ample", "squeeze": "c-squeeze"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DuckDBStore]:
    """Two recordings of a real vLLM: enough KV blocks, and too few."""
    with open_store(str(tmp_path_factory.mktemp("docs") / "k.duckdb")) as opened:
        for run, folder in RUNS.items():
            source = open_source(ROOT / "tests" / "data" / "pairs" / folder)
            import_source(source, opened, run, ReadOptions(RECORDINGS_SALT, None, None, None))
        yield opened


@pytest.fixture(scope="module")
def runner() -> Iterator[SqlRunner]:
    """One runner for the page."""
    with SqlRunner(SqlLimits(timeout_s=120.0)) as made:
        yield made


@pytest.fixture(scope="module")
def requests(store: DuckDBStore) -> dict[str, list[dict[str, Any]]]:
    """Client rows by run, without warm-up."""
    found = {}
    for run in RUNS:
        rows = store.rows("request", Window(run_id=run), where="vantage = 'client'").to_pylist()
        found[run] = [row for row in rows if dict(row["labels"]).get("phase") != "warmup"]
    return found


def answer(runner: SqlRunner, store: DuckDBStore, begins: str) -> list[dict[str, Any]]:
    """Rows of the query whose title begins so."""
    (sql,) = [text for title, text in QUERIES.items() if title.startswith(begins)]
    return runner.run(sql, data=store.sql_data()).table.to_pylist()


def test_the_page_has_at_least_ten_queries() -> None:
    """Each under a line that says what it answers."""
    assert len(QUERIES) >= 10
    assert PAGE.count("```sql") == len(QUERIES)


@pytest.mark.parametrize("title", QUERIES)
def test_a_query_of_the_page_answers(runner: SqlRunner, store: DuckDBStore, title: str) -> None:
    """It runs as it stands, and has rows over the recordings."""
    result = runner.run(QUERIES[title], data=store.sql_data())
    assert result.table.num_rows > 0
    assert not result.truncated


def test_the_percentiles_are_nearest_ranks(
    runner: SqlRunner, store: DuckDBStore, requests: dict[str, list[dict[str, Any]]]
) -> None:
    """The page's way to ask for P99 gives the ceil(q n)-th smallest of each worker and ten seconds."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run, rows in requests.items():
        for row in rows:
            groups[run, row["arrival_ns"] // 10**10].append((row["first_token_ns"] - row["arrival_ns"]) / 1e9)
    rows = answer(runner, store, "TTFT by worker and ten seconds")
    assert len(rows) == len(groups)
    for row, (_, values) in zip(rows, sorted(groups.items()), strict=True):
        assert row["n"] == len(values)
        assert row["ttft_p50_p95_p99_s"] == [nearest_rank(values, q) for q in ("0.5", "0.95", "0.99")]


def test_the_hit_rates_are_what_the_rows_say(
    runner: SqlRunner, store: DuckDBStore, requests: dict[str, list[dict[str, Any]]]
) -> None:
    """Requests with a hit, share of tokens, reused tokens."""
    for row in answer(runner, store, "Prefix caching in its three numbers"):
        rows = [r for r in requests[row["run_id"]] if r["cached_tokens"] is not None]
        cached = [r["cached_tokens"] for r in rows]
        assert row["reused_tokens"] == sum(cached)
        assert row["request_hit_rate"] == pytest.approx(sum(c > 0 for c in cached) / len(cached), rel=1e-12)
        assert row["token_hit_rate"] == pytest.approx(sum(cached) / sum(r["prompt_tokens"] for r in rows), rel=1e-12)


def test_blocks_computed_again_are_found_where_blocks_are_few(runner: SqlRunner, store: DuckDBStore) -> None:
    """Counted again in Python, block by block; the squeezed run has many times those of the ample one."""
    rows = {
        row["run_id"]: row["computed_again"] for row in answer(runner, store, "Blocks that were computed, pushed out")
    }
    for run in RUNS:
        last: dict[tuple[str | None, int], str] = {}
        again = 0
        for row in store.rows("block", Window(run_id=run), order_by="at_ns, change").to_pylist():
            if row["change"] in ("stored", "evicted"):
                key = (row["worker"], row["block_hash"])
                again += row["change"] == "stored" and last.get(key) == "evicted"
                last[key] = row["change"]
        assert rows.get(run, 0) == again
    assert rows["squeeze"] > 10 * rows.get("ample", 0)


def test_the_gaps_are_the_gaps_between_chunks(runner: SqlRunner, store: DuckDBStore) -> None:
    """As many as there are chunks after the first ones."""
    for row in answer(runner, store, "Gaps between tokens"):
        tables = store.rows("request", Window(run_id=row["run_id"]), ["token_ns"], where="vantage = 'client'")
        chunks = [tokens for tokens in tables.column("token_ns").to_pylist() if tokens]
        assert row["gaps"] == sum(len(tokens) - 1 for tokens in chunks)
        stalls = [b - a for tokens in chunks for a, b in pairwise(tokens) if b - a > 100_000_000]
        assert row["stalls"] == len(stalls)


def test_goodput_is_the_share_of_requests_within_both_limits(
    runner: SqlRunner, store: DuckDBStore, requests: dict[str, list[dict[str, Any]]]
) -> None:
    """TTFT under 200 ms and TPOT under 50 ms, a request without a first token is not good."""
    for row in answer(runner, store, "Goodput"):
        good = 0
        for r in requests[row["run_id"]]:
            if r["first_token_ns"] is None:
                continue
            tpot = (r["last_token_ns"] - r["first_token_ns"]) / 1e9 / max(1, r["output_tokens"] - 1)
            good += (r["first_token_ns"] - r["arrival_ns"]) / 1e9 < 0.2 and (r["output_tokens"] <= 1 or tpot < 0.05)
        assert row["n"] == len(requests[row["run_id"]])
        assert row["good_share"] == pytest.approx(good / row["n"], rel=1e-12)
