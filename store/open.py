"""One way to open a store, whatever lies below it: the URL chooses.

kvscope.duckdb, /var/lib/kvscope/kvscope.duckdb     a DuckDB file
duckdb:///kvscope.duckdb, duckdb:////var/lib/...    the same as a URL (three slashes relative, four absolute)
:memory:, duckdb:///:memory:                        a DuckDB in memory, gone when closed
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_probe.errors import StoreMisuse

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<rest>.*)", re.DOTALL)


def open_store(url: str, *, read_only: bool = False, must_exist: bool = False, **options: Any) -> DuckDBStore:
    """Open the store at `url`; a writing open makes the file and brings its schema to this release.

    `must_exist`: do not make a file where there is none. Options go to `DuckDBStore`: num_readers, memory_limit_bytes,
    max_queued_batches, max_queued_bytes, gather_s, clock, max_threads (of DuckDB; None: the cores of this process).
    Raises StoreMisuse (no such place, no database of ours), StoreDamaged, StoreBusy (another process holds it),
    SchemaTooNew, DiskFull.
    """
    from store.border import no_database
    from store.duckdb_store import DuckDBStore

    path = path_of(url)
    if must_exist and path != ":memory:" and not Path(path).exists():
        raise no_database(Path(path))
    return DuckDBStore(path, read_only=read_only, **options)


def path_of(url: str) -> str:
    """Path of the DuckDB file that `url` names; StoreMisuse where it names something else."""
    if not url.strip():
        raise StoreMisuse("The store's path is empty. Give a path such as ./kvscope.duckdb with --store.")
    if url == ":memory:":
        return url
    found = _SCHEME.fullmatch(url)
    if found is None:
        return url
    if found["scheme"] == "duckdb":
        if not found["rest"].startswith("///") or len(found["rest"]) == 3:
            raise StoreMisuse(
                f"{url} is no store URL. Write duckdb:///relative/path or duckdb:////absolute/path.", url=url
            )
        return found["rest"][3:]
    raise StoreMisuse(
        f"{url} names a kind of store ({found['scheme']}) that this release does not have. "
        "Give a path, or duckdb:///path of a DuckDB file.",
        url=url,
    )
