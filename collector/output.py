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


def emit_json(document: Any) -> None:
    """Print one JSON document to stdout (dataclasses are objects, non-finite floats null)."""
    import msgspec

    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    sys.stdout.flush()


def emit(text: str) -> None:
    """Print a result to stdout."""
    print(text)


def say(text: str) -> None:
    """Talk: progress, hints, warnings. Goes to stderr."""
    print(text, file=sys.stderr)
