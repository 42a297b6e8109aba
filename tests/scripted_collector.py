"""A collector for tests of senders: real HTTP on a free loopback port, answers as scripted, applies a batch once.

It hangs up, answers late or refuses as the test asks; what it accepted it decodes with the real codec.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from engine_probe.wire.codec import Decoded, decode_arrow


@dataclass(frozen=True)
class Reply:
    """What to answer.

    hang       nothing at all until the server stops
    hang_up    close the connection without an answer;  close_after: with one, and without saying so
    apply      store the batch before answering
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    hang: bool = False
    hang_up: bool = False
    close_after: bool = False
    apply: bool = True


@dataclass(frozen=True)
class Arrival:
    """One request as it came."""

    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> tuple[str, int]:
        """Epoch and number of the batch."""
        return self.headers["kvscope-epoch"], int(self.headers["kvscope-seq"])


class ScriptedCollector:
    """`script(arrival, n)` says how to answer the n-th request (from 0); None means as a collector should."""

    def __init__(self, script: Callable[[Arrival, int], Reply | None] | None = None) -> None:
        self.script = script
        self.arrivals: list[Arrival] = []
        self.applied: dict[tuple[str, int], Decoded] = {}
        self.most_in_flight = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        self.stopping = threading.Event()

    def rows(self, kind: str) -> list[dict[str, object]]:
        """All rows of a kind that were applied, by identity."""
        found = [self.applied[key].tables.get(kind) for key in sorted(self.applied)]
        return [row for table in found if table is not None for row in table.to_pylist()]

    def answer(self, arrival: Arrival) -> Reply:
        """Judge one request."""
        with self._lock:
            number = len(self.arrivals)
            self.arrivals.append(arrival)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            reply = (self.script(arrival, number) if self.script else None) or Reply()
        finally:
            with self._lock:
                self._in_flight -= 1
        if not reply.apply or not 200 <= reply.status < 300:
            return reply
        with self._lock:
            duplicate = arrival.key in self.applied
            if not duplicate:
                self.applied[arrival.key] = decode_arrow(arrival.body)
        receipt = json.dumps({"accepted": {}, "duplicate": duplicate, "received_ns": 0}).encode()
        return reply if reply.body is not None else replace(reply, body=receipt)


@contextmanager
def serve(collector: ScriptedCollector, port: int = 0) -> Iterator[str]:
    """The collector's address while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 20

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            reply = collector.answer(Arrival({k.lower(): v for k, v in self.headers.items()}, body))
            if reply.hang:
                collector.stopping.wait(20)
            if reply.hang or reply.hang_up:
                self.close_connection = True
                return
            content = reply.body or b"{}"
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = self.close_connection or reply.close_after

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        collector.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
