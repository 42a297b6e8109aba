"""What the verbs share: where results and talk go, and the options that mean the same everywhere."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
StoreOption = Annotated[
    str,
    typer.Option(
        "--store", envvar="KVSCOPE_STORE_URL", help="Path of the DuckDB file, or a store URL.", show_default=True
    ),
]
DEFAULT_STORE = "./kvscope.duckdb"


class JsonOut:
    """Whether this run of a verb has printed its JSON document: there is one, of a success or of a failure."""

    is_told = False


def emit_json(document: Any) -> None:
    """Print one JSON document to stdout (dataclasses are objects, non-finite floats null)."""
    import msgspec

    emit_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def emit_bytes(body: bytes) -> None:
    """Print a result that is bytes already (a JSON document, an Arrow stream) to stdout."""
    JsonOut.is_told = True
    sys.stdout.flush()
    sys.stdout.buffer.write(body)
    sys.stdout.flush()


def printable(text: str) -> str:
    """One line that cannot drive a terminal: what is recorded was said by others. Other characters as their escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def emit(text: str) -> None:
    """Print a result to stdout."""
    print(text)


def columns() -> int:
    """Columns that text for a person may fill: the terminal's (60 to 120), 80 where stdout is none."""
    if not sys.stdout.isatty():
        return 80
    import shutil

    return min(max(shutil.get_terminal_size().columns, 60), 120)


def say(text: str) -> None:
    """Talk: progress, hints, warnings. Goes to stderr."""
    print(text, file=sys.stderr)
