"""`kvscope proxy` as a person starts it: what it says, what it refuses, how it ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine_probe.attach.funnel_sink import FunnelSink
from engine_probe.errors import StoreBusy, UsageError
from engine_probe.proxy.session import ProxyOptions, ProxySession
from engine_probe.sending.sink import MemorySink
from store.open import open_store
from tests.conftest import Ended
from tests.integration.test_proxy_rows import CHAT, PROMPT, stream
from tests.proxy_lab import Peer
from tests.proxy_running import running_proxy


@pytest.fixture
def engine() -> Iterator[str]:
    """An engine that streams a chat, in a loop of its own; its address."""
    loop = asyncio.new_event_loop()
    port: list[int] = []
    servers: list[asyncio.Server] = []
    ready = threading.Event()

    async def serve() -> None:
        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await stream(*CHAT)(Peer(reader, writer))
            except ConnectionError:
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(play, "127.0.0.1", 0)
        servers.append(server)
        port.append(server.sockets[0].getsockname()[1])
        ready.set()

    loop.run_until_complete(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield f"http://127.0.0.1:{port[0]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    servers[0].close()
    loop.run_until_complete(_cancel_all())
    loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def test_a_run_from_start_to_ctrl_c(engine: str, tmp_path: Path) -> None:
    """It says where it listens, passes on, writes rows on its way out, and its summary counts them."""
    with running_proxy(tmp_path, [f"w0={engine}"], "--tag", "tenant=X-Tenant") as proxy:
        for number in range(3):
            status, headers, body = proxy.post("/v1/chat/completions", json.loads(PROMPT), {"X-Tenant": f"t{number}"})
            assert status == 200
            assert body.count(b"data: ") == len(CHAT)
            assert len(headers["x-request-id"]) == 32
    assert proxy.code == 0
    assert (proxy.summary["requests"], proxy.summary["recorded"], proxy.summary["states"]) == (3, 3, {"finished": 3})
    assert proxy.summary["lost_rows"] == {}
    store = open_store(proxy.store, read_only=True)
    rows = store.query("SELECT tenant, worker, vantage, output_tokens FROM request ORDER BY arrival_ns").to_pylist()
    routers = set(store.query("SELECT router FROM route").column(0).to_pylist())
    store.close()
    assert [row["tenant"] for row in rows] == ["t0", "t1", "t2"]
    assert {(row["worker"], row["vantage"], row["output_tokens"]) for row in rows} == {("w0", "client", 2)}
    assert routers == {"proxy:127.0.0.1:0"}
    said = (tmp_path / "proxy.err").read_text()
    assert f"point clients there instead of at w0={engine}" in said
    assert "Stopping" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--upstream", "ftp://x"), "not an HTTP address"),
        (("--upstream", "http://a:b"), "not an address"),
        (("--upstream", "http://a:1/x?y=1"), "more than host, port and path"),
        (("--upstream", "http://a:1", "--upstream", "http://a:1/"), "give them names"),
        (("--upstream", "a:1", "--listen", "0.0.0.0:0"), "--allow-remote"),
        (("--upstream", "a:1", "--listen", "example.org:80"), "--allow-remote"),
        (("--upstream", "a:1", "--listen", "nowhere"), "expected HOST:PORT"),
        (("--upstream", "a:1", "--listen", "127.0.0.1:99999"), "expected HOST:PORT"),
        (("--upstream", "a:1", "--policy", "random"), "least_outstanding or round_robin"),
        (("--upstream", "a:1", "--vantage", "engine"), "client or router"),
        (("--upstream", "a:1", "--sample", "0"), "sampling rate"),
        (("--upstream", "a:1", "--tag", "tenant"), "NAME=HEADER"),
        (("--upstream", "a:1", "--tag", "te nant=X"), "NAME=HEADER"),
        (("--upstream", "a:1", "--block-size", "8"), "--tokenize"),
        (("--upstream", "a:1", "--connect-timeout", "soon"), "--connect-timeout"),
        (("--upstream", "a:1", "--to", "http://c:1", "--store", "s"), "not both"),
        (("--upstream", "https://a:1", "--ca", "/no/such.pem"), "authority"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_opened(
    kvscope: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    """Exit 2 with a sentence that names the option; no store is made."""
    monkeypatch.chdir(tmp_path)
    ended = kvscope("proxy", *options)
    assert ended.code == 2
    assert words in ended.err
    assert list(tmp_path.iterdir()) == []


def test_an_upstream_is_needed(kvscope: Callable[..., Ended]) -> None:
    """The one option without a default."""
    ended = kvscope("proxy")
    assert ended.code == 2
    assert "--upstream" in ended.err


def test_an_address_in_use_ends_the_verb_with_its_reason(
    engine: str, kvscope: Callable[..., Ended], tmp_path: Path
) -> None:
    """The engine's own port, for one."""
    port = engine.rpartition(":")[2]
    store = tmp_path / "s.duckdb"
    ended = kvscope("proxy", "--upstream", engine, "--listen", f"127.0.0.1:{port}", "--store", store)
    assert ended.code == 2
    assert f"127.0.0.1:{port} cannot be listened on" in ended.err


