"""Compressed answers, read in bounded memory: gzip, deflate and zstd as they come; anything else is passed on unread.

The proxy passes the compressed bytes on; this is for looking only. Invariant: `feed` holds one piece of decompressed data at
a time, at most `STEP_BYTES` (zstd: 2 MiB, its worst case), and a stream that unfolds to more than `MAX_BYTES` is read no further.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final, Protocol

STEP_BYTES: Final = 1 << 18
MAX_BYTES: Final = 1 << 28
_ZSTD_WINDOW_BYTES: Final = 1 << 24


class Unreadable(Exception):
    """The bytes are not what the encoding says, or unfold to too much. The message is free of content."""


class Inflater(Protocol):
    """Decompresses one body."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decompressed pieces, one by one. Raises Unreadable."""
        ...


class Identity:
    """A body that is not compressed."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data


class Zlib:
    """gzip, or deflate (with zlib's header or, as some servers send it, without)."""

    def __init__(self, *, is_gzip: bool) -> None:
        self._is_gzip = is_gzip
        self._total = 0
        self._begin = b""
        self._inflate = zlib.decompressobj(wbits=31) if is_gzip else None

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._inflate is None:
            self._begin = data = self._begin + data
            if len(data) < 2:
                return
            # zlib's header is told by its check sum (RFC 1950, section 2.2); without it the stream is bare.
            has_header = data[0] & 0x0F == 8 and (data[0] * 256 + data[1]) % 31 == 0
            self._inflate = zlib.decompressobj(wbits=15 if has_header else -15)
        while data:
            try:
                piece = self._inflate.decompress(data, STEP_BYTES)
            except zlib.error as error:
                raise Unreadable(f"it is not {'gzip' if self._is_gzip else 'deflate'}") from error
            self._total += len(piece)
            if self._total > MAX_BYTES:
                raise Unreadable(f"it unfolds to more than {MAX_BYTES >> 20} MiB")
            if piece:
                yield piece
            data = self._inflate.unconsumed_tail
            if self._inflate.eof:
                # Several gzip members in a row are one body (RFC 1952, section 2.2).
                data = self._inflate.unused_data
                if data and not self._is_gzip:
                    raise Unreadable("there is something behind the deflate stream")
                self._inflate = zlib.decompressobj(wbits=31)


class Zstd:
    """zstd, frames in a row."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._total = 0
        self._inflate = self._new()
        self._is_used = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        # In small steps: the library takes no bound for one step's output, and its best ratio is bounded by the block
        # size of the format (128 KiB a block of a few bytes).
        for at in range(0, len(data), 64):
            part = data[at : at + 64]
            while part:
                try:
                    piece = self._inflate.decompress(part)
                except self._module.ZstdError as error:
                    raise Unreadable("it is not zstd") from error
                self._total += len(piece)
                if self._total > MAX_BYTES:
                    raise Unreadable(f"it unfolds to more than {MAX_BYTES >> 20} MiB")
                if piece:
                    yield piece
                part = b""
                if self._inflate.eof:
                    part = self._inflate.unused_data
                    self._inflate = self._new()

    def _new(self) -> Any:
        return self._module.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()


def inflater(encoding: bytes | None) -> Inflater | None:
    """For a Content-Encoding; None where it cannot be read here."""
    name = (encoding or b"identity").strip().lower()
    if name in (b"", b"identity"):
        return Identity()
    if name in (b"gzip", b"x-gzip"):
        return Zlib(is_gzip=True)
    if name == b"deflate":
        return Zlib(is_gzip=False)
    if name == b"zstd":
        try:
            import zstandard
        except ImportError:
            return None
        return Zstd(zstandard)
    return None
