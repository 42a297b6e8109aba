"""`kvscope top`: what a running collector sees at this moment, in a terminal of 80 columns."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.asking import TokenOption, UrlOption
from collector.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json
from engine_probe.errors import CollectorUnreachable

if TYPE_CHECKING:
    from collector.client import CollectorClient


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("top")(top)


def top(
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a running collector: workers, queues, blocks, hits, what is slow, what fires. Ctrl+C ends it."""
    import sys

    client = _collector(store, url, token)
    if as_json:
        emit_json(client.get("/api/v1/now", {}))
        return
    from collector.top_screen import screen

    if once or not sys.stdout.isatty():
        emit(screen(client.get("/api/v1/now", {}), _width()))
        return
    _follow(client, interval)


def _follow(client: CollectorClient, interval: float) -> None:
    """Draw again and again; a collector that is away for a while is said and asked again."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from collector.top_screen import screen

    console = Console(highlight=False)
    shown = ""
    with Live(Text(""), console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown, away = screen(client.get("/api/v1/now", {}), console.width), ""
            except CollectorUnreachable as error:
                away = f"\n{error.message}\nwhat is shown is older; trying again\n"
            lines = f"{shown}{away}".splitlines()[: max(console.height - 1, 1)]
            live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
            time.sleep(interval)


def _collector(store: str, url: str | None, token: str | None) -> Any:
    from collector.client import CollectorClient, holder_of

    found = url or holder_of(store)
    if found is None:
        raise CollectorUnreachable(
            f"no collector holds {store}, and no --url was given; start one with `kvscope serve --store {store}`",
            store=store,
        )
    return CollectorClient(found, token)


def _width() -> int:
    import shutil

    return shutil.get_terminal_size((80, 24)).columns
