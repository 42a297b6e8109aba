"""The rows that are in no sealed file yet, handed to the child: Arrow streams in memory that both processes map.

Invariant: a copy ends by the deadline, and takes no more bytes than it may, however many rows there are: they come in
batches, and each is counted before it is written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from engine_probe.errors import QueryRefused
from store.sandbox.terms import MIB

if TYPE_CHECKING:
    import pyarrow as pa

    from store.deadline import Deadline
    from store.sandbox.wanted import Wanted

BATCH_ROWS: Final = 64 * 1024
_ALIGNED: Final = 64  # Arrow's alignment holds only where the stream starts aligned


@runtime_checkable
class Streams(Protocol):
    """Hot rows that come in batches, some columns of them."""

    def stream(
        self,
        kind: str,
        wanted: Wanted,
        into: Callable[[pa.RecordBatchReader], None],
        deadline: Deadline,
    ) -> None:
        """Give `into` the rows of a kind that are wanted, once more from their start where reading them failed midway.

        Raises Late, StoreBusy, ValueError for what cannot be wanted, and what `into` raises.
        """


@contextmanager
def shared(
    hot: Mapping[str, pa.Table], kinds: Mapping[str, Wanted], most_bytes: int, deadline: Deadline
) -> Iterator[tuple[dict[str, tuple[int, int]], list[int]]]:
    """Hot rows of `kinds` as Arrow IPC in memory that the child can map: (kind -> (offset, size), descriptors).

    kinds   kind -> the rows that are needed
    Raises Late, QueryRefused where they take more than `most_bytes`, and what the source of the rows raises.
    """
    layout: dict[str, tuple[int, int]] = {}
    wanted = [kind for kind in kinds if kind in hot]
    if not wanted:
        yield layout, []
        return
    with _memory_file() as file:
        for kind in wanted:
            start = file.seek(0, os.SEEK_END)
            copy = _Copy(file, kind, start + -start % _ALIGNED, most_bytes, deadline)
            _stream(hot, kind, kinds[kind], copy, deadline)
            layout[kind] = (copy.start, file.seek(0, os.SEEK_END) - copy.start)
        file.flush()
        yield layout, [file.fileno()]


class _Copy:
    """Writes the rows of one kind at `start`, also once more."""

    def __init__(self, file: Any, kind: str, start: int, most_bytes: int, deadline: Deadline) -> None:
        self.start = start
        self._file, self._kind, self._most_bytes, self._deadline = file, kind, most_bytes, deadline

    def __call__(self, reader: pa.RecordBatchReader) -> None:
        import pyarrow as pa

        self._file.truncate(self.start)
        self._file.seek(self.start)
        num_rows = 0
        with pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), reader.schema) as writer:
            for batch in reader:
                self._deadline.check()
                num_rows += batch.num_rows
                if self._file.tell() + pa.ipc.get_record_batch_size(batch) > self._most_bytes:
                    raise self._too_many(num_rows)
                writer.write_batch(batch)

    def _too_many(self, num_rows: int) -> QueryRefused:
        return QueryRefused(
            f"The statement reads more than {self._most_bytes // MIB} MiB of rows that are in no sealed file yet "
            f"(it was stopped {num_rows:,} rows into {self._kind}). Name the columns that it needs in place of *; ask for a "
            "smaller window (a condition on at_ns or arrival_ns, with one table read once); have rows sealed earlier (KVSCOPE_RETENTION__SEAL_AFTER_S), as sealed ones do not count; or raise "
            "KVSCOPE_SQL__MEMORY_BYTES.",
            kind=self._kind,
            max_bytes=self._most_bytes,
        )


def _stream(
    hot: Mapping[str, pa.Table],
    kind: str,
    wanted: Wanted,
    into: Callable[[pa.RecordBatchReader], None],
    deadline: Deadline,
) -> None:
    if isinstance(hot, Streams):
        hot.stream(kind, wanted, into, deadline)
        return
    table = hot[kind]
    if wanted.columns is not None:
        table = table.select([name for name in wanted.columns if name in table.column_names])
    into(table.to_reader(max_chunksize=BATCH_ROWS))


def _memory_file() -> Any:
    """A file without a name: shared memory where the system has it, else an unlinked temporary file."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("kvscope-sql-hot", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()
