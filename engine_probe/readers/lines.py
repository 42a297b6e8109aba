"""JSON objects a line, plain or gzip: read one by one, bounded, and every fault named with file and line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine_probe.errors import UnknownFormat

MAX_LINE_BYTES = 64 << 20


def open_plain(path: Path) -> BinaryIO:
    """The file's bytes, decompressed where they are gzip (told by content, not by name)."""
    with path.open("rb") as stream:
        is_gzip = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else path.open("rb")  # type: ignore[return-value]


def head(path: Path, num_bytes: int) -> bytes:
    """The first bytes, decompressed. Raises UnknownFormat for a gzip file that is damaged before they end."""
    try:
        with open_plain(path) as stream:
            return stream.read(num_bytes)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnknownFormat(f"{path} is a damaged or half gzip file: {error}. Copy it again.") from error


def text_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes without the newline) of every line that is not empty.

    Raises UnknownFormat for a file that was cut off, is damaged, or has a line beyond 64 MiB.
    """
    number = 0
    try:
        with open_plain(path) as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise UnknownFormat(
                        f"{path.name}, line {number} is longer than {MAX_LINE_BYTES} bytes.", line=number
                    )
                if not line.isspace():
                    yield number, line.rstrip(b"\r\n")
    except EOFError as error:
        raise UnknownFormat(
            f"{path.name} was cut off after line {number}: the gzip stream has no end. Copy the file again.",
            line=number,
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UnknownFormat(
            f"{path.name} is damaged after line {number}: {error}. Copy the file again.", line=number
        ) from error


def json_lines(path: Path, required: tuple[str, ...] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line. Raises UnknownFormat naming file, line and what is missing."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for number, line in text_lines(path):
        try:
            row = decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise UnknownFormat(f"{path.name}, line {number} is not a JSON object: {error}", line=number) from error
        for key in required:
            if key not in row:
                raise UnknownFormat(f"{path.name}, line {number} has no {key!r}.", line=number)
        yield number, row
