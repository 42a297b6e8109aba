"""The words of SQL for people: what a statement may use, what it may read, what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import pyarrow as pa

    from store.deadline import Deadline

MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SqlLimits:
    """What one statement may use.

    timeout_s          wall seconds from the hand-over to the last row, then the child is killed
    memory_bytes       memory of the query beyond that of an idle child (about 150 MiB); as much again for hot rows
    max_rows           rows of a result; more are left out and `truncated` says so
    max_result_bytes   Arrow bytes of a result, likewise
    threads            DuckDB threads of one child
    wait_s             how long to wait for a free child before StoreBusy
    """

    timeout_s: float = 30.0
    memory_bytes: int = 1024 * MIB
    max_rows: int = 1_000_000
    max_result_bytes: int = 256 * MIB
    threads: int = 2
    wait_s: float = 2.0


@dataclass(frozen=True, slots=True)
class SqlResult:
    """Rows of one statement.

    columns     name and DuckDB type of each column, in order: {"name": ..., "type": ...}
    truncated   rows were left out, because of `max_rows` or `max_result_bytes`
    elapsed_s   seconds in the child, without its start
    walls       what shut the child in: rlimits, landlock, seccomp
    """

    columns: list[dict[str, str]]
    table: pa.Table
    truncated: bool
    elapsed_s: float
    walls: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For `msgspec.json`: columns, rows as lists (see `sql_json`), truncated."""
        from store.sql_json import json_rows

        return {"columns": self.columns, "rows": json_rows(self.table), "truncated": self.truncated}

    def to_ipc(self) -> bytes:
        """One Arrow IPC stream; columns and `truncated` are in its metadata as `kvscope.sql`."""
        import pyarrow as pa

        facts = {"columns": self.columns, "truncated": self.truncated, "elapsed_s": self.elapsed_s}
        table = self.table.replace_schema_metadata({"kvscope.sql": json.dumps(facts)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())

    @classmethod
    def from_ipc(cls, body: bytes) -> SqlResult:
        """The inverse of `to_ipc`. Raises ValueError (pyarrow.ArrowInvalid is one) where the body is something else."""
        import pyarrow as pa

        with pa.ipc.open_stream(body) as reader:
            table = reader.read_all()
        facts = json.loads((table.schema.metadata or {}).get(b"kvscope.sql", b"{}"))
        if "columns" not in facts:
            raise ValueError("the Arrow stream is no SQL result")
        return cls(facts["columns"], table.replace_schema_metadata(None), facts["truncated"], facts["elapsed_s"])


@dataclass(frozen=True, slots=True)
class SqlData:
    """What a statement may read: one consistent picture of a store.

    parquet_dir         folder that holds every one of `files`; only reading below it is possible
    files               kind -> sealed Parquet files; None: every `kind=*/**/*.parquet` below `parquet_dir`
    hot                 kind -> rows that are in no file; looked up only for the kinds that the statement names, and
                        only for the columns that it names, in batches, where it is a `hot.Streams`
    database            DuckDB file that the child attaches read-only (direct mode: no process has it open for writing)
    sealed_through_ns   with `database`: kind -> rows received up to this instant are in `files` and left out there
    views               (name, SELECT text[, what a row is]) of the store's own views over the kinds, in order of need
    """

    parquet_dir: Path | None = None
    files: Mapping[str, Sequence[Path]] | None = None
    hot: Mapping[str, pa.Table] = field(default_factory=dict)
    database: Path | None = None
    sealed_through_ns: Mapping[str, int] = field(default_factory=dict)
    views: Sequence[tuple[str, ...]] = ()


Picture: TypeAlias = "SqlData | Callable[[Deadline], SqlData]"
"""What a statement may read, or how it is taken once the statement's time has begun."""
