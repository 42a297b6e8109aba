"""An HTTP server of a test on a loopback port: `stop` closes the port, `listen` opens the same one again."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of tests go away in mid-answer; that is no news."""


class Loopback:
    """`port` is 0 until it listened once, and stays what it was then."""

    def __init__(self) -> None:
        self.port = 0
        self._server: _Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listen(self, handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> None:
        """Answer by `handler`, over TLS where a context is given."""
        self._server = _Server(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
