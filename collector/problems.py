"""Errors at the HTTP border: every `KvscopeError` becomes one `application/problem+json` document.

The document (RFC 9457) has `type`, `title`, `status`, `detail` and the error's own facts as further members, so a
program reads the same facts that a person reads in `detail`. `type` is `urn:kvscope:error:<class-name-in-kebab-case>`
and stays as it is. Foreign exceptions are translated here once; an unforeseen one is logged and answers 500 without its
text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from collector.problem_document import MAX_TEXT, document, plain, slug
from engine_probe.errors import BadRequest, BodyTimeout, KvscopeError, NotFound, Unauthorized, UsageError

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """An error, as RFC 9457 problem details; the facts of the error are further members."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="urn:kvscope:error:<name>, stable", examples=["urn:kvscope:error:invalid-rows"])
    title: str = Field(description="short constant name", examples=["Rows do not match the event contract"])
    status: int = Field(description="HTTP status", examples=[422])
    detail: str = Field(description="what happened, to what, and what to do next")


def response(error: KvscopeError, headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP answer to an error, with `Retry-After` and `WWW-Authenticate` where they belong."""
    extra = dict(headers or {})
    if error.http_status in (429, 503):
        extra["Retry-After"] = str(math.ceil(error.facts.get("retry_after_s", 1)))
    if isinstance(error, BodyTimeout):
        extra["Connection"] = "close"  # the rest of the body may still come, and must not be read as a request
    if isinstance(error, Unauthorized):
        extra["WWW-Authenticate"] = 'Bearer realm="kvscope", Basic realm="kvscope"'
    return Response(msgspec.json.encode(document(error)), error.http_status, extra, MEDIA_TYPE)


def responses(*errors: type[KvscopeError]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI `responses` of a route that may raise these errors."""
    by_status: dict[int, list[type[KvscopeError]]] = {}
    for error in errors:
        by_status.setdefault(error.http_status, []).append(error)
    return {status: _documented(status, group) for status, group in sorted(by_status.items())}


def install(app: FastAPI) -> None:
    """Answer every exception of the app with a problem document."""

    async def on_kvscope_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, KvscopeError)
        if error.http_status >= 500:
            log.warning("request failed", extra={"path": request.url.path, "error": slug(type(error)), **_brief(error)})
        return response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return response(NotFound(f"nothing is at {request.url.path}; GET /openapi.json lists the routes"))
        if error.status_code == 400:  # the framework's word for a body that it cannot read at all
            return response(BadRequest("the body cannot be read as JSON: it is no UTF-8, or nested too deeply"))
        phrase = HTTPStatus(error.status_code).phrase
        body = {"type": "about:blank", "title": phrase, "status": error.status_code, "detail": _detail(error, request)}
        return Response(msgspec.json.encode(body), error.status_code, error.headers, MEDIA_TYPE)

    async def on_invalid_parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        for item in error.errors():
            if item.get("type") == "json_invalid":
                reason = item.get("ctx", {}).get("error", "it ends too early")
                return response(BadRequest(f"the body is no sound JSON at character {item['loc'][-1]}: {reason}"))
        return response(invalid_parameters(error.errors()))

    async def on_unforeseen(request: Request, error: Exception) -> Response:
        log.error("unforeseen error", extra={"path": request.url.path}, exc_info=error)
        return response(KvscopeError("an unforeseen error; the collector's log has it with its traceback"))

    app.add_exception_handler(KvscopeError, on_kvscope_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_invalid_parameters)
    app.add_exception_handler(Exception, on_unforeseen)


def invalid_parameters(errors: Sequence[Mapping[str, Any]]) -> UsageError:
    """One error that names every parameter that is wrong, what was sent and what was expected."""
    invalid = [
        {
            "where": ".".join(str(part) for part in item.get("loc", ())),
            "expected": str(item.get("msg", "")),
            "value": plain(item.get("input")),
        }
        for item in errors
    ]
    named = "; ".join(f"{item['where']}: {item['expected']}" for item in invalid[:5])
    return UsageError(f"the request's parameters make no sense: {named}", invalid=invalid)


def _detail(error: HTTPException, request: Request) -> str:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{request.url.path} does not take {request.method}; use {allowed}"
    return str(error.detail)


def _documented(status: int, errors: Sequence[type[KvscopeError]]) -> dict[str, Any]:
    examples = {
        slug(error): {
            "summary": error.title,
            "value": {
                "type": f"urn:kvscope:error:{slug(error)}",
                "title": error.title,
                "status": status,
                "detail": "what happened, to what, and what to do next",
            },
        }
        for error in errors
    }
    return {
        "description": "; ".join(error.title for error in errors),
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": examples}},
    }


def _brief(error: KvscopeError) -> dict[str, str]:
    return {"detail": error.message[:MAX_TEXT]}
