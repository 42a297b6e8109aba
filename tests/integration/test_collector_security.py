"""Who is let in: tokens, names, other web pages, sizes of headers, slow senders."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from collector.app import create_app, read_token
from collector.guard import is_loopback
from collector.settings import load_settings
from engine_probe.errors import UsageError
from engine_probe.listening import listen, url_of
from tests.integration.collector_harness import Collector, running, step_row

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text(f"{TOKEN}\nsecond line\n")
    server = {"token_file": str(folder / "token"), "header_timeout_s": 0.3, "body_idle_timeout_s": 0.3}
    with running(folder / "kvscope.duckdb", server=server) as made:
        yield made


def _paths(collector: Collector) -> list[tuple[str, str]]:
    document = collector.app.openapi()
    return [
        (method.upper(), path.replace("{request_id}", "x"))
        for path, operations in document["paths"].items()
        for method in operations
    ] + [("GET", "/openapi.json"), ("GET", "/nope")]


def test_every_route_but_health_asks_for_the_token(guarded: Collector) -> None:
    """Also the page, the metrics, the API description, and what does not exist."""
    for method, path in _paths(guarded):
        answer = guarded.client.request(method, path)
        expected = 200 if path in ("/healthz", "/readyz") else 401
        assert answer.status_code == expected, (method, path)
        if expected == 401:
            assert answer.json()["type"] == "urn:kvscope:error:unauthorized"
            assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("authorization", [f"Bearer {TOKEN}", f"bearer  {TOKEN}"])
def test_token_opens(guarded: Collector, authorization: str) -> None:
    """Sending and reading."""
    headers = {"authorization": authorization}
    assert guarded.client.get("/metrics", headers=headers).status_code == 200
    assert guarded.client.post("/v1/events", headers=headers, content=b"").status_code == 415


@pytest.mark.parametrize("given", [TOKEN[:-1], TOKEN + "x", "x", TOKEN.upper(), "second line"])
def test_wrong_token_does_not_open(guarded: Collector, given: str) -> None:
    """Not a part of it, nor more than it, nor another line of its file."""
    assert guarded.client.get("/metrics", headers={"authorization": f"Bearer {given}"}).status_code == 401


def test_browser_reads_with_the_token_as_password(guarded: Collector) -> None:
    """The page opens in a browser; sending with remembered credentials does not work."""
    assert guarded.client.get("/", auth=("anyone", TOKEN)).status_code == 200
    assert guarded.client.post("/v1/events", auth=("anyone", TOKEN), content=b"").status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "kvscope.example"])
def test_other_addresses_need_a_token_or_a_plain_word(host: str, tmp_path: Path) -> None:
    """Listening for the whole network by accident is not possible."""
    with pytest.raises(UsageError, match="allow-unauthenticated"):
        create_app(load_settings(server={"host": host}))
    create_app(load_settings(server={"host": host, "allow_unauthenticated": True}))
    create_app(load_settings(server={"host": host, "token": "x"}))


@pytest.mark.parametrize("content", [None, "", "\n", b"\xff\xfe"])
def test_token_file_without_a_token_is_refused(tmp_path: Path, content: str | bytes | None) -> None:
    """An empty file must not mean: no token needed."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match="token"):
        read_token(load_settings(server={"token_file": str(path)}).server)
    with pytest.raises(UsageError, match="empty"):
        read_token(load_settings(server={"token": "  "}).server)


@pytest.mark.parametrize("token", ["a\0b", "two words", "p\xe4ss", "tab\tbed"])
def test_token_that_no_header_carries_is_refused(tmp_path: Path, token: str) -> None:
    """Else nobody could get in, and nobody would know why."""
    path = tmp_path / "token"
    path.write_bytes(f"{token}\n".encode())
    with pytest.raises(UsageError, match="characters that a header cannot carry"):
        read_token(load_settings(server={"token_file": str(path)}).server)
    with pytest.raises(UsageError, match="characters that a header cannot carry"):
        read_token(load_settings(server={"token": token}).server)


def test_token_file_of_any_editor_is_read(tmp_path: Path) -> None:
    """A byte-order mark, Windows line ends and spaces around it are no part of the token."""
    path = tmp_path / "token"
    path.write_bytes(b"\xef\xbb\xbf secret \r\nsecond\r\n")
    assert read_token(load_settings(server={"token_file": str(path)}).server) == "secret"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]"])
def test_who_connects_to_a_bound_address_is_answered(host: str) -> None:
    """The address is announced once it can be connected to, also one of the other loopback addresses."""
    with listen(host, 0) as sock:
        socket.create_connection(sock.getsockname()[:2], timeout=5).close()
        assert is_loopback(url_of(sock).removeprefix("http://").rpartition(":")[0])


