"""What SQL for people reads of the embedded store, as one consistent picture.

Invariant: a row is in a sealed file or among the hot rows, never in both: the mark of each kind is read in the same
snapshot as the list of files, and rows that come later are always above the mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from engine_probe.events import KINDS
from store.conform import contract_types
from store.sandbox.sandbox import SqlData
from store.upkeep.seal import sealed_files
from store.views import views

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore


def sql_data(store: DuckDBStore, *, direct: bool) -> SqlData:
    """See `DuckDBStore.sql_data`."""
    folder = store.parquet_dir
    with store.reading() as cursor:
        cursor.execute("BEGIN")
        files = sealed_files(cursor, folder) if folder is not None else {}
        marks = cursor.execute("SELECT kind, sealed_through_ns FROM kind_state").fetchall()
        cursor.execute("COMMIT")
    sealed = {str(kind): int(through) for kind, through in marks if through is not None}
    return SqlData(
        parquet_dir=folder,
        files=files,
        hot={} if direct else HotRows(store, sealed),
        database=store.path if direct else None,
        sealed_through_ns=sealed if direct else {},
        views=[(view.name, view.select, view.doc) for view in views()],
    )


class HotRows(Mapping[str, pa.Table]):
    """Kind -> rows that are in no sealed file yet, fetched when asked for (later ones may be among them)."""

    def __init__(self, store: DuckDBStore, sealed_through_ns: Mapping[str, int]) -> None:
        self._store, self._sealed = store, sealed_through_ns

    def __getitem__(self, kind: str) -> pa.Table:
        return self.select(kind, None)

    def select(self, kind: str, columns: Sequence[str] | None) -> pa.Table:
        """The rows of a kind with some of its columns, None for all."""
        if kind not in KINDS:
            raise KeyError(kind)
        some = "*" if columns is None else ", ".join(f'"{name}"' for name in columns)
        sql = f'SELECT {some} FROM "{kind}" WHERE received_ns > ?'
        return contract_types(kind, self._store.query(sql, [self._sealed.get(kind, -(2**63) + 1)]))

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)
