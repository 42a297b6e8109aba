"""What a full diagnosis costs: a window of 100,000 requests with 5,000,000 block events against a baseline, in one store.

Rows are made here (a queue, shared prefixes, evictions), stored as a probe would send them, and diagnosed. Beside the
diagnosis stands the bare scan of the same block rows by DuckDB in the same run: the ratio is what can be compared.

Run: `kvscope bench diagnose` or `python bench/diagnose.py [requests]`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from diagnosis.diagnose import diagnose
from engine_probe.schema import conform
from store.interface import Batch, Store, Window
from store.open import open_store

T0_NS = 1_780_000_000_000_000_000
BLOCK_SIZE = 16
BLOCKS = 50
PREFIX = 30
GROUPS = 400
WORKERS = 8
RATE = 100.0


def requests(n: int, run: str, *, evicted_share: float, seed: int) -> pa.Table:
    """n engine rows with phases, prompt blocks and counts; `evicted_share` of them compute their prefix again."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / RATE, n))
    again = rng.random(n) < evicted_share
    group = rng.zipf(1.3, n) % GROUPS
    cached = np.where(again, 0, PREFIX * BLOCK_SIZE)
    prompt = BLOCKS * BLOCK_SIZE
    queue = np.where(rng.random(n) < 0.2, rng.exponential(0.05, n), 0.0) * (1 + 2 * again)
    prefill = 0.01 + (prompt - cached) * 5e-5 + rng.exponential(0.004, n)
    output = rng.integers(20, 200, n)
    decode = output * (0.012 + rng.normal(0, 0.0005, n))
    ns = lambda seconds: T0_NS + (seconds * 1e9).astype(np.int64)  # noqa: E731
    first = arrival + queue + prefill
    prefix = (group[:, None] * 1000 + np.arange(PREFIX)[None, :]).astype(np.uint64) * np.uint64(2654435761)
    tail = (np.arange(n)[:, None] * 64 + np.arange(BLOCKS - PREFIX)[None, :] + 10**12 * seed).astype(np.uint64)
    blocks = np.concatenate([prefix, tail], axis=1).ravel()
    offsets = pa.array(np.arange(0, n * BLOCKS + 1, BLOCKS, dtype=np.int32))
    names = pa.array([f"w{k}" for k in range(WORKERS)])
    table = pa.table(
        {
            "request_id": pa.array([f"{run}-{i}" for i in range(n)]),
            "worker": pa.DictionaryArray.from_arrays(pa.array(group % WORKERS), names).cast(pa.string()),
            "run_id": pa.array([run] * n),
            "vantage": pa.array(["engine"] * n),
            "state": pa.array(["finished"] * n),
            "at_ns": ns(first + decode),
            "arrival_ns": ns(arrival),
            "first_scheduled_ns": ns(arrival + queue),
            "first_token_ns": ns(first),
            "last_token_ns": ns(first + decode),
            "end_ns": ns(first + decode),
            "frontend_s": np.zeros(n),
            "queue_s": queue,
            "prefill_s": prefill,
            "decode_s": decode,
            "prompt_tokens": np.full(n, prompt),
            "cached_tokens": cached,
            "computed_tokens": prompt - cached,
            "output_tokens": output,
            "prompt_blocks": pa.ListArray.from_arrays(offsets, pa.array(blocks)),
        }
    )
    return conform("request", table)


def block_events(n: int, run: str, served: pa.Table, seed: int) -> pa.Table:
    """About n block events: what a request computed is stored at its first token, and as many older blocks are evicted."""
    rng = np.random.default_rng(seed + 7)
    hashes = served["prompt_blocks"].combine_chunks().flatten().to_numpy().reshape(-1, BLOCKS)
    first = served["first_token_ns"].to_numpy()
    worker = served["worker"].combine_chunks()
    hit = served["cached_tokens"].to_numpy() // BLOCK_SIZE
    computed = np.arange(BLOCKS)[None, :] >= hit[:, None]
    stored = hashes[computed]
    owner = np.repeat(np.arange(len(first)), computed.sum(axis=1))
    keep = min(len(stored), n // 2)
    gone = stored[np.maximum(np.arange(len(stored)) - rng.integers(1000, 50_000, len(stored)), 0)]
    stored, gone, owner = stored[:keep], gone[:keep], owner[:keep]
    table = pa.table(
        {
            "worker": pa.concat_arrays([worker.take(pa.array(owner))] * 2),
            "run_id": pa.array([run] * (2 * keep)),
            "at_ns": np.concatenate([first[owner], first[owner] + 1000]),
            "change": pa.array(["stored"] * keep + ["evicted"] * keep),
            "block_hash": np.concatenate([stored, gone]),
            "num_tokens": np.full(2 * keep, BLOCK_SIZE),
            "tier": pa.array(["device"] * (2 * keep)),
        }
    )
    return conform("block", table.sort_by("at_ns"))


def fill(store: Store, num_requests: int, num_events: int) -> dict[str, int]:
    """Two runs: `quiet` (a fifth of the size) and `bad`."""
    rows = {"request": 0, "block": 0}
    for run, share, evicted, seed in (("quiet", 0.2, 0.02, 1), ("bad", 1.0, 0.3, 2)):
        served = requests(int(num_requests * share), run, evicted_share=evicted, seed=seed)
        events = block_events(int(num_events * share), run, served, seed)
        worker = {
            "worker": [f"w{k}" for k in range(WORKERS)],
            "at_ns": [T0_NS - 1] * WORKERS,
            "run_id": [run] * WORKERS,
            "block_size": [BLOCK_SIZE] * WORKERS,
            "num_blocks": [20_000] * WORKERS,
        }
        store.append(Batch({"request": served, "worker": conform("worker", pa.table(worker))}), timeout_s=120)
        for start in range(0, events.num_rows, 500_000):
            store.append(Batch({"block": events.slice(start, 500_000)}), timeout_s=120)
        rows["request"] += served.num_rows
        rows["block"] += events.num_rows
    return rows


def run(num_requests: int = 100_000, num_events: int = 5_000_000, repeats: int = 3) -> dict[str, Any]:
    """Seconds (median of `repeats`) of a diagnosis of TTFT, of the bare scan of the same rows, and their ratio."""
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        store = open_store(str(Path(folder) / "bench.duckdb"))
        try:
            rows = fill(store, num_requests, num_events)
            took, scans, verdict = [], [], None
            for _ in range(repeats):
                started = time.perf_counter()
                store.query("SELECT count(DISTINCT block_hash), max(at_ns) FROM block WHERE run_id = 'bad'")
                scans.append(time.perf_counter() - started)
                started = time.perf_counter()
                verdict = diagnose(store, Window(run_id="quiet"), Window(run_id="bad"), now_ns=T0_NS)
                took.append(time.perf_counter() - started)
            assert verdict is not None
            return {
                "rows": rows,
                "diagnosis_s": float(np.median(took)),
                "bare_scan_s": float(np.median(scans)),
                "ratio": float(np.median(took) / np.median(scans)),
                "verdict": verdict.verdict,
            }
        finally:
            store.close()


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(json.dumps(run(size, size * 50), indent=2))
