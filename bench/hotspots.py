"""`hotspots` over 5 minutes of 64 workers: the judgement, and with it the reading from a store.

64 workers, one request a second each, a step row for each 20 ms of work, all 64 candidates told in each route row. What is
judged is made by arithmetic (first come, first served), written to a store file, read and judged; medians of several rounds.

Run: .venv/bin/python bench/hotspots.py [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from diagnosis.hotspots.judge import find
from diagnosis.hotspots.reading import read
from engine_probe.schema import arrow_schema
from store.interface import Batch, Window
from store.open import open_store

START_NS: Final = 1_764_403_200_000_000_000
GATE_S: Final = 0.2


def run(workers: int = 64, span_s: float = 300.0, rate: float = 1.0, rounds: int = 5) -> dict[str, Any]:
    """Medians in seconds: `read_s`, `judge_s`, `total_s`, `cpu_s` (of this process); numbers of rows."""
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        path = str(Path(folder) / "kvscope.duckdb")
        with open_store(path) as store:
            tables = _tables(workers, span_s, rate)
            store.append(Batch(tables))
        with open_store(path, read_only=True) as store:
            window = Window(START_NS, START_NS + round(span_s * 1e9), "bench")
            times = []
            for _ in range(rounds + 1):
                begun, cpu = time.perf_counter(), time.process_time()
                seen = read(store, window)
                middle = time.perf_counter()
                found = find(seen)
                times.append((middle - begun, time.perf_counter() - middle, time.process_time() - cpu))
    read_s, judge_s, cpu_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
    total_s = statistics.median(row[0] + row[1] for row in times[1:])
    return {
        "workers": workers,
        "decisions": found.num_decisions,
        "steps": tables["step"].num_rows,
        "status": found.status,
        "read_s": read_s,
        "judge_s": judge_s,
        "total_s": total_s,
        "cpu_s": cpu_s,
        "gate_s": GATE_S,
        "passed": total_s <= GATE_S,
    }


def _tables(workers: int, span_s: float, rate: float) -> dict[str, pa.Table]:
    random = np.random.default_rng(0)
    num = round(workers * span_s * rate)
    at = np.sort(random.random(num)) * span_s
    tokens = np.round(random.lognormal(7.0, 0.8, num)).clip(16, 30_000)
    chosen = (np.arange(num) + random.integers(0, 2, num)) % workers
    took = tokens * 1e-4
    begun, free = np.empty(num), np.zeros(workers)
    for row in range(num):
        begun[row] = max(free[chosen[row]], at[row])
        free[chosen[row]] = begun[row] + took[row]
    names = np.array([f"w{index}" for index in range(workers)])
    ids = np.array([f"r{row}" for row in range(num)])
    shared = np.full(num, "bench")

    def ns(seconds: np.ndarray) -> np.ndarray:
        return np.asarray(START_NS + np.round(seconds * 1e9).astype(np.int64))

    matched = (random.random((num, workers)) < 0.1) * 512
    candidates = pa.StructArray.from_arrays(
        [
            pa.array(np.tile(names, num)),
            pa.array(matched.ravel()),
            pa.array(random.random(num * workers)),
            pa.array(np.zeros(num * workers)),
            pa.array(random.random(num * workers)),
        ],
        names=["worker", "matched_tokens", "load", "queue", "score"],
    )
    lists = pa.ListArray.from_arrays(np.arange(0, num * workers + 1, workers, dtype=np.int32), candidates)
    ends = ns(begun + took)
    requests = {
        "request_id": ids,
        "run_id": shared,
        "worker": names[chosen],
        "at_ns": ends,
        "vantage": np.full(num, "engine"),
        "state": np.full(num, "finished"),
        "arrival_ns": ns(at),
        "first_scheduled_ns": ns(begun),
        "first_token_ns": ends,
        "end_ns": ends,
        "prompt_tokens": tokens.astype(np.int64),
        "cached_tokens": np.zeros(num, dtype=np.int64),
        "computed_tokens": tokens.astype(np.int64),
        "prefill_s": took,
        "prefix_hash": random.integers(1, 200, num).astype(np.uint64),
    }
    routes = {
        "request_id": ids,
        "run_id": shared,
        "at_ns": ns(at),
        "policy": np.full(num, "affinity_with_load"),
        "chosen": names[chosen],
        "candidates": lists,
    }
    return {
        "request": _table("request", requests),
        "route": _table("route", routes),
        "step": _steps(names, span_s, chosen, begun, took),
    }


def _steps(names: np.ndarray, span_s: float, chosen: np.ndarray, begun: np.ndarray, took: np.ndarray) -> pa.Table:
    """Each prompt in chunks of 20 ms (200 tokens)."""
    parts = np.maximum(np.ceil(took / 0.02).astype(np.int64), 1)
    of = np.repeat(np.arange(len(took)), parts)
    index = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    long = took[of] / parts[of]
    end = begun[of] + (index + 1) * long
    inside = end < span_s
    of, long, end = of[inside], long[inside], end[inside]
    columns = {
        "worker": names[chosen[of]],
        "run_id": np.full(len(of), "bench"),
        "at_ns": START_NS + np.round(end * 1e9).astype(np.int64),
        "step": np.arange(len(of)),
        "duration_s": long,
        "prefill_tokens": np.maximum(np.round(long * 1e4), 1).astype(np.int64),
        "decode_tokens": np.zeros(len(of), dtype=np.int64),
        "num_running": np.ones(len(of), dtype=np.int64),
        "num_waiting_prefill": np.zeros(len(of), dtype=np.int64),
    }
    return _table("step", columns)


def _table(kind: str, columns: dict[str, Any]) -> pa.Table:
    """A table of the contract; what is not given is null."""
    schema = arrow_schema(kind)
    size = len(next(iter(columns.values())))
    arrays = [
        pa.array(columns[field.name]).cast(field.type) if field.name in columns else pa.nulls(size, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


if __name__ == "__main__":
    result = run()
    if "--json" in sys.argv:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<10} {value:.3f}" if isinstance(value, float) else f"{name:<10} {value}")
    sys.exit(0 if result["passed"] else 1)
