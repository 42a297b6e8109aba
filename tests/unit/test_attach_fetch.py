"""Every way in which asking an engine can go wrong is a sentence that helps, and the right exit code."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_probe.attach import fetch
from engine_probe.attach.fetch import EngineClient, normalise_url, trust
from engine_probe.errors import EXIT_MISUSE, EXIT_UNREACHABLE, EngineUnreachable, UnknownFormat, UsageError
from tests.attach_engine import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine().start()
    yield engine
    engine.stop()


@pytest.mark.parametrize(
    "text",
    ["h:8000", "http://h:8000", "http://h:8000/", "http://h:8000/metrics", " http://h:8000/v1/ ", "h:8000/health"],
)
def test_an_address_in_any_form_is_the_same_engine(text: str) -> None:
    """People paste what they have."""
    assert normalise_url(text) == "http://h:8000"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://h",
        "http://",
        "http://h:port",
        "http:///metrics",
        "h:0",
        "h:99999",
        "h:-1",
        "a..b",
        "xn--",
        ".",
        "h" * 64,
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """With what was expected, and before a connection is tried: names and ports that no resolver takes among them."""
    with pytest.raises(UsageError, match="http://host:port"):
        normalise_url(text)


@pytest.mark.parametrize("text", ["http://me:secret@h:0", "http://me:secret@a..b", "http://me:secret@h:port"])
def test_a_password_is_in_no_message(text: str) -> None:
    """Also where the address is refused for something else."""
    with pytest.raises(UsageError) as caught:
        normalise_url(text)
    assert "secret" not in str(caught.value) + str(caught.value.facts)


def fails(url: str, **options: bool) -> Exception:
    client = EngineClient(url, timeout_s=0.3, **options)
    try:
        with pytest.raises((EngineUnreachable, UnknownFormat, UsageError)) as caught:
            client.metrics()
        return caught.value
    finally:
        client.close()


def test_nobody_there(engine: FakeEngine) -> None:
    """Exit code 3, and the two questions to ask."""
    engine.stop()
    error = fails(engine.url)
    assert isinstance(error, EngineUnreachable)
    assert "Is the engine up, and is this its HTTP port?" in error.message
    assert (error.exit_code, error.is_timeout) == (EXIT_UNREACHABLE, False)


def test_an_unknown_name() -> None:
    """A typo in the host."""
    error = fails("http://no-such-host.invalid:8000")
    assert "no-such-host.invalid" in str(error)
    assert isinstance(error, EngineUnreachable)


def test_one_who_accepts_and_never_answers() -> None:
    """Told apart from a dead one: it may be busy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        error = fails(f"http://127.0.0.1:{server.getsockname()[1]}")
    assert isinstance(error, EngineUnreachable)
    assert error.is_timeout
    assert "did not answer within 0.3 s" in error.message


def test_one_who_speaks_something_else() -> None:
    """An SSH or TLS server closes, or says what is no HTTP."""

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"\x15\x03\x01\x00\x02\x02\x46")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        error = fails(url)
        thread.join(5)
    assert url.replace("http://", "https://") in str(error)


def test_tls_asked_of_plain_http(engine: FakeEngine) -> None:
    """The other way round."""
    error = fails(engine.url.replace("http://", "https://"))
    assert f"does not speak TLS; use {engine.url}" in str(error)


@pytest.fixture
def tls_engine(engine: FakeEngine, tmp_path: Path) -> tuple[str, Path]:
    """The engine behind TLS, with a certificate that only `ca` vouches for; address and `ca`."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    key, ca = tmp_path / "key.pem", tmp_path / "ca.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made = [openssl, "req", "-x509", *curve, "-nodes", "-keyout", str(key), "-out", str(ca), "-days", "2", *subject]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca, key)
    engine.stop()
    engine.port = 0
    engine.start(context)
    return engine.url.replace("http://", "https://"), ca


def test_a_certificate_of_ones_own(tls_engine: tuple[str, Path]) -> None:
    """Refused with both ways out; taken with its authority, and, for a test, without any."""
    url, ca = tls_engine
    error = fails(url)
    assert "--ca FILE" in str(error)
    assert "--insecure" in str(error)
    for verify in (trust(ca), trust(None, insecure=True)):
        client = EngineClient(url, verify=verify)
        assert client.json("/version") == {"version": "0.32.0"}
        client.close()


def test_plain_http_asked_of_tls(tls_engine: tuple[str, Path]) -> None:
    """The address is shown as it should be."""
    url, _ = tls_engine
    assert url in str(fails(url.replace("https://", "http://")))


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_is_none(tmp_path: Path, content: str | None) -> None:
    """A missing file, and one that is no PEM."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="--ca takes a PEM file"):
        trust(path)


