"""`export`: rows of a window as files that other tools and `kvscope import` read: Parquet, NDJSON, CSV.

Invariant: a file holds exactly the contract's columns of one kind (NDJSON rows also their kind), gets its name only
when it is whole, and never replaces another. Lists, maps and structs are nested in Parquet and NDJSON, JSON text in
CSV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from engine_probe.errors import StoreMisuse, UsageError
from engine_probe.events import CONTRACT_VERSION, KINDS, column_names
from store.border import border
from store.interface import Window
from store.statements import in_window, instant_column, literal, render_literal, table_of

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore

Format = Literal["parquet", "ndjson", "csv"]
FORMATS: Final[tuple[Format, ...]] = ("parquet", "ndjson", "csv")


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """One file written."""

    kind: str
    path: str
    num_rows: int
    num_bytes: int


def export(
    store: DuckDBStore,
    folder: Path,
    window: Window,
    *,
    kinds: Sequence[str] | None = None,
    file_format: Format = "parquet",
    progress: Callable[[str], None] | None = None,
) -> list[ExportedFile]:
    """Write one file a kind that has rows in the window; a request belongs to its arrival, the rest to `at_ns`.

    Raises UsageError for an unknown format, StoreMisuse for an unknown kind or a file that is there already.
    """
    if file_format not in FORMATS:
        raise UsageError(f"There is no format {file_format!r}. The formats are {', '.join(FORMATS)}.")
    for kind in kinds or ():
        table_of(kind)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in kinds or KINDS:
        file = _export_kind(store, folder, window, kind, file_format)
        if file is not None:
            written.append(file)
            if progress is not None:
                progress(f"wrote {file.num_rows} {kind} rows to {file.path}")
    return written


def _export_kind(
    store: DuckDBStore, folder: Path, window: Window, kind: str, file_format: Format
) -> ExportedFile | None:
    target = folder / f"{kind}.{file_format}"
    if target.exists():
        raise StoreMisuse(f"{target} exists already. Give an empty folder.", path=str(target))
    condition = " AND ".join(render_literal(part) for part in in_window(kind, window))
    source = f'FROM "{kind}" WHERE {condition} ORDER BY {instant_column(kind)}, rowid'
    temporary = folder / f"{kind}.{file_format}.tmp"
    try:
        with store.reading() as cursor, border(str(target)):  # what fails now fails at the file
            (count,) = cursor.execute(
                f"COPY (SELECT {_columns(kind, file_format)} {source}) "
                f"TO {literal(str(temporary))} {_options(kind, file_format)}"
            ).fetchone() or (0,)
        if not count:
            return None
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    return ExportedFile(kind, str(target), int(count), target.stat().st_size)


def _columns(kind: str, file_format: Format) -> str:
    """The contract's columns; NDJSON rows carry their kind, CSV cells of nested columns are JSON."""
    if file_format == "csv":
        nested = {column.name for column in KINDS[kind] if "<" in column.type or column.type == "struct"}
        return ", ".join(f'to_json("{n}") AS "{n}"' if n in nested else f'"{n}"' for n in column_names(kind))
    plain = ", ".join(f'"{name}"' for name in column_names(kind))
    return f"'{kind}' AS kind, {plain}" if file_format == "ndjson" else plain


def _options(kind: str, file_format: Format) -> str:
    if file_format == "parquet":
        metadata = f"{{'kvscope.kind': '{kind}', 'kvscope.contract': '{CONTRACT_VERSION}'}}"
        return f"(FORMAT parquet, COMPRESSION zstd, KV_METADATA {metadata})"
    return "(FORMAT json)" if file_format == "ndjson" else "(FORMAT csv, HEADER)"