def test_the_summary_for_people(engine: str, kvscope: Callable[..., Ended], tmp_path: Path) -> None:
    """Without --json: one sentence of what passed."""
    options = ("--listen", "127.0.0.1:0", "--duration", "200ms", "--store", tmp_path / "s.duckdb")
    ended = kvscope("proxy", "--upstream", engine, *options)
    assert ended.code == 0
    assert ended.out.startswith("Passed on 0 requests in 0 s; recorded 0 in ")


class Busy(MemorySink):
    """A store that is busy at first."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 3

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreBusy("the queue is full")
        super().write(tables)


def test_rows_wait_while_the_store_is_busy(engine: str) -> None:
    """What the recorder hands over is offered again until it is taken."""
    sink, stop = Busy(), threading.Event()
    session = ProxySession(ProxyOptions(upstreams=[engine], duration_s=30))

    def ask(url: str) -> None:
        threading.Thread(target=_ask_and_stop, args=(url, stop), daemon=True).start()

    summary = session.run(FunnelSink(sink, "kvscope proxy"), stop, ask)
    assert summary.recorded == sink.num_rows["request"] == 2
    assert (sink.refusals, summary.lost_rows) == (0, {})


def _ask_and_stop(url: str, stop: threading.Event) -> None:
    import urllib.request

    for _ in range(2):
        request = urllib.request.Request(f"{url}/v1/chat/completions", PROMPT.encode())
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.read()
    stop.set()


def test_lost_rows_are_told_by_who_lost_them() -> None:
    """A funnel speaks in the name of the verb that fills it."""

    class Refusing(MemorySink):
        def write(self, tables: Mapping[str, pa.Table]) -> None:
            if "route" in tables:
                raise ValueError("no")
            super().write(tables)

    sink = Refusing()
    funnel = FunnelSink(sink, "kvscope proxy")
    from engine_probe.schema import table_from_rows

    funnel.write({"route": table_from_rows("route", [{"at_ns": 1_764_000_000_000_000_000, "request_id": "r"}])})
    funnel.close()
    assert funnel.lost == {"route": 1}
    marks: list[dict[str, Any]] = sink.table("mark").to_pylist(maps_as_pydicts="strict")
    assert [(mark["mark"], mark["subject"], mark["text"]) for mark in marks] == [
        ("gap", "kvscope proxy", "kvscope proxy lost rows: 1 route.")
    ]


def test_a_wrong_vantage_is_refused_by_the_session_too() -> None:
    """Whoever uses it as a library is told the same."""
    with pytest.raises(UsageError, match="client or router"):
        ProxySession(ProxyOptions(upstreams=["http://a:1"], vantage="engine"))
