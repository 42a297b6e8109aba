"""The proxy before an upstream that speaks TLS, as closed APIs do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine_probe.attach.fetch import trust
from engine_probe.proxy.context import Context
from engine_probe.proxy.server import ProxyServer
from engine_probe.proxy.upstreams import SETTLE_S, Balancer, parse_upstream
from tests.integration.test_proxy_rows import CHAT, PROMPT, Record, stream
from tests.proxy_answers import wire
from tests.proxy_lab import Lab, Peer, Script, body_of, post, run


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificate and key of 127.0.0.1, which only the certificate itself vouches for."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    folder = tmp_path_factory.mktemp("tls")
    key, ca = folder / "key.pem", folder / "ca.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made = [openssl, "req", "-x509", *curve, "-nodes", "-keyout", str(key), "-out", str(ca), "-days", "2", *subject]
    subprocess.run(made, check=True, capture_output=True)
    return ca, key


@contextlib.asynccontextmanager
async def tls_lab(
    script: Script, certificate: tuple[Path, Path], record: Record, verify: bool | ssl.SSLContext
) -> AsyncIterator[Lab]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError, ssl.SSLError):
            await script(Peer(reader, writer))
        writer.transport.abort()

    upstream = await asyncio.start_server(play, "127.0.0.1", 0, ssl=context)
    port = upstream.sockets[0].getsockname()[1]
    shared = Context(
        Balancer([parse_upstream(f"api=https://127.0.0.1:{port}", verify)]),
        record.recording,
        loop=asyncio.get_running_loop(),
    )
    proxy = ProxyServer(shared, "127.0.0.1", 0)
    await proxy.start()
    here = Lab(proxy.address[1], shared, proxy, [port])
    try:
        yield here
    finally:
        await proxy.drain(0.0)
        for peer in here.peers:
            peer.writer.transport.abort()
        upstream.close()
        await asyncio.sleep(0.05)


def test_a_stream_over_tls_is_passed_on_and_recorded(certificate: tuple[Path, Path]) -> None:
    """Byte for byte, on connections that stay."""
    record = Record()

    async def story() -> None:
        async with tls_lab(stream(*CHAT), certificate, record, trust(certificate[0])) as here:
            for _ in range(2):
                body = body_of(await here.ask(post(PROMPT.encode())))
                assert body == b"".join(b"%x\r\n%b\r\n" % (len(d), d) for d in wire(CHAT)) + b"0\r\n\r\n"
                await asyncio.sleep(2 * SETTLE_S)  # after a stream a connection settles before it is used again
            assert len(here.context.balancer.upstreams[0].idle) == 1

    run(story)
    assert [(row["state"], row["worker"], row["token_counts"]) for row in record.rows()] == [
        ("finished", "api", [1, 1])
    ] * 2


def test_a_certificate_that_nobody_vouches_for_is_a_502_that_says_what_to_do(certificate: tuple[Path, Path]) -> None:
    """In the words of attach."""
    record = Record()

    async def story() -> None:
        async with tls_lab(stream(*CHAT), certificate, record, True) as here:
            answer = await here.ask(post(PROMPT.encode()))
            assert answer.startswith(b"HTTP/1.1 502 ")
            detail = json.loads(body_of(answer))["detail"]
            assert "shows a certificate that this machine does not trust" in detail
            assert "--ca FILE" in detail

    run(story)


def test_a_client_that_closes_its_sending_half_ends_a_request_over_tls(certificate: tuple[Path, Path]) -> None:
    """TLS has no half-close: the upstream is told the only thing it can be told."""
    record, ended = Record(), asyncio.Event()

    async def upstream(peer: Peer) -> None:
        await peer.request()
        await peer.rest()
        ended.set()

    async def story() -> None:
        async with tls_lab(upstream, certificate, record, trust(certificate[0])) as here:
            client = await here.connect()
            await client.send(post(PROMPT.encode()))
            await asyncio.sleep(0.1)
            client.writer.write_eof()
            assert await client.rest() == b""
            await asyncio.wait_for(ended.wait(), 10)

    run(story)
    assert [(row["state"], row["error"]) for row in record.rows()] == [("aborted", "the client closed")]
