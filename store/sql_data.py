"""What SQL for people reads of the embedded store, as one consistent picture.

Invariant: a row is in a sealed file or among the hot rows, never in both: the mark of each kind is read in the same
snapshot as the list of files, and rows that come later are always above the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from engine_probe.events import KINDS
from store.conform import contract_stream, contract_types
from store.deadline import Deadline
from store.sandbox.sandbox import SqlData
from store.sandbox.wanted import Wanted, column_types
from store.upkeep.seal import sealed_files
from store.views import views

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore


def sql_data(store: DuckDBStore, deadline: Deadline | None, *, direct: bool) -> SqlData:
    """See `DuckDBStore.sql_data`."""
    folder = store.parquet_dir
    with store.reading(deadline) as cursor:
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
        return contract_types(kind, self._store.query(self._text(kind, Wanted())))

    def __contains__(self, kind: object) -> bool:
        return kind in KINDS  # a Mapping's own would fetch the rows

    def stream(
        self,
        kind: str,
        wanted: Wanted,
        into: Callable[[pa.RecordBatchReader], None],
        deadline: Deadline,
    ) -> None:
        """See `sandbox.hot.Streams`."""
        text = self._text(kind, wanted)
        self._store.stream(text, lambda reader: into(contract_stream(kind, reader)), deadline)

    def _text(self, kind: str, wanted: Wanted) -> str:
        if kind not in KINDS:
            raise KeyError(kind)
        unsealed = [f"received_ns > {self._sealed[kind]}"] if kind in self._sealed else []
        return wanted.sql(kind, column_types(kind), unsealed)

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)
