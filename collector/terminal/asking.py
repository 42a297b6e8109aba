"""Where a verb gets its answer: from the collector at `--url`, else from the store, else from the collector that holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from collector.terminal.output import say
from engine_probe.errors import StoreBusy

if TYPE_CHECKING:
    from collector.terminal.client import CollectorClient

UrlOption = Annotated[
    str | None,
    typer.Option(help="Ask the collector at this address instead of opening the store.", envvar="KVSCOPE_URL"),
]
TokenOption = Annotated[str | None, typer.Option(envvar="KVSCOPE_TOKEN", help="Token of the collector.")]
T = TypeVar("T")


def ask(
    store: str,
    url: str | None,
    token: str | None,
    from_store: Callable[[], T],
    from_collector: Callable[[CollectorClient], T],
) -> T:
    """From the collector at `url`, else from the store, else from the collector that holds the store."""
    from collector.terminal.client import CollectorClient, holder_of

    if url is not None:
        return from_collector(CollectorClient(url, token))
    try:
        return from_store()
    except StoreBusy:
        holder = holder_of(store)
        if holder is None:
            raise
        say(f"asking the collector at {holder}, which holds {store}")
        return from_collector(CollectorClient(holder, token))
