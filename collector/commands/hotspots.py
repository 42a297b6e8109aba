"""`kvscope hotspots`: which worker gets more than it can serve, why the router sends it there, and what to change."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collector.terminal.asking import TokenOption, UrlOption, ask
from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, columns, emit, emit_json
from engine_probe.errors import EXIT_FINDING, EXIT_OK

if TYPE_CHECKING:
    from collector.terminal.client import CollectorClient

_FORMS = "A run's name, START/END (ISO 8601, ns, now, -15m) or NAME@START/END."


def register(app: typer.Typer) -> None:
    """Add the verb `hotspots`."""
    app.command("hotspots")(hotspots)


def hotspots(
    window: Annotated[str | None, typer.Option(help=_FORMS, show_default="the last 15 minutes")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Tell which hotspots were there in this window too.", show_default=False)
    ] = None,
    suspect: Annotated[
        str | None, typer.Option(help="Another word for --window, beside a baseline.", show_default=False)
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    show_sql: Annotated[bool, typer.Option("--sql/--no-sql", help="Show the SQL behind the numbers.")] = True,
    json: JsonOption = False,
) -> None:
    """Which worker gets more than it can serve, what that costs, why the router sends it there, and what to change.

    Exit 1 where a hotspot was found.
    """
    asked = {"window": window, "baseline": baseline, "suspect": suspect}

    def from_store() -> dict[str, Any]:
        from diagnosis.hotspots.question import answer
        from store.open import open_store

        with open_store(store, read_only=True) as opened:
            return answer(opened, window, baseline, suspect, time.time_ns()).to_dict()

    def from_collector(client: CollectorClient) -> dict[str, Any]:
        document: dict[str, Any] = client.get("/api/v1/hotspots", asked)
        return document

    document = ask(store, url, token, from_store, from_collector)
    if json:
        emit_json(document)
    else:
        from diagnosis.hotspots.text import render

        emit(render(document, sql=show_sql, width=columns()))
    raise typer.Exit(EXIT_FINDING if document["status"] == "hotspots" else EXIT_OK)
