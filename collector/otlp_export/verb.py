"""`kvscope requests export --otlp URL`: requests and their phases as spans, to any OpenTelemetry backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Final

import typer

from collector.terminal.asking import TokenOption, UrlOption
from collector.terminal.output import DEFAULT_STORE, JsonOption, StoreOption, emit, emit_json, say
from engine_probe.errors import EXIT_FINDING, StoreBusy, UsageError

if TYPE_CHECKING:
    from collector.otlp_export.page import SpanPage
    from collector.terminal.client import CollectorClient


MOST_SAID: Final = 5
"""Different words of the backend that are passed on."""


def export(
    otlp: Annotated[str, typer.Option(help="Backend that takes OTLP over HTTP, as http://host:4318.", metavar="URL")],
    header: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE to send along (authorization=...); may be given again.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="A run's name, START/END or NAME@START/END.", show_default="all live rows")
    ] = None,
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    vantage: Annotated[str | None, typer.Option(help="Only rows measured at: engine, client, router.")] = None,
    store: StoreOption = DEFAULT_STORE,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send requests as OpenTelemetry traces: a span a request, a child a phase. Sending again makes the same ids.

    Exit 1 where the backend took only a part.
    """
    from collector.otlp_export.sending import Backend

    asked = {"worker": worker, "model": model, "vantage": vantage}
    equal = {name: value for name, value in asked.items() if value is not None}
    backend = Backend(otlp, _headers(header or []), on_wait=say)
    rows = not_taken = 0
    said: dict[str, None] = {}
    with ExitStack() as stack:
        stack.callback(backend.close)
        for page in _pages(_source(stack, store, url, token, window, equal)):
            if page.num_rows:
                answer = backend.send(page.body)
                not_taken += answer.not_taken
                said |= {answer.words: None} if answer.words and len(said) < MOST_SAID else {}
            rows += page.num_rows
            say(f"{rows:,} requests sent")
    if as_json:
        emit_json({"url": backend.url, "requests": rows, "spans_not_taken": not_taken, "backend_says": list(said)})
    else:
        emit(
            f"{rows:,} requests sent to {backend.url}"
            if rows
            else f"no request is stored in {window or 'all live rows'}"
        )
    for words in said:
        say(f"the backend says: {words}")
    if not_taken:
        say(f"the backend did not take {not_taken:,} of the spans")
        raise typer.Exit(EXIT_FINDING)


def _headers(given: list[str]) -> dict[str, str]:
    headers = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not (equals and name.strip() and name.isascii() and value.isprintable()):
            raise UsageError(f"--header {one[:60]!r} is not NAME=VALUE", header=one[:60])
        headers[name.strip()] = value.strip()
    return headers


def _pages(page_of: Callable[[str | None], SpanPage]) -> Iterator[SpanPage]:
    cursor: str | None = None
    while True:
        page = page_of(cursor)
        yield page
        cursor = page.next_cursor
        if cursor is None:
            return


def _source(
    stack: ExitStack, store: str, url: str | None, token: str | None, window: str | None, equal: dict[str, str]
) -> Callable[[str | None], SpanPage]:
    """Pages by their cursors: of the collector at `url`, else of the store, else of the collector that holds the store."""
    from collector.terminal.client import CollectorClient, holder_of

    if url is None:
        try:
            return _of_store(stack, store, window, equal)
        except StoreBusy:
            url = holder_of(store)
            if url is None:
                raise
            say(f"asking the collector at {url}, which holds {store}")
    return _of_collector(CollectorClient(url, token), window, equal)


def _of_store(
    stack: ExitStack, url: str, window: str | None, equal: dict[str, str]
) -> Callable[[str | None], SpanPage]:
    import time

    from collector.otlp_export.page import PAGE_ROWS, span_page
    from collector.reading.request_queries import RequestFilter
    from diagnosis.windows import parse_window
    from store.interface import Window
    from store.open import open_store

    opened = stack.enter_context(open_store(url, read_only=True))
    chosen = Window() if window is None else parse_window(window, opened, time.time_ns())
    return lambda cursor: span_page(opened, RequestFilter(chosen, equal, {}, limit=PAGE_ROWS, cursor=cursor))


def _of_collector(
    client: CollectorClient, window: str | None, equal: dict[str, str]
) -> Callable[[str | None], SpanPage]:
    from collector.intake.otlp_answer import PROTOBUF
    from collector.otlp_export.page import CURSOR_HEADER, ROWS_HEADER, SpanPage

    def page(cursor: str | None) -> SpanPage:
        body, headers = client.get_bytes("/api/v1/otlp", {"window": window, "cursor": cursor, **equal}, PROTOBUF)
        return SpanPage(body, int(headers[ROWS_HEADER]), headers.get(CURSOR_HEADER))

    return page
