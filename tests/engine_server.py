"""The embedded engine's server inside this process, on a real loopback port, with a tiny seeded model and a sink in memory.

Every server that a test has used is checked at its end: no sequence is left, every block is free or cached.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.kv_identity import KvIdentity
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.server.assembly import Assembled, ServerOptions, assemble
from engine_probe.engine.server.model import ServedModel
from engine_probe.engine.server.serving import Server, serve
from engine_probe.engine.torch_executor.chat_template import ChatTemplate
from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions
from engine_probe.engine.torch_executor.tokenizer import ByteTokenizer
from engine_probe.listening import listen, url_of
from engine_probe.sending.sink import MemorySink
from tests.torch_models import TINY

# One thread: the tiny shapes gain nothing from more, and two cores are shared by everything that runs.
torch.set_num_threads(1)

NAME = "tiny"
BLOCK = 4


@dataclass
class Running:
    """A server that answers at `url`; `client` asks it; `sink` has its rows once it is closed."""

    url: str
    assembled: Assembled
    server: Server
    sink: MemorySink
    client: httpx.Client
    thread: threading.Thread

    def ask(self, what: Callable[[Engine], Any]) -> Any:
        """Something of the engine, between two of its steps."""
        return self.assembled.thread.call(what).result(20)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """A completion, which must be answered with 200."""
        answer = self.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def wait_until(self, what: Callable[[], Any]) -> None:
        """`what` becomes true, or the test fails."""
        deadline = time.monotonic() + 20
        while not what():
            assert time.monotonic() < deadline, "it never became true"
            time.sleep(0.005)

    def wait_until_empty(self) -> None:
        """Nothing is under way in the engine, and blocks add up."""
        self.wait_until(lambda: self.ask(lambda engine: not engine.has_work))
        self.ask(lambda engine: engine.check_integrity())
        assert self.ask(lambda engine: engine.kv.pool.num_referenced) == 0

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a series over the label sets that have these labels: the tests' own reading of the page."""
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in self.client.get("/metrics").text.splitlines()
            if line.startswith((name + "{", name + " "))
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        ]
        assert found, f"{name} {labels} is not on the page"
        return sum(found)


def served_model(num_blocks: int = 64, max_context: int | None = None, **options: Any) -> ServedModel:
    """TINY under the name `tiny`, bytes for tokens, blocks of 4 tokens."""
    given = {"device": "cpu", "num_blocks": num_blocks, "block_size": BLOCK, "max_context": max_context, **options}
    executor = TorchExecutor.seeded(TINY, 0, TorchOptions(**given))
    return ServedModel(
        (NAME, "other-name"), NAME, executor, ByteTokenizer(), ChatTemplate(), KvIdentity(NAME), TINY.vocab_size
    )


@contextlib.contextmanager
def engine_server(
    model: ServedModel | None = None,
    options: ServerOptions | None = None,
    *,
    max_num_seqs: int = 128,
    drain_s: float = 20.0,
    policy: str = "fcfs",
    **config: Any,
) -> Iterator[Running]:
    """A server that runs; at the end its engine is asked whether everything adds up."""
    model = model or served_model()
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512, policy=policy)
    engine_config = EngineConfig(block_size=BLOCK, scheduler=scheduler, **config)
    sink = MemorySink()
    assembled = assemble(model, engine_config, sink, options)
    sock = listen("127.0.0.1", 0)
    ready = threading.Event()
    server = Server(assembled.app, assembled.front, drain_s=drain_s, on_ready=ready.set)
    url = url_of(sock)
    thread = threading.Thread(target=serve, args=(server, sock), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            running = Running(url, assembled, server, sink, client, thread)
            yield running
            if assembled.thread.is_alive and thread.is_alive():
                running.wait_until_empty()
    finally:
        server.should_exit = True
        thread.join(20)
        assembled.close()
    assert not thread.is_alive()
    assembled.engine.check_integrity()


def launch(*arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """`kvscope engine serve` as a process, and what it says of itself."""
    command = [sys.executable, "-m", "collector.cli", "engine", "serve", "--port", "0", "--threads", "1", "--json"]
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout is not None
    document = ""
    for line in process.stdout:
        document += line
        if line.startswith("}"):
            return process, json.loads(document)
    raise AssertionError(process.communicate()[1])


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it said."""
    _, said = process.communicate(timeout=60)
    return process.returncode, said
