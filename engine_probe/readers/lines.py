"""Text that people keep, plain, gzip or zstd: read line by line or whole, bounded, every fault named with file and line."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from engine_probe.errors import UnknownFormat

MAX_LINE_BYTES = 64 << 20
MAX_DOCUMENT_BYTES = 512 << 20
"""A whole JSON document (or one line of a benchmark's output) may have so many bytes, decompressed."""

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_BOM: Final = b"\xef\xbb\xbf"
_DAMAGED: Final = (gzip.BadGzipFile, zlib.error, OSError)
# JSON has no such numbers, but Python's own encoder writes them: strings are skipped, so that text stays as it is. A
# string that does not end is taken to the end, so that its quotes are not tried one by one.
_NOT_NUMBERS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|(-?\b(?:NaN|Infinity)\b)', re.DOTALL)


def open_plain(path: Path) -> BinaryIO:
    """The file's bytes, decompressed where they are gzip or zstd (told by content, not by name)."""
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic.startswith(_GZIP):
        return gzip.open(path, "rb")  # type: ignore[return-value]  # binary, by its mode
    if magic == _ZSTD:
        return _open_zstd(path)
    return path.open("rb")


def head(path: Path, num_bytes: int) -> bytes:
    """The first bytes, decompressed. Raises UnknownFormat for a compressed file that is damaged before they end."""
    try:
        with open_plain(path) as stream:
            return stream.read(num_bytes)
    except (EOFError, *_DAMAGED) as error:
        _reraise_of_the_system(error)
        raise UnknownFormat(f"{path} is a damaged or half {_packing(path)} file: {error}. Copy it again.") from error


def text_lines(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes without the newline) of every line that is not empty.

    Raises UnknownFormat for a file that was cut off, is damaged, or has a line beyond `max_line_bytes`.
    """
    number = 0
    try:
        with open_plain(path) as stream:
            while line := stream.readline(max_line_bytes + 1):
                number += 1
                if len(line) > max_line_bytes:
                    raise UnknownFormat(
                        f"{path.name}, line {number} is longer than {max_line_bytes} bytes.", line=number
                    )
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line and not line.isspace():
                    yield number, line.rstrip(b"\r\n")
    except (EOFError, *_DAMAGED) as error:
        _reraise_of_the_system(error)
        if isinstance(error, EOFError) or "Truncated" in str(error):
            raise UnknownFormat(
                f"{path.name} was cut off after line {number}: the {_packing(path)} stream has no end. "
                "Copy the file again.",
                line=number,
            ) from error
        raise UnknownFormat(
            f"{path.name} is damaged after line {number}: {error}. Copy the file again.", line=number
        ) from error


def json_lines(
    path: Path, required: tuple[str, ...] = (), max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line. Raises UnknownFormat naming file, line and what is missing."""
    decode = msgspec.json.Decoder(dict[str, Any])
    for number, line in text_lines(path, max_line_bytes):
        row: dict[str, Any] = decode_json(decode, line, f"{path.name}, line {number}", line=number)
        for key in required:
            if key not in row:
                raise UnknownFormat(f"{path.name}, line {number} has no {key!r}.", line=number)
        yield number, row


def document(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The whole file, decompressed. Raises UnknownFormat where it is damaged, or larger than `max_bytes`."""
    body = head(path, max_bytes + 1)
    if len(body) > max_bytes:
        raise UnknownFormat(
            f"{path.name} holds more than {max_bytes >> 20} MiB in one JSON document; it cannot be read whole."
        )
    return body.removeprefix(_BOM)


def decode_json(decoder: msgspec.json.Decoder[Any], text: bytes | msgspec.Raw, where: str, **facts: Any) -> Any:
    """`text` decoded; NaN and Infinity, which Python writes and JSON does not know, become null.

    Raises UnknownFormat naming `where`, and the byte or the key at which it is not what was expected.
    """
    try:
        try:
            return decoder.decode(text)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            text = bytes(text)
            if b"NaN" not in text and b"Infinity" not in text:
                raise
        return decoder.decode(_NOT_NUMBERS.sub(lambda found: b"null" if found[1] else found[0], text))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        if isinstance(error, msgspec.ValidationError):
            raise UnknownFormat(f"{where} is not what was expected there: {error}", **facts) from error
        if "truncated" in str(error):
            size = len(memoryview(text))
            raise UnknownFormat(
                f"{where} is not a JSON object: it ends in the middle, after {size} bytes. Is the file complete?",
                **facts,
            ) from error
        raise UnknownFormat(f"{where} is not a JSON object: {error}", **facts) from error


def _open_zstd(path: Path) -> BinaryIO:
    """Frames one after another, decompressed in bounded pieces; a frame without its end is an OSError."""
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), 1 << 16)


def _packing(path: Path) -> str:
    with path.open("rb") as stream:
        return "zstd" if stream.read(4) == _ZSTD else "gzip"


def _reraise_of_the_system(error: BaseException) -> None:
    """An OSError of the system (no permission, a broken disk) is no fault of the file's form."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
