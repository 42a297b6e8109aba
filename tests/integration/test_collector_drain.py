"""Stopping: what was accepted is committed and answered, nothing new is taken, and it ends in bounded time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from collector import serving
from collector.app import create_app
from collector.settings import load_settings
from engine_probe.listening import listen
from store.interface import Batch, Receipt
from store.open import open_store
from tests.integration.collector_harness import Collector, request_row, running, step_row


class Held:
    """A store whose appends wait for a word; everything else is the real one."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.entered, self.leave = threading.Event(), threading.Event()

    def append(self, batch: Batch, timeout_s: float = 30.0) -> Receipt:
        self.entered.set()
        assert self.leave.wait(20)
        receipt: Receipt = self._store.append(batch, timeout_s)
        return receipt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@contextmanager
def held(tmp_path: Path, **server: Any) -> Iterator[tuple[Collector, Held, Any]]:
    """A collector whose commits wait, and its real store."""
    with open_store(str(tmp_path / "kvscope.duckdb")) as real:
        store = Held(real)
        with running(tmp_path / "unused", store=store, server=server) as collector:  # type: ignore[arg-type]
            yield collector, store, real


def signal_to(collector: Collector) -> None:
    """What uvicorn does on a signal, without one: the tests share a process."""
    collector.server.handle_exit(signal.SIGTERM, None)


def test_batch_on_its_way_is_committed_and_answered_while_new_ones_are_refused(tmp_path: Path) -> None:
    """After the signal: readyz and new batches 503, the accepted batch 200, then the listener is gone."""
    with held(tmp_path) as (collector, store, real), ThreadPoolExecutor(1) as pool:
        first = pool.submit(collector.post, {"step": [step_row(1)]})
        assert store.entered.wait(10)
        signal_to(collector)
        assert collector.client.get("/readyz").status_code == 503
        assert collector.client.get("/healthz").status_code == 200
        refused = collector.post({"step": [step_row(2)]})
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:kvscope:error:not-ready")
        assert refused.headers["retry-after"] == "1"
        store.leave.set()
        assert first.result(20).json()["accepted"] == {"step": 1}
        _await_stopped(collector)
        assert real.query("SELECT step FROM step").column("step").to_pylist() == [1]


def test_drain_ends_though_a_batch_does_not(tmp_path: Path) -> None:
    """A commit that hangs does not keep the process: after the time limit it is left behind, and its sender told to keep it."""
    with held(tmp_path, drain_timeout_s=0.3) as (collector, store, _), ThreadPoolExecutor(1) as pool:
        first = pool.submit(collector.post, {"step": [step_row(1)]})
        assert store.entered.wait(10)
        signal_to(collector)
        deadline = time.monotonic() + 15
        while not collector.server.should_exit:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(serving.CLOSING_S + 0.5)
        store.leave.set()
        _await_stopped(collector)
        answer = first.result(20)
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:kvscope:error:not-ready")


def test_second_signal_does_not_wait(tmp_path: Path) -> None:
    """Whoever presses Ctrl+C twice means it."""
    with held(tmp_path) as (collector, store, _), ThreadPoolExecutor(1) as pool:
        pool.submit(collector.post, {"step": [step_row(1)]})
        assert store.entered.wait(10)
        signal_to(collector)
        assert not collector.server.should_exit
        signal_to(collector)
        assert collector.server.should_exit
        store.leave.set()
        _await_stopped(collector)


def test_sigterm_ends_the_command_with_everything_on_disk(tmp_path: Path) -> None:
    """`kvscope serve` says where it listens, stops on SIGTERM with exit code 0, and a new one finds the rows."""
    path = tmp_path / "kvscope.duckdb"
    with _command("--port", "0", "--store", str(path), "--json") as (process, url):
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            document = {"source": "s", "epoch": "e", "seq": 0, "events": {"request": [request_row("a")]}}
            assert client.post("/v1/events", json=document).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert "everything accepted is on disk" in _said(process)
        assert not Path(f"{path}.collector").exists()
    with open_store(str(path)) as store:
        assert store.query("SELECT request_id FROM request").column(0).to_pylist() == ["a"]
        assert [source.last_seq for source in store.sources()] == [0]
        assert list(store.verify()) == []


def test_question_that_the_end_cuts_off_is_told_so(tmp_path: Path) -> None:
    """A statement that runs when the collector stops is ended with it; who waits for it reads why, as a problem."""
    with _command("--port", "0", "--store", str(tmp_path / "k.duckdb"), "--json") as (process, url):
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            endless = {"sql": "SELECT count(*) FROM range(1000000000000)"}
            asked = pool.submit(client.post, "/api/v1/sql", json=endless)
            deadline = time.monotonic() + 30
            while not any(children.read_text() for children in Path("/proc").glob(f"{process.pid}/task/*/children")):
                assert time.monotonic() < deadline, "no process for the statement"
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            answer = asked.result(60)
            assert process.wait(30) == 0
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
        assert answer.json()["type"] == "urn:kvscope:error:not-ready"


def test_port_in_use_is_said_with_what_to_do(tmp_path: Path) -> None:
    """Exit code 3 and one line, before the store is touched."""
    with listen("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        ended = _ended("--port", str(port), "--store", str(tmp_path / "never.duckdb"))
    assert ended.returncode == 3
    assert f"port {port}: another process listens there" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "never.duckdb").exists()


def test_store_that_another_collector_holds_is_said(tmp_path: Path) -> None:
    """Exit code 3, naming the process; and `kvscope requests` asks that collector instead."""
    path = tmp_path / "kvscope.duckdb"
    with _command("--port", "0", "--store", str(path), "--json") as (process, url):
        httpx.post(f"{url}/v1/events", json={"events": {"request": [request_row("a")]}}, trust_env=False)
        ended = _ended("--port", "0", "--store", str(path))
        assert ended.returncode == 3
        assert str(process.pid) in ended.stderr
        asked = _kvscope("requests", "list", "--store", str(path), "--json")
        assert asked.returncode == 0, asked.stderr
        assert [row["request_id"] for row in json.loads(asked.stdout)["requests"]] == ["a"]
        assert f"asking the collector at {url}" in asked.stderr
        process.terminate()
        process.wait(30)
    direct = _kvscope("requests", "show", "a", "--store", str(path))
    assert direct.returncode == 0, direct.stderr
    assert "first token" in direct.stdout
    assert "asking" not in direct.stderr


def test_app_that_is_not_started_answers_503() -> None:
    """Between bind and open, a question is answered with what is the matter."""
    import asyncio

    app = create_app(load_settings())

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/readyz")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:kvscope:error:not-ready")


def _await_stopped(collector: Collector) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            httpx.get(f"{collector.url}/healthz", trust_env=False)
        except httpx.TransportError:
            return
        assert time.monotonic() < deadline, "it still answers"
        time.sleep(0.05)


_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KVSCOPE_")}


@contextmanager
def _command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kvscope serve ARGUMENTS --json` that listens, and its URL."""
    command = [sys.executable, "-m", "collector.cli", "serve", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=_ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):
                line = process.stdout.readline()
                assert line, f"it ended early: {_said(process)}"
                text += line
            url = json.loads(text)["url"]
            deadline = time.monotonic() + 30
            while True:
                try:
                    if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield process, url
        finally:
            if process.poll() is None:
                process.kill()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read()


def _ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _kvscope("serve", *arguments)


def _kvscope(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "collector.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=_ENVIRONMENT, check=False)
