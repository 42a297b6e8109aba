"""What the read routes share: parameters, errors, JSON."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import msgspec
from fastapi import Query, Request
from starlette.responses import Response

from collector.services import Services
from diagnosis.windows import parse_window
from engine_probe.errors import (
    BadWindow,
    NotReady,
    OutOfMemory,
    StoreBusy,
    TooManyQueries,
    Unauthorized,
    UnknownFormat,
    UsageError,
    WrongHost,
)
from store.interface import Window

READ_ERRORS: Final = (UsageError, BadWindow, Unauthorized, WrongHost, TooManyQueries, StoreBusy, OutOfMemory, NotReady)

WINDOW_DOC: Final = (
    "a run's name, START/END or NAME@START/END; instants in ISO 8601, ns, now, -15m; default all live rows"
)
WindowText = Annotated[str | None, Query(description=WINDOW_DOC, examples=["-15m/now"], max_length=500)]
LimitParam = Annotated[int | None, Query(description="most rows of the answer", ge=1)]


def window_of(services: Services, text: str | None) -> Window:
    """The window of a request's parameter; all live rows where it is absent. Raises BadWindow."""
    if text is None:
        return Window()
    try:
        return parse_window(text, services.known_runs(), time.time_ns())
    except BadWindow:
        services.forget_runs()  # a run that was imported a moment ago
        return parse_window(text, services.known_runs(), time.time_ns())


def limit_of(services: Services, given: int | None) -> int:
    """Rows of a page; UsageError above the setting."""
    most = services.settings.read.max_page_rows
    if given is not None and given > most:
        raise UsageError(
            f"limit is {given}; a page has at most {most} rows, the next ones come with its cursor", limit=most
        )
    return given or services.settings.read.page_rows


def documented_query(request: Request) -> None:
    """Dependency of the API's routes: a parameter that the route does not document, or that comes twice, is an error.

    A misspelt `window` would else be answered about all rows, and the first of two values would win unseen.
    """
    if not request.scope["query_string"]:
        return
    operations = request.app.openapi()["paths"].get(request.scope["route"].path_format, {})
    parameters = operations.get(request.method.lower(), {}).get("parameters", ())
    known = [parameter["name"] for parameter in parameters if parameter["in"] == "query"]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UsageError(f"{request.url.path} has no parameter {name[:60]!r}; {takes}", parameter=name[:60])
        if given.count(name) > 1:
            raise UsageError(f"the parameter {name} comes {given.count(name)} times; give it once", parameter=name)


def json_only(request: Request) -> None:
    """Dependency of routes that take JSON: another type is 415, which also keeps out forms of other web pages."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnknownFormat(f"Content-Type {media_type[:80]!r} is not taken here; send application/json")


def answer(document: Any, status: int = 200) -> Response:
    """A document as JSON; what is not finite is null."""
    return Response(msgspec.json.encode(document), status, media_type="application/json")
