"""What a row costs on disk: reference requests and narrow block events in the database, in Parquet, and as Arrow.

The reference row is that of design section 11. Random hashes do not compress, so 128 block hashes are 1 KiB of it.

Run: .venv/bin/python bench/disk.py [--json]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.reference_rows import blocks, requests
from store.interface import Batch, BatchId
from store.open import open_store
from store.upkeep.seal import seal


def run(request_rows: int = 20_000, block_rows: int = 400_000) -> dict[str, Any]:
    """Bytes a row by kind and place, and `ratio` to the bytes of the same row as Arrow in memory."""
    tables = {
        "request": [requests(2_000, seed) for seed in range(request_rows // 2_000)],
        "block": [blocks(50_000, seed) for seed in range(block_rows // 50_000)],
    }
    return {kind: _kind(kind, parts) for kind, parts in tables.items()}


def _kind(kind: str, parts: list[pa.Table]) -> dict[str, Any]:
    count = sum(part.num_rows for part in parts)
    arrow = sum(part.nbytes for part in parts)
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        path = Path(folder) / "k.duckdb"
        with open_store(str(path)) as store:
            store.checkpoint()
            empty = store.data_bytes()
            for seq, part in enumerate(parts):
                store.append(Batch({kind: part}, BatchId("bench", "e", seq)))
            log = store._database.log_bytes()
            store.checkpoint()
            database = store.data_bytes() - empty
            parquet = seal(store, older_than_s=0.0).num_bytes
    places = {"arrow": arrow, "log": log, "database": database, "parquet": parquet}
    return {
        "rows": count,
        "bytes_per_row": {place: num_bytes / count for place, num_bytes in places.items()},
        "ratio": {place: num_bytes / arrow for place, num_bytes in places.items()},
    }


def render(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [f"{'bytes a row':12}" + "".join(f"{place:>18}" for place in ("arrow", "log", "database", "parquet"))]
    for kind, row in figures.items():
        cells = [f"{row['bytes_per_row'][place]:10.1f} ({row['ratio'][place]:4.2f})" for place in row["ratio"]]
        lines.append(f"{kind:12}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    found = run()
    print(json.dumps(found, indent=2) if "--json" in sys.argv else render(found))
