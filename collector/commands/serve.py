"""`kvscope serve`: the collector as a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from collector.terminal.output import JsonOption, say


def register(app: typer.Typer) -> None:
    """Add the verb `serve`."""

    @app.command("serve")
    def serve(
        host: Annotated[
            str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1; others need a token]")
        ] = None,
        port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [default: 8321]")] = None,
        store: Annotated[
            str | None, typer.Option(help="Path of the DuckDB file, or a store URL. [default: ./kvscope.duckdb]")
        ] = None,
        token_file: Annotated[Path | None, typer.Option(help="File whose first line is the bearer token.")] = None,
        allow_unauthenticated: Annotated[
            bool | None,
            typer.Option("--allow-unauthenticated", help="Listen beyond this machine without a token."),
        ] = None,
        as_json: JsonOption = False,
    ) -> None:
        """Take in events, keep them, answer questions over HTTP. Stops on Ctrl+C or SIGTERM, losing nothing.

        Every setting is also a KVSCOPE_... variable; arguments win.
        """
        from collector import logs, serving
        from collector.app import create_app
        from collector.services import open_configured
        from collector.settings import load_settings
        from collector.terminal.client import announced
        from collector.terminal.output import emit_json
        from engine_probe import listening

        settings = load_settings(
            store_url=store,
            server={
                "host": host,
                "port": port,
                "token_file": token_file,
                "allow_unauthenticated": allow_unauthenticated,
            },
        )
        logs.configure(settings.log.level, settings.log.format)
        create_app(settings)  # says what is wrong with the settings before a file or a port is touched
        sock = listening.listen(settings.server.host, settings.server.port)
        bound = settings.server.model_copy(
            update={"port": sock.getsockname()[1]}
        )  # for links, where any free one was taken
        settings = settings.model_copy(update={"server": bound})
        with sock:
            opened = open_configured(settings)
            try:
                url = listening.url_of(sock)
                for line in welcome(url, opened, settings):
                    say(line)
                if as_json:
                    emit_json({"url": url, "store": settings.store_url})
                with announced(settings.store_url, url):
                    serving.serve(create_app(settings, opened), settings, sock)
            finally:
                opened.close()
        say("kvscope: stopped; everything accepted is on disk")


def welcome(url: str, store: Any, settings: Any) -> list[str]:
    """What a person who has just started the collector wants to know."""
    from collector.guard import is_loopback

    rows = store.stats().rows
    held = f"{rows.get('request', 0):,} requests" if any(rows.values()) else "empty"
    runs = store.runs()
    if runs:
        held += f", {len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    has_token = settings.server.token is not None or settings.server.token_file is not None
    if has_token:
        access = "with the token only"
    elif is_loopback(settings.server.host):
        access = "this machine only, no token"
    else:
        access = "EVERY machine that reaches this address, no token"
    return [
        f"kvscope collects at {url}",
        f"  store    {settings.store_url} ({held})",
        f"  access   {access}",
        f"  attach   kvscope attach vllm http://ENGINE:8000 --to {url}",
        f"  send     POST {url}/v1/events",
        f"  OTLP     POST {url}/v1/traces",
        f"  look     {url}/",
        f"  metrics  {url}/metrics",
        f"  API      {url}/openapi.json",
        "  stop     Ctrl+C",
    ]
