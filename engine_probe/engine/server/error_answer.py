"""Errors in OpenAI's shape, so that its clients raise what they raise for OpenAI: status, type, param and code."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.responses import Response

from engine_probe.errors import KvscopeError

RETRY_AFTER_S: Final = 5
_CODES: Final = {401: "invalid_api_key", 404: "model_not_found", 503: "engine_not_ready", 504: "timeout"}


def document(error: KvscopeError) -> dict[str, Any]:
    """The body."""
    status = error.http_status
    return {
        "error": {
            "message": error.message,
            "type": error_type(status),
            "param": error.facts.get("field"),
            "code": error.facts.get("code", _CODES.get(status)),
        }
    }


def error_type(status: int) -> str:
    """OpenAI's word for a status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def response(error: KvscopeError, headers: dict[str, str] | None = None) -> Response:
    """The answer."""
    given = dict(headers or {})
    if error.http_status in (429, 503):
        given["Retry-After"] = str(error.facts.get("retry_after_s", RETRY_AFTER_S))
    if error.http_status == 401:
        given["WWW-Authenticate"] = "Bearer"
    return Response(msgspec.json.encode(document(error)), error.http_status, given, "application/json")


def plain(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """For what has no error of ours: no such path, no such method, a defect."""
    body = {"error": {"message": message, "type": error_type(status), "param": None, "code": None}}
    return Response(msgspec.json.encode(body), status, headers, "application/json")
