"""Who may talk to the engine: with a token, who brings it; without one, this machine, and no page of another site.

An ASGI layer around everything, before any body is read. `Authorization: Bearer TOKEN` is what OpenAI's clients send as
their api key. Health checks need none. Without a token the remaining way in is a browser of this machine: rebinding of
names is stopped by Host, a form or a script of another site by Origin and Sec-Fetch-Site, but for those sites that were named.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from engine_probe.engine.server import error_answer
from engine_probe.engine.server.cross_origin import CrossOrigin
from engine_probe.errors import KvscopeError, Unauthorized, UsageError, WrongHost

HEALTH: Final = frozenset(("/health", "/ping", "/version"))
LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))


class Guard:
    """token: None asks for none. checks_host: only names of this machine are answered to. pages: of whom answers may be read."""

    def __init__(self, app: ASGIApp, *, token: str | None, checks_host: bool, pages: CrossOrigin | None = None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._checks_host = checks_host
        self._pages = pages or CrossOrigin()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origin = self._pages.allowed(scope)
            if origin is not None:
                send = self._pages.telling(send, origin)
            try:
                self._check_host(scope)
                if origin is not None and self._pages.is_preflight(scope):
                    await self._pages.preflight(scope)(scope, receive, send)
                    return
                self._judge(scope, is_known_page=origin is not None)
            except KvscopeError as error:
                await error_answer.response(error, {"Connection": "close"})(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Without a token, only names of this machine; health checks come by any."""
        if self._token is None and self._checks_host and scope["path"] not in HEALTH:
            host = _host(scope)
            if not is_loopback(_name(host)):
                raise WrongHost(f"this engine does not answer to the name {_name(host)[:100]!r}; use its address")

    def _judge(self, scope: Scope, *, is_known_page: bool) -> None:
        if scope["path"] in HEALTH:
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._token is not None:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
                raise Unauthorized("this engine needs its token: send the header 'Authorization: Bearer TOKEN'")
            return
        if is_known_page or scope["method"] in ("GET", "HEAD"):
            return  # a page that was not named cannot read the answer
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        is_same = not origin or origin.partition("://")[2] == _host(scope)
        if not is_same or headers.get(b"sec-fetch-site", b"") in (b"cross-site", b"same-site"):
            raise WrongHost(
                f"a page of another site ({origin[:100] or 'it does not say which'}) may not ask this engine; --allow-origin lets it",
                origin=origin,
            )


def check_address(host: str, *, has_token: bool, allow_unauthenticated: bool) -> None:
    """Raises UsageError where other machines could ask without a token and nobody said that this is wanted."""
    if not (is_loopback(host) or has_token or allow_unauthenticated):
        raise UsageError(
            f"--host {host} lets other machines use the engine: give --token-file, or say --allow-unauthenticated if "
            "everybody who reaches this address may"
        )


def is_loopback(host: str) -> bool:
    """Whether an address or a name stands for this machine alone."""
    if host.lower() in LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host(scope: Scope) -> str:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    return headers.get(b"host", b"").decode("latin-1").lower()


def _name(host: str) -> str:
    """Host header without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
