"""Pages of other sites that may use the engine: CORS, for the origins that were named and nobody else.

A browser asks first (OPTIONS, without the token), and hands an answer to a page only where the answer names its origin. Source:
the Fetch standard, section 3.2. `*` is every origin.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import Message, Scope, Send

from engine_probe.errors import UsageError

ANY: Final = "*"
MAX_AGE_S: Final = 600
EXPOSED: Final = "X-Request-Id, Retry-After"


class CrossOrigin:
    """origins: scheme, host and port as browsers send them, or `*`."""

    def __init__(self, origins: Collection[str] = ()) -> None:
        self._origins = frozenset(origins)

    def allowed(self, scope: Scope) -> str | None:
        """The origin of the page that asks, where it may; None where no page asks, or it may not."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        return origin if origin and (ANY in self._origins or origin in self._origins) else None

    @staticmethod
    def is_preflight(scope: Scope) -> bool:
        """The browser asks whether it may ask."""
        return scope["method"] == "OPTIONS" and any(
            name == b"access-control-request-method" for name, _ in scope["headers"]
        )

    @staticmethod
    def preflight(scope: Scope) -> Response:
        """Yes, with whatever headers it wants to send."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        wanted = headers.get(b"access-control-request-headers", b"").decode("latin-1")
        told = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": str(MAX_AGE_S)}
        if wanted:
            told["Access-Control-Allow-Headers"] = wanted
        return Response(status_code=204, headers=told)

    @staticmethod
    def telling(send: Send, origin: str) -> Send:
        """Answers say that the page of `origin` may read them."""
        told = [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED.encode()),
            (b"vary", b"Origin"),
        ]

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *told]}
            await send(message)

        return sent


def checked_origins(words: Collection[str], *, has_token: bool, allow_unauthenticated: bool) -> frozenset[str]:
    """Origins as browsers send them. Raises UsageError for what is none, and for `*` where nothing else keeps people out."""
    found = set()
    for word in words:
        if word == ANY:
            if not (has_token or allow_unauthenticated):
                raise UsageError(
                    "--allow-origin '*' lets every page that is opened on this machine use the engine: name the origins, give "
                    "--token-file, or say --allow-unauthenticated"
                )
            found.add(ANY)
            continue
        try:
            parts = urlsplit(word)
            is_origin = bool(parts.scheme and parts.hostname) and not (parts.path or parts.query or parts.fragment)
            is_origin = is_origin and parts.username is None and (parts.port is None or parts.port > 0)
        except ValueError:
            is_origin = False
        if not is_origin or not word.isascii():
            raise UsageError(f"--allow-origin is {word!r}; expected an origin such as http://localhost:3000, or '*'")
        found.add(word.lower())
    return frozenset(found)
