"""A small OTLP/HTTP receiver on loopback, for engines whose spans have nowhere else to go.

Takes POST /v1/traces (protobuf or JSON, plain or gzip), passes on the `request` rows, and answers as the protocol asks.
A span that comes twice (exporters resend) is passed on once. Bodies are bounded, also after decompression.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from engine_probe.adapters.otlp import decode_traces
from engine_probe.digits import whole_number
from engine_probe.errors import UnknownFormat, UsageError

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 16 << 20
MAX_LENGTH: Final = 1 << 62
MAX_REMEMBERED_SPANS: Final = 200_000
SOCKET_TIMEOUT_S: Final = 10.0
PATH: Final = "/v1/traces"

Emit = Callable[[Sequence[dict[str, Any]]], None]


class OtlpReceiver:
    """Listens on 127.0.0.1. `emit` takes request rows; port 0 picks a free one.

    worker  name given to the rows, whatever the spans' service.name
    """

    def __init__(self, port: int, worker: str, emit: Emit, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._worker = worker
        self._emit = emit
        self._clock = clock
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self.requests = 0
        self.ignored = 0
        self.refused = 0
        try:
            self._server = _Server(("127.0.0.1", port), self)
        except OSError as error:
            raise UsageError(
                f"Port {port} for traces cannot be used ({error.strerror}). Another receiver may have it: choose "
                "another --otlp-port.",
                port=port,
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="kvscope-otlp", daemon=True
        )

    @property
    def url(self) -> str:
        """What the engine's --otlp-traces-endpoint must be."""
        return f"http://127.0.0.1:{self._server.server_address[1]}{PATH}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; requests under way are answered."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(5.0)
        self._server.server_close()

    def take(self, body: bytes, content_type: str) -> None:
        """Decode one body and pass its rows on. Raises UnknownFormat."""
        result = decode_traces(body, content_type, self._clock(), worker=self._worker)
        fresh = []
        with self._lock:
            for row, span_id in zip(result.rows.get("request", []), result.span_ids, strict=True):
                if span_id in self._seen:
                    continue
                self._seen[span_id] = None
                fresh.append(row)
            while len(self._seen) > MAX_REMEMBERED_SPANS:
                self._seen.popitem(last=False)
            self.requests += len(fresh)
            self.ignored += result.num_ignored
        if fresh:
            self._emit(fresh)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], receiver: OtlpReceiver) -> None:
        self.receiver = receiver
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("trace sender went away", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_TIMEOUT_S
    server: _Server

    def do_POST(self) -> None:
        receiver = self.server.receiver
        content_type = self.headers.get("content-type", "")
        if self.path.partition("?")[0].rstrip("/") != PATH:
            self._answer(404, f"traces go to {PATH}")
            return
        try:
            receiver.take(self._body(), content_type)
        except _TooLarge:
            receiver.refused += 1
            self._answer(413, f"a trace body may have {MAX_BODY_BYTES >> 20} MiB at most")
        except UnknownFormat as error:
            receiver.refused += 1
            self._answer(400, error.message)
        else:
            # An empty ExportTraceServiceResponse: nothing was rejected.
            is_json = content_type.startswith("application/json")
            self._send(200, b"{}" if is_json else b"", "application/json" if is_json else "application/x-protobuf")

    def do_GET(self) -> None:
        self._answer(405, f"POST OpenTelemetry traces to {PATH}")

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _body(self) -> bytes:
        length = whole_number(self.headers.get("content-length") or "", MAX_LENGTH)
        if length is None:
            raise UnknownFormat("The body's length is missing, or no number; send Content-Length.")
        if length > MAX_BODY_BYTES:
            raise _TooLarge
        body = self.rfile.read(length)
        if len(body) < length:
            raise UnknownFormat("The body ended early.")
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding in ("", "identity"):
            return body
        if encoding != "gzip":
            raise UnknownFormat(f"Content-Encoding {encoding!r} is not known; send gzip or none.")
        return _gunzip(body)

    def _answer(self, status: int, text: str) -> None:
        self._send(status, text.encode(), "text/plain; charset=utf-8")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        if status >= 400:
            self.close_connection = True  # the body may not have been read
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


class _TooLarge(Exception):
    """The body is larger than we take; stays inside this module."""


def _gunzip(body: bytes) -> bytes:
    inflate = zlib.decompressobj(wbits=31)
    try:
        out = inflate.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise UnknownFormat(f"The body is not gzip: {error}") from error
    if len(out) > MAX_BODY_BYTES:
        raise _TooLarge
    if not inflate.eof:
        raise UnknownFormat("The gzip body ended early.")
    return out
