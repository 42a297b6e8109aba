"""What the proxy itself answers where it cannot pass a request on: one JSON body that people, kvscope's tools and SDKs of
closed APIs can all read (problem+json, with the `error` object that OpenAI's and Anthropic's clients show).
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec


def refusal(
    status: int, problem: str, *, request_id: str | None = None, closes: bool = True, **facts: Any
) -> tuple[bytes, bytes]:
    """Head and body of an answer of the proxy's own. `facts` go into the body."""
    title = _title(status)
    document: Mapping[str, Any] = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": problem,
        "error": {"message": f"kvscope proxy: {problem}", "type": "kvscope_proxy_error", "code": str(status)},
        **facts,
    }
    body = msgspec.json.encode(document)
    lines = [
        f"HTTP/1.1 {status} {title}",
        "Content-Type: application/problem+json",
        f"Content-Length: {len(body)}",
    ]
    if request_id is not None:
        lines.append(f"X-Request-Id: {request_id}")
    if closes:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), body


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Refused"
