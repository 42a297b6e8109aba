"""`attach` to Dynamo, llm-d's picker, an LMCache server and a Mooncake master: what is written, and what else may be there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_probe.adapters.registry import adapter
from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.errors import KvscopeError
from tests.attach_engine import FakeEngine, ListSink
from tests.attach_running import STRANGE_PAGES
from tests.host_pages import with_values
from tests.unit.test_hosts_attach import attach, named

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
PAGES = {
    "dynamo": "dynamo-1.6.1/frontend.prom",
    "llm-d": "llmd_epp_metrics.synthetic.prom",
    "lmcache": "lmcache-0.5.6/multiprocess.prom",
    "mooncake": "mooncake-0.3.13/master.prom",
}


def text_of(engine: str) -> str:
    return (SAMPLES / PAGES[engine]).read_text()


@pytest.fixture
def server() -> Iterator[FakeEngine]:
    server = FakeEngine()
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("engine", PAGES)
@pytest.mark.parametrize(("status", "content_type", "body", "said"), STRANGE_PAGES)
def test_what_is_something_else_is_told_in_a_sentence(
    server: FakeEngine, engine: str, status: int, content_type: str, body: str, said: str
) -> None:
    """HTML, an engine, nothing, no token, no page, half a line, a server in trouble."""
    server.set_metrics(body, status, content_type)
    with pytest.raises(KvscopeError) as caught:
        attach(server, engine, lambda s: False)
    assert said in caught.value.message


@pytest.mark.parametrize("engine", PAGES)
@pytest.mark.parametrize("other", PAGES)
def test_one_for_the_other(server: FakeEngine, engine: str, other: str) -> None:
    """The right word is named where the page is another's that is known."""
    if engine == other:
        return
    server.set_metrics(text_of(other))
    with pytest.raises(KvscopeError) as caught:
        attach(server, engine, lambda s: False)
    assert f"kvscope attach {other}" in caught.value.message


@pytest.mark.parametrize("engine", PAGES)
def test_half_a_body_is_no_page(engine: str) -> None:
    """The connection ends within the page: nothing of it is written."""
    listener = socket.create_server(("127.0.0.1", 0))
    body = text_of(engine).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def answer() -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            with taken:
                taken.recv(65_536)
                taken.sendall(head + body[: len(body) // 2])

    threading.Thread(target=answer, daemon=True).start()
    try:
        with pytest.raises(KvscopeError) as caught:
            attach(FakeEngine(), engine, lambda s: False, url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        listener.close()
    assert caught.value.message.endswith((".", "?"))
    assert "IncompleteRead" not in caught.value.message


@pytest.mark.parametrize(
    ("engine", "counter", "name"),
    [
        ("dynamo", "dynamo_frontend_requests_total", "dynamo_frontend_requests_total"),
        ("llm-d", "kvcache_index_lookup_requests_total", "kvcache_index_lookup_requests_total"),
        ("lmcache", "lmcache_mp_lookup_hit_tokens_total", "external_hits_tokens_total"),
        ("mooncake", "mem_cache_hit_bytes_total", "tier_read_bytes_total"),
    ],
)
def test_a_counter_that_falls_is_stored_as_it_is(server: FakeEngine, engine: str, counter: str, name: str) -> None:
    """500, then 20 after a restart: both stand in the rows, and differencing them is the reader's."""
    server.set_metrics(with_values(text_of(engine), {counter: 500}))

    def until(sink: ListSink) -> bool:
        values = {row["value"] for row in named(sink, name)}
        if values == {500.0} or values == {500.0, 0.0}:
            server.set_metrics(with_values(text_of(engine), {counter: 20}))
        return 20.0 in values

    sink, _, _ = attach(server, engine, until)
    values = [row["value"] for row in named(sink, name) if row["value"] in (500.0, 20.0)]
    assert 500.0 in values
    assert values.index(20.0) > values.index(500.0)


def test_a_cache_server_that_goes_away_is_a_gap(server: FakeEngine) -> None:
    """No engine ended: one gap mark about the server."""
    server.set_metrics(text_of("lmcache"))
    stopped: list[bool] = []

    def until(sink: ListSink) -> bool:
        if not stopped and named(sink, "external_hits_tokens_total"):
            server.stop()
            stopped.append(True)
            time.sleep(0.2)
            server.start()
        return bool(sink.rows("mark"))

    sink, summary, _ = attach(server, "lmcache", until)
    assert [row["mark"] for row in sink.rows("mark")] == ["gap"]
    assert sink.rows("worker") == []
    assert summary.restarts == 0


def test_a_pickers_log_is_followed(server: FakeEngine, tmp_path: Path) -> None:
    """Decisions join the engines by their address, or by the name that --map gives them."""
    server.set_metrics(text_of("llm-d"))
    log = tmp_path / "epp.log"
    log.write_text('{"level":"info","msg":"Flags processed"}\n')
    rules = WorkerMap.parse(["worker:10.0.0.1:8000=vllm-0"])

    def until(sink: ListSink) -> bool:
        if named(sink, "inference_pool_ready_pods") and "client-000" not in log.read_text():
            with log.open("a") as file:
                file.write((SAMPLES / "llmd_epp_log.synthetic.jsonl").read_text())
        return len(sink.rows("route")) >= 4

    sink, _, said = attach(server, "llm-d", until, worker="epp", log=log, worker_map=rules)
    rows = sink.rows("route")
    assert [(row["request_id"], row["chosen"], row["router"]) for row in rows[:2]] == [
        ("client-000", "vllm-0", "epp"),
        ("client-001", "10.0.0.2:8000", "epp"),
    ]
    assert [one["worker"] for one in rows[0]["candidates"]] == ["vllm-0", "10.0.0.2:8000"]
    (worker,) = sink.rows("worker")
    assert (worker["role"], worker["engine"]) == ("router", "llm-d")
    assert any(line.startswith("routes     waiting") for line in said)


def test_every_guide_exists() -> None:
    """What an error message refers to is there."""
    root = Path(__file__).parents[2]
    assert all((root / adapter(engine).guide).exists() for engine in PAGES)
