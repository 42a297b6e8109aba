"""`kvscope top`: what a running collector sees at this moment, in a terminal of 80 columns."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from collector.terminal.asking import TokenOption, UrlOption
from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json
from engine_probe.errors import EXIT_UNREACHABLE, CollectorUnreachable, KvscopeError

if TYPE_CHECKING:
    from collector.terminal.client import CollectorClient

PATIENCE_S: Final = 10.0
"""A collector that has not answered for so long is away."""


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

    watch = _Watch(store, url, token)
    if as_json:
        emit_json(watch.look())
        return
    from collector.terminal.top_screen import screen

    if once or not sys.stdout.isatty():
        emit(screen(watch.look(), _width()))
        return
    _follow(watch, interval)


def _follow(watch: _Watch, interval: float) -> None:
    """Draw again and again; a collector that is away for a while is said and asked again."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    shown = _picture(watch, "", console.width)
    if console.is_dumb_terminal:  # it cannot move back: each picture comes below the last
        while True:
            print(shown, flush=True)
            time.sleep(interval)
            print()
            shown = _picture(watch, shown, console.width)
    with Live(Text(""), console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Text(_fitting(shown, console.height), no_wrap=True), refresh=True)
            time.sleep(interval)
            shown = _picture(watch, shown, console.width)


def _picture(watch: _Watch, before: str, width: int) -> str:
    """The newest screen; where none can be had, why, above the one before. Raises what asking again does not mend."""
    from collector.terminal.top_screen import old_screen, screen

    try:
        return screen(watch.look(), width)
    except KvscopeError as error:
        if not before or error.exit_code != EXIT_UNREACHABLE:
            raise
        return old_screen(before, error.message, width)


def _fitting(text: str, height: int) -> str:
    """The lines that a terminal has room for; the last says how many more there are."""
    lines, most = text.splitlines(), max(height - 1, 2)
    if len(lines) <= most:
        return text
    return "\n".join([*lines[: most - 1], f"... {len(lines) - most + 1} more lines: a taller terminal shows them"])


class _Watch:
    """A collector that is looked at again and again: the one at `url`, else whichever holds the store at the moment."""

    def __init__(self, store: str, url: str | None, token: str | None) -> None:
        self._store, self._url, self._token = store, url, token
        self._client: CollectorClient | None = None

    def look(self) -> Any:
        """The answer of `/api/v1/now`. Raises CollectorUnreachable, and what the collector says is wrong."""
        if self._client is None:
            self._client = self._found()
        try:
            return self._client.get("/api/v1/now", {})
        except CollectorUnreachable:
            self._client = None  # it may come back at another port
            raise

    def _found(self) -> CollectorClient:
        from collector.terminal.client import CollectorClient, holder_of

        found = self._url or holder_of(self._store)
        if found is None:
            raise CollectorUnreachable(
                f"no collector holds {self._store}, and no --url was given; start one with `kvscope serve --store {self._store}`",
                store=self._store,
            )
        return CollectorClient(found, self._token, PATIENCE_S)


def _width() -> int:
    import shutil

    return shutil.get_terminal_size((80, 24)).columns
