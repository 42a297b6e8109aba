"""Events in the contract's own form: NDJSON (a header line, then a row a line with its `kind`) and Parquet.

A Parquet file tells its kind by `kvscope.kind` in its schema's metadata, by a folder `kind=NAME`, or by a name that
begins with the kind; files of a folder are read in the order of their paths. A sealed store folder
(kind=/date=/hour=) and a file sink's folder are such folders. Columns that the contract does not know are counted and
left out. Every row is judged by the same rules as at ingest, and a row that breaks them is named with its file;
samples under an engine's own names get the contract's, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from engine_probe.adapters.wire_names import canonical_samples
from engine_probe.errors import InvalidRows, KvscopeError, UnknownFormat
from engine_probe.events import KINDS
from engine_probe.readers.lines import text_lines
from engine_probe.readers.source import CHUNK_ROWS, Notes, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.wire.codec import Decoded

PARQUET: Final = (".parquet", ".pq")
NDJSON: Final = (".ndjson", ".ndjson.gz", ".jsonl", ".jsonl.gz")
_LINES_A_CHUNK: Final = 20_000


class EventFiles:
    """NDJSON and Parquet files, in this order."""

    format = "events"

    def __init__(self, files: list[Path], root: Path, others: Sequence[Path] = ()) -> None:
        self.files = files
        self._root = root
        self._others = others
        self._ignored: dict[str, int] = {}

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """Tables of up to 50,000 rows a kind."""
        num_rows = 0
        for path in self.files:
            read = self._parquet if path.name.endswith(PARQUET) else self._ndjson
            try:
                for told in read(path):
                    tables = canonical_samples(told)
                    num_rows += sum(table.num_rows for table in tables.values())
                    yield tables
            except InvalidRows as error:
                raise InvalidRows(f"{path.name}: {error.message}", **error.facts) from error
        for column, count in sorted(self._ignored.items()):
            notes.left_out.append(f"{column}: not a column of the contract ({count} rows)")
        notes.left_out += [f"{path.name}: not a file of events" for path in self._others]
        if not num_rows:
            raise UnknownFormat(f"{self._root.name} holds no rows.")

    def _parquet(self, path: Path) -> Iterator[dict[str, pa.Table]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from engine_probe.schema import conform

        try:
            with pq.ParquetFile(path) as file:
                kind = kind_of(path, self._root, file.schema_arrow.metadata or {})
                for name in file.schema_arrow.names:
                    if name not in {c.name for c in KINDS[kind]}:
                        self._ignored[f"{kind}.{name}"] = (
                            self._ignored.get(f"{kind}.{name}", 0) + file.metadata.num_rows
                        )
                for batch in file.iter_batches(batch_size=CHUNK_ROWS):
                    yield {kind: conform(kind, pa.Table.from_batches([batch]))}
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UnknownFormat(f"{path.name} cannot be read as Parquet events: {_first_line(error)}") from error

    def _ndjson(self, path: Path) -> Iterator[dict[str, pa.Table]]:
        from engine_probe.wire.codec import decode_ndjson

        lines: list[bytes] = []
        start = 1
        for number, line in text_lines(path):
            lines.append(line)
            if len(lines) >= _LINES_A_CHUNK:
                yield self._decode(decode_ndjson, lines, path, start)
                lines, start = [], number + 1
        if lines:
            yield self._decode(decode_ndjson, lines, path, start)

    def _decode(
        self, decode: Callable[[bytes], Decoded], lines: list[bytes], path: Path, start: int
    ) -> dict[str, pa.Table]:
        try:
            decoded = decode(b"\n".join(lines) + b"\n")
        except KvscopeError as error:
            begin = "" if start == 1 else f" (counted from line {start})"
            raise InvalidRows(f"{error.message}{begin}", **error.facts) from error
        for column, count in decoded.ignored_columns.items():
            self._ignored[column] = self._ignored.get(column, 0) + count
        return decoded.tables


def is_event_line(line: bytes) -> bool:
    """The first line of NDJSON events: a row with its `kind`, or a header with `source`, `epoch` or `seq`."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return False
    return isinstance(row, dict) and (row.get("kind") in KINDS or bool({"source", "epoch", "sent_ns"} & row.keys()))


def kind_of(path: Path, root: Path, metadata: Mapping[bytes, bytes]) -> str:
    """Kind of a Parquet file's rows. Raises UnknownFormat where nothing tells it."""
    told = metadata.get(b"kvscope.kind", b"").decode("utf-8", "replace")
    folders = [part.removeprefix("kind=") for part in path.parent.parts if part.startswith("kind=")]
    named = [kind for kind in KINDS if path.name.startswith(kind)]
    for kind in (told, *folders[-1:], *named):
        if kind in KINDS:
            return kind
    raise UnknownFormat(
        f"{path.name} does not tell the kind of its rows. Put it into a folder kind=NAME, or name it NAME.parquet, "
        f"with NAME one of {', '.join(KINDS)}."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
