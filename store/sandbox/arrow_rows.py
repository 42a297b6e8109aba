"""Rows of a statement that come as Arrow, from a process that a person's text may have broken.

Invariant: a batch takes no more memory than its bytes say, and what is kept is valid. Arrow makes more of compressed bytes than there
are, and of bytes that are named by many columns; both are refused before, and after the batch was looked at without a copy.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

_HEADER_TYPE, _HEADER, _CUSTOM_METADATA = 1, 2, 4  # fields of a Message, Arrow's format/Message.fbs
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3  # types of its header
_DATA: Final = 1  # field of a DictionaryBatch: a RecordBatch
_COMPRESSION: Final = 3  # field of a RecordBatch; before Arrow 1.0 the custom metadata of its message said so


class ArrowRows:
    """Takes streams of Arrow, a batch each; `table` are their rows.

    max_rows    of all together
    max_bytes   of the buffers of all together
    """

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self._rows_left, self._bytes_left = max_rows, max_bytes
        self._batches: list[pa.RecordBatch] = []

    def take(self, body: memoryview) -> None:
        """The batch of one stream. Raises ValueError for what is none, and for more than is allowed."""
        import pyarrow as pa

        try:
            _refuse_what_grows(pa.py_buffer(body))
            with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
                for number, batch in enumerate(reader):
                    if number:
                        raise ValueError("more than one batch in a stream")
                    self._rows_left -= batch.num_rows
                    self._bytes_left -= batch.nbytes
                    if self._rows_left < 0 or self._bytes_left < 0:
                        raise ValueError("more rows, or bytes of them, than are allowed")
                    batch.validate(full=True)
                    self._batches.append(batch)
        except (pa.ArrowException, OSError, struct.error) as error:
            raise ValueError(f"Arrow that is none: {error}") from error

    @property
    def table(self) -> pa.Table:
        """All rows. Raises ValueError where no schema came, or more than one."""
        import pyarrow as pa

        return pa.Table.from_batches(self._batches)


def _refuse_what_grows(stream: pa.Buffer) -> None:
    """Raises ValueError for a message that is neither a schema nor a batch of plain bytes."""
    import pyarrow as pa

    reader = pa.ipc.MessageReader.open_stream(stream)
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        metadata = message.metadata.to_pybytes()
        root = _table(metadata, 0)
        kind, header = _field(metadata, root, _HEADER_TYPE), _field(metadata, root, _HEADER)
        if kind is None or header is None or metadata[kind] not in (_SCHEMA, _DICTIONARY, _RECORD_BATCH):
            raise ValueError(f"a {message.type} among the rows")
        if metadata[kind] == _SCHEMA:
            continue
        batch: int | None = header
        if metadata[kind] == _DICTIONARY:
            batch = _field(metadata, _table(metadata, header), _DATA)
        if batch is None or _field(metadata, _table(metadata, batch), _COMPRESSION) is not None:
            raise ValueError("compressed rows")
        if _field(metadata, root, _CUSTOM_METADATA) is not None:
            raise ValueError("rows with metadata of their own")


def _table(flat: bytes, at: int) -> int:
    """Where the table lies that is named at `at`. Raises struct.error."""
    return int(at + struct.unpack_from("<I", flat, at)[0])


def _field(flat: bytes, table: int, number: int) -> int | None:
    """Where a field of a table lies in a flatbuffer; None where the table does not have it. Raises struct.error."""
    (back,) = struct.unpack_from("<i", flat, table)
    (size,) = struct.unpack_from("<H", flat, table - back)
    at = 4 + 2 * number
    offset = struct.unpack_from("<H", flat, table - back + at)[0] if at + 2 <= size else 0
    return table + offset if offset else None
