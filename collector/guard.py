"""Who may talk to the collector: the token, the Host header, and requests sent by other web pages.

Idea: one ASGI layer around everything, before any body is read. With a token, every request but the health checks
carries it (`Authorization: Bearer`; browsers may use Basic with the token as password, for reading only). Without one,
a page in a browser of this machine is the remaining way in: DNS rebinding is stopped by the Host header, a form or a
`fetch` across sites by Origin and Sec-Fetch-Site. There is no CORS: no other site reads an answer.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from collector import problems
from engine_probe.errors import KvscopeError, Unauthorized, WrongHost

HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
_READING = frozenset({"GET", "HEAD"})
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """ASGI layer that lets pass only whom it should.

    token           None: no token is asked for
    check_host      refuse names in Host that are not ours
    allowed_hosts   names accepted besides the loopback ones; an address bound to other interfaces also accepts IPs
    """

    def __init__(
        self, app: ASGIApp, *, token: str | None, check_host: bool, allowed_hosts: Collection[str], loopback: bool
    ) -> None:
        self.app = app
        self._token = token.encode() if token is not None else None
        self._check_host = check_host
        self._hosts = _LOOPBACK_NAMES | {name.lower() for name in allowed_hosts}
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._judge(scope)
        except KvscopeError as error:
            await problems.response(error, {"Connection": "close"})(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _judge(self, scope: Scope) -> None:
        if scope["path"] in HEALTH_PATHS:
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._check_host and not self._is_ours(_name(host)):
            raise WrongHost(
                f"this collector does not answer to the name {_name(host)[:100]!r}; use its address, or add the name "
                "with KVSCOPE_SERVER__ALLOWED_HOSTS",
                host=_name(host),
            )
        if scope["method"] not in _READING:
            self._refuse_other_sites(headers, host)
        if self._token is not None and not self._has_token(headers, scope["method"]):
            raise Unauthorized("this collector needs its token: send the header 'Authorization: Bearer TOKEN'")

    def _is_ours(self, name: str) -> bool:
        if name in self._hosts:
            return True
        return is_loopback(name) if self._loopback else _is_address(name)

    @staticmethod
    def _refuse_other_sites(headers: dict[bytes, bytes], host: str) -> None:
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        same = not origin or origin.partition("://")[2] == host
        if not same or headers.get(b"sec-fetch-site", b"") in (b"cross-site", b"same-site"):
            raise WrongHost("a page of another site may not send to the collector", origin=origin)

    def _has_token(self, headers: dict[bytes, bytes], method: str) -> bool:
        assert self._token is not None
        scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
        given = credentials.strip()
        if scheme.lower() == b"basic" and method in _READING:
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given, self._token)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can only be reached from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _name(host: str) -> str:
    """Host header without the port; brackets of an IPv6 address removed."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
