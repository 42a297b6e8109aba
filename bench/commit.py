"""How long a commit takes: alone, with four heavy queries asked of the store, and with four that nothing holds back.

One sender appends 2,000 block events at a time, 3 batches a second. The gate (design section 11): P99 of a commit under
load within 1 s, better 300 ms. The unthrottled readers show what the semaphore and the few readers are for.

Run: .venv/bin/python bench/commit.py [--json]
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.reference_rows import blocks
from store.duckdb_store import DuckDBStore
from store.interface import Batch, BatchId
from store.metrics import nearest_rank
from store.open import open_store

ROWS: Final = 2_000
BATCHES_PER_S: Final = 3
HEAVY: Final = (
    "SELECT block_hash % 1000003 AS k, count(*) AS n, sum(at_ns % 977) AS s FROM block GROUP BY k ORDER BY n, s"
)
READERS: Final = 4
GATE_S: Final = 1.0
STRETCH_S: Final = 0.3


def run(seconds: float = 15.0, stored_rows: int = 2_000_000) -> dict[str, Any]:
    """P50, P99 and worst commit (s) by situation, and what load costs: `p99_ratio` of each situation to the quiet one."""
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder, open_store(f"{folder}/k.duckdb") as store:
        for seq in range(stored_rows // 100_000):
            store.append(Batch({"block": blocks(100_000, seq)}, BatchId("fill", "e", seq)))
        situations: dict[str, Callable[[DuckDBStore], None] | None] = {
            "quiet": None,
            "four heavy queries": lambda s: s.query(HEAVY) and None,
            "four unthrottled": _unthrottled,
        }
        found = {name: _commits(store, read, name, seconds) for name, read in situations.items()}
    quiet = found["quiet"]["p99_s"]
    for figures in found.values():
        figures["p99_ratio"] = figures["p99_s"] / quiet
    loaded = found["four heavy queries"]["p99_s"]
    return {"situations": found, "gate_s": GATE_S, "stretch_s": STRETCH_S, "met": loaded <= GATE_S}


def _commits(
    store: DuckDBStore, read: Callable[[DuckDBStore], None] | None, name: str, seconds: float
) -> dict[str, Any]:
    """Commit at a steady pace for a while; latency counts from when the batch was due, so waiting adds up."""
    table = blocks(ROWS, 1)
    took = []
    with _readers(store, read) as num_queries:
        began = time.perf_counter()
        for seq in range(round(seconds * BATCHES_PER_S)):
            due = began + seq / BATCHES_PER_S
            time.sleep(max(0.0, due - time.perf_counter()))
            store.append(Batch({"block": table}, BatchId(name, "e", seq)))
            took.append(time.perf_counter() - due)
        queries = num_queries()
    return {
        "p50_s": nearest_rank(took, "0.5"),
        "p99_s": nearest_rank(took, "0.99"),
        "worst_s": max(took),
        "num_commits": len(took),
        "num_queries": queries,
    }


@contextmanager
def _readers(store: DuckDBStore, read: Callable[[DuckDBStore], None] | None) -> Iterator[Callable[[], int]]:
    """Four threads that ask heavy queries one after another; yields how many were answered."""
    stop = threading.Event()
    counts = [0] * READERS

    def ask(reader: int) -> None:
        while not stop.is_set() and read is not None:
            read(store)
            counts[reader] += 1

    threads = [threading.Thread(target=ask, args=(reader,)) for reader in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sum(counts)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _unthrottled(store: DuckDBStore) -> None:
    """A heavy query past the semaphore, on a cursor of its own."""
    cursor = store._database.cursor()
    cursor.execute(HEAVY).fetchall()
    cursor.close()


def render(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"{'commits of ' + str(ROWS) + ' block events':28} {'p50 ms':>8} {'p99 ms':>8} {'worst':>8} {'ratio':>7} {'queries':>8}"
    ]
    for name, row in figures["situations"].items():
        times = " ".join(f"{row[key] * 1e3:8.0f}" for key in ("p50_s", "p99_s", "worst_s"))
        lines.append(f"{name:28} {times} {row['p99_ratio']:7.1f} {row['num_queries']:8}")
    return "\n".join([*lines, f"gate {figures['gate_s']:g} s under load: {'met' if figures['met'] else 'MISSED'}"])


if __name__ == "__main__":
    found = run()
    print(json.dumps(found, indent=2) if "--json" in sys.argv else render(found))
