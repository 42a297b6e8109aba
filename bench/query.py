"""P99 TTFT by worker and minute over the last hour, as `/api/v1/series` answers it, beside the same query on a bare DuckDB.

Both read one file, read-only and in processes of their own, and take turns; medians are told. The gate (design section
11): at most 1.3 times the bare query, and equal whatever lies stored besides the hour.

Run: .venv/bin/python bench/query.py [--json]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import duckdb

from collector.reading.series_queries import SeriesRequest, series
from store.duckdb_store import DuckDBStore
from store.interface import Window
from store.open import open_store

HOUR_NS: Final = 3_600_000_000_000
END_NS: Final = 1_764_403_200_000_000_000
GATE: Final = 1.3

BARE = """
import sys, time, duckdb
connection = duckdb.connect(sys.argv[1], read_only=True)
for line in sys.stdin:
    started = time.perf_counter()
    connection.execute(
        "SELECT arrival_ns // 60000000000 * 60000000000 AS bucket_ns, worker, count(*) AS n, "
        "quantile_disc((first_token_ns - arrival_ns) / 1e9, 0.99) AS p99 FROM request "
        "WHERE run_id IS NULL AND vantage = 'engine' AND arrival_ns >= ? AND arrival_ns < ? "
        "AND first_token_ns IS NOT NULL GROUP BY ALL ORDER BY ALL", [int(word) for word in line.split()]
    ).to_arrow_table()
    print(time.perf_counter() - started, flush=True)
"""


def run(hour_rows: int = 800_000, stored_rows: int = 4_000_000, rounds: int = 9) -> dict[str, Any]:
    """Ratios and medians: `ratio` (store / bare), `history_ratio` (with `stored_rows` before the hour / with few).

    `stored_rows` counts the rows before the hour; 100,000,000 of them are about 3 GB on disk.
    """
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        long, short = Path(folder) / "long.duckdb", Path(folder) / "short.duckdb"
        _fill(long, hour_rows, stored_rows)
        # A quarter of an hour before it, or DuckDB sees that every row is in the window and does not look at all.
        _fill(short, hour_rows, hour_rows // 4)
        times = list(_times(long, short, rounds))
    ours, bare, few = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(store_s / bare_s for store_s, bare_s, _ in times)
    return {
        "hour_rows": hour_rows,
        "stored_rows": stored_rows,
        "store_s": ours,
        "bare_s": bare,
        "few_rows_s": few,
        "ratio": ratio,
        "gate": GATE,
        "met": ratio <= GATE,
        "history_ratio": statistics.median(store_s / few_s for store_s, _, few_s in times),
    }


def _times(long: Path, short: Path, rounds: int) -> Iterator[tuple[float, float, float]]:
    """Seconds of each round: the store with a long history, the bare query on the same file, the store with a short one."""
    window = Window(END_NS - HOUR_NS, END_NS)
    with (
        open_store(str(long), read_only=True) as store,
        open_store(str(short), read_only=True) as young,
        subprocess.Popen(
            [sys.executable, "-c", BARE, str(long)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as bare,
    ):
        assert bare.stdin is not None
        assert bare.stdout is not None
        for turn in range(rounds + 1):
            ours = _ask(store, window)
            bare.stdin.write(f"{window.start_ns} {window.end_ns}\n")
            bare.stdin.flush()
            found = (ours, float(bare.stdout.readline()), _ask(young, window))
            if turn:
                yield found
        bare.stdin.close()


def _ask(store: DuckDBStore, window: Window) -> float:
    started = time.perf_counter()
    series(store, SeriesRequest("ttft", window, "0.99", 60, ("worker",), "engine"))
    return time.perf_counter() - started


def _fill(path: Path, hour_rows: int, stored_rows: int) -> None:
    """Requests in the order of arrival: `stored_rows` before the hour, `hour_rows` in it, of 16 workers."""
    open_store(str(path)).close()
    spacing = HOUR_NS // hour_rows
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "INSERT INTO request BY NAME SELECT 'req-' || i AS request_id, 'engine' AS vantage, 'finished' AS state, "
            "'worker-' || hash(i) % 16 AS worker, $start + i * $spacing AS arrival_ns, arrival_ns AS at_ns, "
            "arrival_ns + (hash(i) % 2000000000)::BIGINT AS first_token_ns, 500 AS prompt_tokens, 100 AS output_tokens, "
            "'bench' AS source, arrival_ns AS received_ns FROM range($count) t(i)",
            {"start": END_NS - HOUR_NS - stored_rows * spacing, "spacing": spacing, "count": hour_rows + stored_rows},
        )


def render(figures: dict[str, Any]) -> str:
    """The figures for people."""
    return (
        f"P99 by worker and minute over {figures['hour_rows']:,} requests, {figures['stored_rows']:,} more stored\n"
        f"  store {figures['store_s'] * 1e3:.0f} ms, bare {figures['bare_s'] * 1e3:.0f} ms: ratio {figures['ratio']:.2f} "
        f"(gate {figures['gate']}) {'met' if figures['met'] else 'MISSED'}\n"
        f"  with history / without: {figures['history_ratio']:.2f}"
    )


if __name__ == "__main__":
    found = run()
    print(json.dumps(found, indent=2) if "--json" in sys.argv else render(found))
