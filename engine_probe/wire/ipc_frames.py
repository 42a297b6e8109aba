"""The frames of concatenated Arrow IPC streams, read before Arrow itself touches the bytes.

Idea: Arrow takes the end of a body for the end of a stream, so a stream cut off between two messages looks whole; and a
compressed buffer says its size only when it is being decompressed. Walking the frames first (some dozens of bytes a
message) finds truncation and trailing junk at their byte, and tells how large the body becomes before any of it is.
Invariant: every read is bounds-checked; hostile bytes end in `InvalidRows`, `UnknownFormat` or `TooLarge`.
Source: Arrow columnar format 1.x, "Encapsulated message format" and Message.fbs (field numbers below).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from engine_probe.errors import InvalidRows, TooLarge, UnknownFormat
from engine_probe.wire.row_errors import invalid_rows

CONTINUATION = 0xFFFFFFFF
END_OF_STREAM = struct.pack("<II", CONTINUATION, 0)
SCHEMA, DICTIONARY_BATCH, RECORD_BATCH = 1, 2, 3
MAX_STREAMS = 256
MAX_MESSAGES = 4096
"""A body of very many tiny messages would cost more to open than its bytes are worth."""
_UNCOMPRESSED = -1


@dataclass(frozen=True, slots=True)
class Frame:
    """One IPC stream inside a body.

    start, end      its bytes: body[start:end], the end-of-stream marker included
    num_rows        rows its record batches claim
    decoded_bytes   bytes of all its buffers once decompressed
    """

    start: int
    end: int
    num_rows: int
    num_messages: int
    decoded_bytes: int


def split_streams(body: bytes | bytearray | memoryview, max_decoded_bytes: int | None = None) -> list[Frame]:
    """The complete IPC streams that make up `body`.

    Raises UnknownFormat (these bytes are no Arrow IPC stream), InvalidRows (cut off, damaged, junk after a stream) and
    TooLarge (more than `max_decoded_bytes` after decompression, or very many tiny messages).
    """
    view = memoryview(body)
    frames: list[Frame] = []
    position, budget, messages_left = 0, max_decoded_bytes, MAX_MESSAGES
    while position < len(view):
        if len(frames) == MAX_STREAMS:
            raise TooLarge(
                f"the body holds more than {MAX_STREAMS} Arrow streams; put all rows of a kind into one",
                limit=MAX_STREAMS,
            )
        frame = _walk(view, position, len(frames), budget, messages_left)
        messages_left -= frame.num_messages
        if budget is not None:
            budget -= frame.decoded_bytes
        frames.append(frame)
        position = frame.end
    return frames


def _walk(view: memoryview, start: int, index: int, budget: int | None, messages_left: int) -> Frame:
    position, num_rows, decoded_bytes, num_messages = start, 0, 0, 0
    while True:
        place = f"stream {index}, byte {position}"
        if len(view) - position < 8:
            if num_messages == 0:
                raise _no_stream(view, position, index)
            raise _truncated(place, len(view))
        mark, size = struct.unpack_from("<Ii", view, position)
        if mark != CONTINUATION:
            if num_messages == 0:
                raise _no_stream(view, position, index)
            raise invalid_rows(
                "is no Arrow IPC message", place=place, expected="a message, or the end-of-stream marker"
            )
        if size == 0:
            if num_messages == 0:
                raise _no_stream(view, position, index)
            return Frame(start, position + 8, num_rows, num_messages, decoded_bytes)
        metadata = position + 8
        if size < 0 or size > len(view) - metadata:
            raise _truncated(place, len(view))
        try:
            message = _Message(view[metadata : metadata + size])
            body_length, rows = message.body_length, message.num_rows
        except (struct.error, ValueError, IndexError) as error:
            raise invalid_rows("has message metadata that cannot be read", place=place) from error
        if (message.header_type == SCHEMA) != (num_messages == 0):
            raise invalid_rows("has its messages in the wrong order", place=place, expected="one schema, then batches")
        position = metadata + size
        if body_length < 0 or rows < 0:
            raise invalid_rows("claims a negative length", place=place)
        if body_length > len(view) - position:
            raise _truncated(place, len(view))
        num_rows += rows
        try:
            decoded_bytes += message.decoded_bytes(view[position : position + body_length])
        except (struct.error, ValueError, IndexError) as error:
            raise invalid_rows("has buffers that lie outside its body", place=place) from error
        if budget is not None and decoded_bytes > budget:
            raise TooLarge(
                f"{place}: the body is larger than allowed once decompressed; send fewer rows a batch",
                limit_bytes=budget,
                place=place,
            )
        position += body_length
        num_messages += 1
        if num_messages > messages_left:
            raise TooLarge(
                f"the body holds more than {MAX_MESSAGES} Arrow messages; write larger record batches",
                limit=MAX_MESSAGES,
            )


class _Message:
    """The few fields of a `Message` flatbuffer that the walk needs."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        (root,) = struct.unpack_from("<I", buffer, 0)
        fields = self._fields(root)
        header_type = self._scalar("<B", fields, 1)
        body_length = self._scalar("<q", fields, 3)
        self.header_type: int = header_type
        self.body_length: int = body_length
        self.num_rows = 0
        self._batch: list[int] | None = None
        if header_type in (RECORD_BATCH, DICTIONARY_BATCH):
            table = self._table(fields, 2)
            if header_type == DICTIONARY_BATCH:
                self._batch = self._fields(self._table(self._fields(table), 1))
            else:
                self._batch = self._fields(table)
                self.num_rows = self._scalar("<q", self._batch, 0)

    def decoded_bytes(self, body: memoryview) -> int:
        """Bytes of the batch's buffers, after decompression where they are compressed."""
        if self._batch is None:
            return 0
        if self._offset(self._batch, 2) == 0:
            return 0
        vector = self._table(self._batch, 2)
        (count,) = struct.unpack_from("<I", self._buffer, vector)
        pairs = np.frombuffer(self._buffer, dtype="<i8", count=2 * count, offset=vector + 4).reshape(-1, 2)
        offsets, lengths = pairs[:, 0], pairs[:, 1]
        if (pairs < 0).any() or (lengths > len(body) - offsets).any():
            raise ValueError("buffer outside the body")
        if self._offset(self._batch, 3) == 0:
            return sum(lengths.tolist())
        offsets = offsets[lengths >= 8]
        sizes: list[int] = [struct.unpack_from("<q", body, int(offset))[0] for offset in offsets]
        if any(size < _UNCOMPRESSED for size in sizes):
            raise ValueError("negative decompressed size")
        plain = sum(int(n) for n, size in zip(lengths[lengths >= 8], sizes, strict=True) if size == _UNCOMPRESSED)
        return plain + sum(size for size in sizes if size != _UNCOMPRESSED)

    def _fields(self, table: int) -> list[int]:
        """Absolute positions of a table's fields by number; 0 where a field is absent."""
        (back,) = struct.unpack_from("<i", self._buffer, table)
        vtable = table - back
        if vtable < 0 or table < 0:
            raise ValueError("vtable outside the metadata")
        (size,) = struct.unpack_from("<H", self._buffer, vtable)
        if size < 4:
            raise ValueError("vtable too small")
        slots = struct.unpack_from(f"<{(size - 4) // 2}H", self._buffer, vtable + 4)
        return [table + slot if slot else 0 for slot in slots]

    @staticmethod
    def _offset(fields: list[int], number: int) -> int:
        return fields[number] if number < len(fields) else 0

    def _scalar(self, code: str, fields: list[int], number: int) -> int:
        position = self._offset(fields, number)
        return int(struct.unpack_from(code, self._buffer, position)[0]) if position else 0

    def _table(self, fields: list[int], number: int) -> int:
        position = self._offset(fields, number)
        if position == 0:
            raise ValueError("a required field is absent")
        relative: int = struct.unpack_from("<I", self._buffer, position)[0]
        return position + relative


def _no_stream(view: memoryview, position: int, index: int) -> UnknownFormat | InvalidRows:
    if index == 0:
        return UnknownFormat(
            "the body is no Arrow IPC stream; write each kind with pyarrow.ipc.new_stream, or send JSON",
            place=f"byte {position}",
        )
    return invalid_rows(
        f"holds {len(view) - position} bytes of junk after the last stream",
        place=f"byte {position}",
        expected="another Arrow IPC stream, or the end of the body",
    )


def _truncated(place: str, size: int) -> InvalidRows:
    return invalid_rows(
        f"is cut off: the body ends at byte {size} in the middle of a message",
        place=place,
        expected="the rest of the stream up to its end-of-stream marker",
    )
