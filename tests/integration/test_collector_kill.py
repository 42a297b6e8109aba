"""kill -9 in mid-ingest, again and again: no acknowledged row is lost, none is doubled."""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine_probe.schema import table_from_rows
from engine_probe.wire.codec import encode_arrow
from store.open import open_store
from tests.integration.collector_harness import ARROW, step_row

ROUNDS = 100
SENDERS = 3
ROWS = 5


class Sender:
    """Sends numbered batches under one identity; a batch without an answer is sent again, also to the next process.

    `step` of a row is 1000 * batch number + position, so every row can be told from every other.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.acknowledged: set[int] = set()
        self.duplicates = 0
        self._next = 0

    def run(self, port: int) -> None:
        """Send until the collector is gone."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            while True:
                connection.request("POST", "/v1/events", _body(self._next), self._headers())
                answer = connection.getresponse()
                document = msgspec.json.decode(answer.read())
                assert answer.status == 200, document
                self.acknowledged.add(self._next)
                self.duplicates += document["duplicate"]
                self._next += 1
        except (OSError, http.client.HTTPException, msgspec.DecodeError):
            return
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        return ARROW | {"kvscope-source": self.name, "kvscope-epoch": "epoch", "kvscope-seq": str(self._next)}


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """See collector_zygote; what the collectors say lands in collectors.log."""
    environment = os.environ | {"KVSCOPE_LOG__LEVEL": "error", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.integration.collector_zygote"]
    pipe = subprocess.PIPE
    with (
        (tmp_path / "collectors.log").open("w") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment) as process,
    ):
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


@pytest.mark.timeout(900)
def test_hundred_kills_lose_no_acknowledged_row_and_double_none(tmp_path: Path, zygote: subprocess.Popen[str]) -> None:
    """Three senders, a kill -9 while batches are on their way, the next process on the same file: 100 times.

    The moment is some acknowledgements after the start and a few milliseconds more, so that a slow machine is killed in
    mid-ingest too.
    """
    path = tmp_path / "kvscope.duckdb"
    chance = random.Random(20251129)
    senders = [Sender(f"sender-{i}") for i in range(SENDERS)]
    for _ in range(ROUNDS):
        pid, port = _start(zygote, path)
        threads = [threading.Thread(target=sender.run, args=(port,)) for sender in senders]
        for thread in threads:
            thread.start()
        _await_acknowledged(senders, _acknowledged(senders) + chance.randint(0, 6))
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
        _await_gone(pid)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert _acknowledged(senders) > ROUNDS, "too little was sent for the test to mean much"

    with open_store(str(path)) as store:
        assert list(store.verify()) == []
        for sender in senders:
            found = store.query("SELECT step FROM step WHERE source = ? ORDER BY step", [sender.name])
            steps = found.column("step").to_pylist()
            assert len(steps) == len(set(steps)), "a row is there twice"
            missing = {1000 * seq + i for seq in sender.acknowledged for i in range(ROWS)} - set(steps)
            assert not missing, f"acknowledged rows are gone: {sorted(missing)[:5]}"
            unacknowledged = {step // 1000 for step in steps} - sender.acknowledged
            assert unacknowledged <= {len(sender.acknowledged)}, "only the batch without an answer may be there unasked"


def test_kill_of_a_collector_started_by_its_command(tmp_path: Path) -> None:
    """The same once with the command a person types, killed while it runs, then read back."""
    path = tmp_path / "kvscope.duckdb"
    port = _free_port()
    command = [sys.executable, "-m", "collector.cli", "serve", "--port", str(port), "--store", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await_ready(port)
            sender = Sender("one")
            thread = threading.Thread(target=sender.run, args=(port,))
            thread.start()
            _await_acknowledged([sender], 3)
        finally:
            process.kill()
        thread.join(20)
    with open_store(str(path)) as store:
        stored = store.query("SELECT count(*) AS n, count(DISTINCT step) AS d FROM step").to_pylist()[0]
        assert stored["n"] == stored["d"] >= ROWS * len(sender.acknowledged) > 0
        assert list(store.verify()) == []


def _acknowledged(senders: list[Sender]) -> int:
    return sum(len(sender.acknowledged) for sender in senders)


def _await_acknowledged(senders: list[Sender], count: int) -> None:
    deadline = time.monotonic() + 10
    while _acknowledged(senders) < count and time.monotonic() < deadline:
        time.sleep(0.001)


def _await_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.001)
    raise AssertionError("a killed process is still there")


def _start(zygote: subprocess.Popen[str], path: Path) -> tuple[int, int]:
    """A new collector: its pid and port."""
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    port = _free_port()
    zygote.stdin.write(f"{path} {port}\n")
    zygote.stdin.flush()
    pid = int(zygote.stdout.readline())
    _await_ready(port)
    return pid, port


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _await_ready(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        assert time.monotonic() < deadline, "the collector did not start; see collectors.log"
        time.sleep(0.01)


def _body(seq: int) -> bytes:
    return encode_arrow({"step": table_from_rows("step", [step_row(1000 * seq + i) for i in range(ROWS)])})