def test_rebound_name_and_foreign_page_are_refused(tmp_path: Path) -> None:
    """Without a token the Host must be ours, and a page of another site may not send."""
    with running(tmp_path / "kvscope.duckdb") as collector:
        assert collector.client.get("/metrics", headers={"host": "evil.example"}).status_code == 403
        assert collector.client.get("/metrics").status_code == 200
        refused = collector.client.post("/v1/events", content=b"{}", headers={"origin": "http://evil.example"})
        assert refused.json()["type"] == "urn:kvscope:error:wrong-host"
        preflight = collector.client.options("/v1/events", headers={"origin": "http://evil.example"})
        assert "access-control-allow-origin" not in preflight.headers
        assert collector.post({"step": [step_row(1)]}).status_code == 200


def test_headers_that_do_not_come_are_not_waited_for(guarded: Collector) -> None:
    """A connection that says nothing, or half a header, is closed."""
    for beginning in (b"", b"GET /healthz HTTP/1.1\r\nHost: loc"):
        with socket.create_connection(guarded.address, timeout=10) as connection:
            connection.sendall(beginning)
            started = time.monotonic()
            assert connection.recv(1000) == b""
            assert time.monotonic() - started < 8


def test_endless_headers_are_refused(guarded: Collector) -> None:
    """Headers beyond 64 KiB end the connection with an error, not the memory."""
    with socket.create_connection(guarded.address, timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000)
        assert connection.recv(1000)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
    ],
    ids=["no host", "negative length", "two lengths", "encoded transfer", "TLS"],
)
def test_what_is_no_http_is_a_problem_too(guarded: Collector, sent: bytes) -> None:
    """One language for every error, also for what never reaches a route."""
    with socket.create_connection(guarded.address, timeout=10) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/problem+json" in head.lower()
    assert json.loads(body)["type"] == "urn:kvscope:error:bad-request"


def test_head_is_get_without_a_body(guarded: Collector) -> None:
    """Probes and `curl -I` ask with HEAD: the status and the headers of GET, on every route; a token is asked for."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    for path in ("/healthz", "/readyz", "/metrics", "/", "/openapi.json", "/api/v1/requests?limit=1"):
        answer = guarded.client.head(path, headers=headers)
        assert (answer.status_code, answer.content) == (200, b""), path
        assert int(answer.headers["content-length"]) > 0
    assert guarded.client.head("/metrics").status_code == 401
    assert guarded.client.head("/v1/events", headers=headers).status_code == 405


def test_connections_beyond_the_limit_are_503(tmp_path: Path) -> None:
    """More connections than the setting are told so."""
    with (
        running(tmp_path / "kvscope.duckdb", server={"max_connections": 3}) as collector,
        socket.create_connection(collector.address),
        socket.create_connection(collector.address),
        socket.create_connection(collector.address),
    ):
        time.sleep(0.1)
        answer = httpx.get(f"{collector.url}/healthz", trust_env=False)
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
        assert (answer.json()["limit"], answer.headers["retry-after"]) == (3, "1")


def test_bodies_of_questions_are_bounded_too(guarded: Collector) -> None:
    """SQL and marks: too large is 413, stopped in the middle 408, before the framework sees them."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    large = guarded.client.post("/api/v1/sql", headers=headers, json={"sql": "x" * 1_100_000})
    assert (large.status_code, large.json()["type"]) == (413, "urn:kvscope:error:too-large")
    head = f"POST /api/v1/marks HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 50\r\n\r\n{{"
    with socket.create_connection(guarded.address, timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_page_allows_nothing_from_elsewhere(tmp_path: Path) -> None:
    """No script but the collector's own, none inline, no frames; names that senders invent are escaped, live too."""
    with running(tmp_path / "kvscope.duckdb") as collector:
        collector.post({"step": [step_row(1, worker="<script>alert(1)</script>")]}, source="<b>").raise_for_status()
        answer = collector.client.get("/")
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe-eval" not in policy
        scripts = re.findall(r"<script[^>]*>(.*?)</script>", answer.text)
        assert scripts
        assert not any(scripts), "an inline script"
        assert "&lt;script&gt;" in answer.text
        assert "&lt;b&gt;" in answer.text
        with collector.client.stream("GET", "/live") as stream:
            told = next(line for line in stream.iter_lines() if line.startswith("data:"))
        assert "&lt;script&gt;" in told
        assert "<script" not in told