def test_a_key_is_asked_for_by_option_name(engine: FakeEngine) -> None:
    """401 is misuse, not absence; with the key it is sent as a bearer token."""
    engine.set_metrics("no", status=401)
    error = fails(engine.url)
    assert isinstance(error, UsageError)
    assert error.exit_code == EXIT_MISUSE
    assert "--engine-key" in error.message
    client = EngineClient(engine.url, key="sesame")
    client.json("/version")
    client.close()
    assert engine.headers["authorization"] == "Bearer sesame"


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (404, UnknownFormat, "has no /metrics"),
        (307, UnknownFormat, "redirects to http://elsewhere/metrics"),
        (503, EngineUnreachable, "the server is up, but its engine may not be"),
        (418, UnknownFormat, "answers 418"),
    ],
)
def test_other_answers(engine: FakeEngine, status: int, kind: type[Exception], text: str) -> None:
    """Each status has its sentence."""
    engine.set_metrics("x", status=status)
    error = fails(engine.url)
    assert isinstance(error, kind)
    assert text in str(error)


def test_an_endless_body_is_cut_off(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded."""
    monkeypatch.setattr(fetch, "MAX_BODY_BYTES", 1000)
    engine.set_metrics("x" * 2000)
    assert isinstance(fails(engine.url), UnknownFormat)


@contextlib.contextmanager
def answering(*parts: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """The address of a server that answers one request by `parts`, with pauses between, and closes."""

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(10_000)
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (HEAD + b"Content-Length: 9\r\n\r\nhalf", EngineUnreachable, "broke its answer off half-way"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\nhalf", EngineUnreachable, "broke its answer off half-way"),
        (
            HEAD + b"Content-Encoding: gzip\r\n\r\nnot gzip",
            UnknownFormat,
            "not compressed in the way that its header says",
        ),
        (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\r\n\r\n", EngineUnreachable, "not in HTTP/1.1"),
    ],
)
def test_an_answer_that_is_broken_has_its_own_sentence(answer: bytes, kind: type[Exception], text: str) -> None:
    """Half a body, a compression that is none, HTTP/2: none of them is told as if nobody had answered."""
    with answering(answer) as url:
        error = fails(url)
    assert isinstance(error, kind)
    assert text in str(error)


def test_a_server_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes in time, the whole never does: a time-out, so that nobody waits for ever."""
    monkeypatch.setattr(fetch, "WHOLE_FACTOR", 0.1)
    with answering(HEAD + b"\r\n", *[b"# x\n"] * 4, pause_s=0.05) as url:
        error = fails(url)
    assert isinstance(error, EngineUnreachable)
    assert "was not at its end after" in error.message
    assert error.is_timeout


def test_headers_outside_of_ascii_are_read_on() -> None:
    """A strange content type is no reason to fail: the body decides."""
    with answering(HEAD + b"Content-Type: t\xe9xt/plain\r\nContent-Length: 2\r\n\r\n# ") as url:
        client = EngineClient(url)
        assert client.metrics()[0] == b"# "
        client.close()


def test_json_that_is_too_deep_says_nothing() -> None:
    """As an endpoint that does not answer: a hundred thousand brackets are no reason to end."""
    with answering(HEAD + b"\r\n" + b"[" * 100_000) as url:
        client = EngineClient(url)
        assert client.json("/version") is None
        client.close()


def test_json_is_none_where_there_is_none(engine: FakeEngine) -> None:
    """Older releases lack endpoints; a page that is no JSON says nothing either."""
    client = EngineClient(engine.url)
    assert client.json("/version") == {"version": "0.32.0"}
    assert client.json("/server_info") is None
    engine.pages["/version"] = (200, "text/html", "<html>")
    assert client.json("/version") is None
    engine.stop()
    assert client.json("/version") is None
    client.close()
