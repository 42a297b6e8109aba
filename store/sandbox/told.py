"""What a child tells the collector beside the rows, as typed documents.

Invariant: a child may be broken by a person's text and say anything: what is not exactly such a document raises ValueError, before
it has been made into more than a few times its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from store.sandbox.wanted import Wanted

T = TypeVar("T")

MOST_BYTES: Final = 1024 * 1024
"""Of a document that says no columns, of which a person's text may name many."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Kind -> the hot rows of it that are read, and what shut the child in: rlimits, landlock, seccomp."""

    kinds: dict[str, Wanted]
    walls: list[str]


class Column(msgspec.Struct, forbid_unknown_fields=True):
    """A column of the answer with its DuckDB type."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class End:
    """All rows are said; `truncated`: but those beyond a bound. Seconds in the child, without its start."""

    truncated: bool
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer: refused, memory, locked or failed, and the words."""

    what: str
    message: str


def say(document: Needs | End | Failure | list[Column]) -> bytes:
    """As JSON, for `heard`."""
    return msgspec.json.encode(document)


def heard(body: memoryview, shape: type[T]) -> T:
    """A document of this shape. Raises ValueError for anything else."""
    if len(body) > MOST_BYTES and shape is not list[Column]:
        raise ValueError(f"a document of {len(body)} bytes")
    try:
        return msgspec.json.decode(body, type=shape)
    except RecursionError as error:
        raise ValueError("a document that is nested too deeply") from error
