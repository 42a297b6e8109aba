"""`kvscope proxy` as a user starts it: a process of its own, before a real upstream, writing into a store."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 60.0


@dataclass
class Proxy:
    """A running proxy; after the context it has ended."""

    port: int
    store: str
    process: subprocess.Popen[bytes]
    summary: Mapping[str, Any] = field(default_factory=dict)
    code: int | None = None

    def post(
        self, path: str, document: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(
                "POST", path, json.dumps(document), {"Content-Type": "application/json", **(headers or {})}
            )
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()


@contextlib.contextmanager
def running_proxy(folder: Path, upstreams: Sequence[str], *options: str, to: str | None = None) -> Iterator[Proxy]:
    """Start it, wait until it listens, stop it as Ctrl-C does, keep its summary. to: a collector instead of a store."""
    store, out, err = str(folder / "store.duckdb"), folder / "proxy.out", folder / "proxy.err"
    target = ["--store", store] if to is None else ["--to", to]
    command = [sys.executable, "-m", "collector.cli", "proxy", "--listen", "127.0.0.1:0", "--json", *target]
    for upstream in upstreams:
        command += ["--upstream", upstream]
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVSCOPE_")}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen([*command, *options], stdout=stdout, stderr=stderr, cwd=ROOT, env=env)
    proxy = Proxy(0, store, process)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "kvscope proxy at http://127.0.0.1:" not in err.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"kvscope proxy did not start:\n{err.read_text()}")
            time.sleep(0.05)
        proxy.port = int(err.read_text().partition("http://127.0.0.1:")[2].split(":", 1)[0])
        yield proxy
        process.send_signal(signal.SIGINT)
        proxy.code = process.wait(PATIENCE_S)
        proxy.summary = json.loads(out.read_text())
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
