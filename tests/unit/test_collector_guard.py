"""Who may talk to the collector, judged before a body is read."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from collector.guard import Guard, is_loopback


def ask(guard_options: dict[str, Any], headers: dict[str, str], method: str = "GET", path: str = "/metrics") -> int:
    """Status of a request through the guard; 200 where it was let pass."""
    options: dict[str, Any] = {"token": None, "check_host": True, "allowed_hosts": (), "loopback": True} | guard_options
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        raise AssertionError("the guard must not read the body")

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(Guard(app, **options)(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8321", "[::1]:8321", "LOCALHOST:1", "127.0.0.2:80", "[::ffff:127.0.0.1]:80"]
)
def test_loopback_names_pass(host: str) -> None:
    """What a person on this machine types works."""
    assert ask({}, {"Host": host}) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8321", "localhost.evil.example", "10.0.0.1", "", "127.0.0.1.evil"]
)
def test_other_names_are_refused_on_loopback(host: str) -> None:
    """A page whose name was rebound to 127.0.0.1 still says its own name in Host."""
    assert ask({}, {"Host": host}) == 403


def test_names_that_are_allowed_pass() -> None:
    """A name in front (a proxy's) is added with a setting."""
    assert ask({"allowed_hosts": ("kvscope.lan",)}, {"Host": "kvscope.lan:80"}) == 200


def test_beyond_loopback_without_token_addresses_pass_and_names_do_not() -> None:
    """--allow-unauthenticated is reached by address; a rebound name is still refused."""
    assert ask({"loopback": False}, {"Host": "10.0.0.7:8321"}) == 200
    assert ask({"loopback": False}, {"Host": "evil.example"}) == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:8321"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:9999"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_sites_may_not_send(headers: dict[str, str], status: int) -> None:
    """A form or fetch of another page is refused even where the Host is right; programs send no Origin."""
    assert ask({}, {"Host": "localhost:8321"} | headers, method="POST", path="/v1/events") == status


def test_reading_by_links_from_elsewhere_is_allowed() -> None:
    """A link in a dashboard opens; without CORS no other page reads the answer."""
    assert ask({}, {"Host": "localhost", "Sec-Fetch-Site": "cross-site"}) == 200


def _basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("authorization", "method", "status"),
    [
        (None, "GET", 401),
        ("Bearer hush", "GET", 200),
        ("bearer hush", "POST", 200),
        ("Bearer hus", "GET", 401),
        ("Bearer hush2", "GET", 401),
        ("Bearer ", "GET", 401),
        ("hush", "GET", 401),
        (_basic("anyone:hush"), "GET", 200),
        (_basic("anyone:hush"), "POST", 401),
        (_basic("hush"), "GET", 401),
        ("Basic %%%", "GET", 401),
    ],
)
def test_token_is_asked_for(authorization: str | None, method: str, status: int) -> None:
    """Programs send it as bearer; a browser may read, not send, with it as a password."""
    headers = {"Host": "anything"} | ({} if authorization is None else {"Authorization": authorization})
    assert ask({"token": "hush", "check_host": False}, headers, method=method) == status


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_nothing(path: str) -> None:
    """A load balancer has no token and comes by any name."""
    assert ask({"token": "hush"}, {"Host": "10.1.2.3"}, path=path) == 200


@pytest.mark.parametrize(
    ("host", "is_so"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("LocalHost", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("", False),
        ("0", False),
        ("unix:/run/kvscope", False),
        ("0.0.0.0", False),
        ("::", False),
        ("lan", False),
    ],
)
def test_loopback_addresses_are_known(host: str, is_so: bool) -> None:
    """Only an address that nobody else reaches goes without a token."""
    assert is_loopback(host) is is_so
