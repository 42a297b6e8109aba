"""Writes the small database of a release that the upgrade test opens for ever: `python -m tests.data.databases.make`.

Run it once, when a release is made, and never for an older release. Beside `<version>.db.gz` stands `<version>.json`
with what it holds, so that the test needs no code of that release.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import duckdb

from engine_probe.events import KINDS, Column
from engine_probe.schema import table_from_rows
from store.interface import Batch, BatchId
from store.open import open_store

FOLDER = Path(__file__).parent
START_NS = 1_764_000_000_000_000_000


def value(column: Column, row: int) -> object:
    """A value of the column that tells its row; row 1 leaves out what may be unknown."""
    if row == 1 and not column.required:
        return None
    if column.choices:
        return column.choices[row % len(column.choices)]
    scalars = {
        "string": f"{column.name}-{row}",
        "int64": row + 1,
        "uint64": 2**64 - 1 - row,
        "float64": 0.5,
        "bool": True,
    }
    if column.name.endswith("_ns"):
        scalars["int64"] = START_NS + row
    if column.type == "map<string,string>":
        return {"key": f"{row}"}
    if column.fields:
        struct = {name: scalars[type_] for name, type_ in column.fields}
        return struct if column.type == "struct" else [struct]
    return [scalars[column.type[5:-1]]] if column.type.startswith("list<") else scalars[column.type]


def main() -> None:
    """Write the two files of the version that is installed."""
    name = version("kvscope")
    rows = {
        kind: [{c.name: value(c, row) for c in KINDS[kind] if c.name != "run_id"} for row in range(3)] for kind in KINDS
    }
    runs = {kind: [row | {"run_id": "exp"} for row in found] for kind, found in rows.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.db"
        duckdb.connect(str(path), config={"default_block_size": 16384}).close()
        with open_store(str(path), clock=lambda: START_NS) as store:
            for seq, tables in ((0, rows), (2, runs)):
                tables_of = {kind: table_from_rows(kind, found) for kind, found in tables.items()}
                store.append(Batch(tables_of, BatchId("probe", "e", seq), sent_ns=START_NS))
            store.checkpoint()
        (FOLDER / f"{name}.db.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    held = {"rows": dict.fromkeys(KINDS, 6), "last_seq": 2, "missing": [[1, 1]], "runs": ["exp"], "live": rows}
    (FOLDER / f"{name}.json").write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
