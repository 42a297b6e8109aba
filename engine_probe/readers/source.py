"""What a reader is: something on disk that was recognised, and yields tables of the contract in a fixed order.

Invariant: the same content under the same options yields the same chunks in the same order, so that a chunk's number
and the content's digest identify its rows, and importing twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

RECORDINGS_SALT = b"kvscope-recordings"
CHUNK_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """salt: key of the chain hash for token ids found in events. worker: name for rows whose source names none.
    start_ns: the instant a trace with relative times begins at. at_ns: the instant of a page without times.
    format: the format that PATH was said to be of, where it was not told by its content."""

    salt: bytes = RECORDINGS_SALT
    worker: str | None = None
    start_ns: int | None = None
    at_ns: int | None = None
    format: str | None = None

    def text(self) -> str:
        """The options as text for an identity; the salt itself is not in it, only its digest."""
        salt = blake2b(self.salt, digest_size=8).hexdigest()
        told = "" if self.format is None else f" format={self.format}"
        return f"salt={salt} worker={self.worker} start={self.start_ns} at={self.at_ns}{told}"


@dataclass(frozen=True, slots=True)
class FoundWindow:
    """An interval that the source itself names: measure, warmup, ... (UTC ns)."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Notes:
    """What the reader has to say: windows found, sentences about what it made of the source, counts worth knowing.

    left_out   what stands in the source and is not stored, and why
    not_told   what the source does not tell, and how to make it tell
    assumed    what the source does not tell and the rows say all the same: how it was chosen
    """

    windows: list[FoundWindow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    not_told: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    facts: dict[str, int | float | str] = field(default_factory=dict)


class Source(Protocol):
    """A recognised PATH. `format` is its name for people, `files` what it will read (their bytes make the identity)."""

    format: str
    files: list[Path]

    def chunks(self, options: ReadOptions, notes: Notes) -> Iterator[Mapping[str, pa.Table]]:
        """Tables of the contract, kind -> table, in a fixed order; fills `notes` on the way. Raises UnknownFormat."""
        ...


def digest(files: list[Path]) -> str:
    """Digest of the files' bytes, in order; names and folders do not enter it."""
    state = blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as stream:
            state.update(path.stat().st_size.to_bytes(8, "little"))
            while piece := stream.read(1 << 20):
                state.update(piece)
    return state.hexdigest()
