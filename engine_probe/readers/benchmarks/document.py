"""One JSON object of a benchmark, read key by key: what is not asked for (prompts, answers) is never decoded.

Invariant: a value of another type than promised raises UnknownFormat naming the file, the key and the place in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, TypeVar, cast

import msgspec

from engine_probe.errors import UnknownFormat
from engine_probe.readers.lines import decode_json

T = TypeVar("T")
Numbers = list[float | None]
Counts = list[int | None]

_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_NUMBER_STARTS: Final = frozenset(b"-0123456789")


class Document:
    """Top-level keys of one object, each decoded when it is asked for. `where` names the file (and line) in errors."""

    def __init__(self, text: bytes | msgspec.Raw, where: str) -> None:
        self.where = where
        self._parts: dict[str, msgspec.Raw] = decode_json(_OBJECT, text, where)

    def __contains__(self, key: str) -> bool:
        return key in self._parts

    def keys(self) -> list[str]:
        return list(self._parts)

    def get(self, key: str, type_: type[T]) -> T | None:
        """The value, or None where it is absent or null. Raises UnknownFormat where it is of another type."""
        part = self._parts.get(key)
        if part is None or _begins(part, b"null"):
            return None
        return cast(T, decode_json(_decoder(cast(Any, type_)), part, f"{self.where}: {key}", key=key))

    def need(self, key: str, type_: type[T]) -> T:
        """The value. Raises UnknownFormat where it is absent, null, or of another type."""
        value = self.get(key, type_)
        if value is None:
            raise UnknownFormat(f"{self.where} has no {key!r}.", key=key)
        return value

    def part(self, key: str) -> Document | None:
        """An object inside; None where it is absent or no object."""
        part = self._parts.get(key)
        if part is None or not _begins(part, b"{"):
            return None
        return Document(part, f"{self.where}: {key}")

    def each(self, key: str) -> Iterator[Document]:
        """Objects of a list inside, one by one; nothing where it is absent."""
        part = self._parts.get(key)
        if part is None or _begins(part, b"null"):
            return
        for position, item in enumerate(decode_json(_LIST, part, f"{self.where}: {key}", key=key)):
            yield Document(item, f"{self.where}: {key}[{position}]")

    def scalars(self) -> dict[str, float]:
        """Every top-level value that is a finite number."""
        found = {}
        for key, part in self._parts.items():
            if memoryview(part)[0] in _NUMBER_STARTS and len(memoryview(part)) < 400:
                value = float(bytes(part))
                if abs(value) < float("inf"):
                    found[key] = value
        return found


def aligned(where: str, num_rows: int, **columns: list[Any] | None) -> None:
    """Refuse lists (one entry a request) of another length than `num_rows`."""
    for key, values in columns.items():
        if values is not None and len(values) != num_rows:
            raise UnknownFormat(
                f"{where}: {key} has {len(values)} entries for {num_rows} requests. Is the file complete?", key=key
            )


def _begins(part: msgspec.Raw, text: bytes) -> bool:
    return bytes(memoryview(part)[: len(text)]) == text


@cache
def _decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type_)
