"""The options that every verb that observes has in common: where its rows go, and with which secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from collector.terminal.output import DEFAULT_STORE

ToOption = Annotated[str | None, typer.Option("--to", help="Collector to write to, such as http://127.0.0.1:8321.")]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", help=f"Store to write into instead of a collector.  [default: {DEFAULT_STORE}]"),
]
TokenOption = Annotated[str | None, typer.Option(envvar="KVSCOPE_TOKEN", help="Token of the collector.")]
SpoolOption = Annotated[
    Path | None,
    typer.Option(envvar="KVSCOPE_SPOOL_DIR", help="Folder that keeps rows while the collector is away."),
]
DurationOption = Annotated[str | None, typer.Option(help="Stop after this time; without it, on Ctrl-C.")]
SaltOption = Annotated[
    Path | None,
    typer.Option(envvar="KVSCOPE_SALT_FILE", help="Secret of the block hashes; made where it does not exist."),
]
