"""An HTTP server that looks like an engine to `kvscope attach`: the test sets its pages, and its death is a method call."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

import pyarrow as pa

from tests.loopback import Loopback

CONFIG = 'block_size="32",cache_dtype="auto",enable_prefix_caching="{caching}",engine="0",num_gpu_blocks="{blocks}"'


def page(
    *,
    start_s: float | None = 1_700_000_000.0,
    blocks: int = 41,
    caching: bool = True,
    plugin: str | None = None,
    **counters: float,
) -> str:
    """A small /metrics page: process start, cache config, and counters by wire name without `vllm:`."""
    lines = [] if start_s is None else [f"process_start_time_seconds {start_s}"]
    lines.append("vllm:cache_config_info{" + CONFIG.format(caching=caching, blocks=blocks) + "} 1.0")
    if plugin is not None:
        lines.append(f'kvscope_plugin_info{{engine="0",worker="{plugin}"}} 1.0')
    counters = {"num_requests_running": 0.0, "num_preemptions_total": 0.0} | counters
    lines += [f'vllm:{name}{{engine="0",model_name="tiny"}} {value}' for name, value in counters.items()]
    return "\n".join(lines) + "\n"


class FakeEngine(Loopback):
    """`pages[path] = (status, content type, body)`; `stop` closes the port, `start` opens the same one again.

    It poses as a vLLM until told otherwise (`pose`). drains[path] are items that are handed out once, as a JSON list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[str, tuple[int, str, str]] = {}
        self.drains: dict[str, list[Any]] = {}
        self.requests: list[str] = []
        self.headers: dict[str, str] = {}
        self.set_metrics(page())
        self.set_json("/version", {"version": "0.32.0"})
        self.set_json("/v1/models", {"data": [{"id": "tiny", "parent": None, "max_model_len": 1024}]})
        self.set_json("/kv_event_sources", {})

    def set_metrics(self, text: str, status: int = 200, content_type: str = "text/plain; version=0.0.4") -> None:
        self.pages["/metrics"] = (status, content_type, text)

    def set_json(self, path: str, value: Any) -> None:
        self.pages[path] = (200, "application/json", json.dumps(value))

    def pose(self, metrics: str, *, path: str = "/metrics", **answers: Any) -> None:
        """Become another engine: its page, and JSON answers by path (`v1__models` is /v1/models)."""
        self.pages = {path: (200, "text/plain; version=0.0.4", metrics)}
        for name, value in answers.items():
            self.set_json("/" + name.replace("__", "/"), value)

    def start(self, tls: ssl.SSLContext | None = None) -> FakeEngine:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.requests.append(self.path)
                engine.headers = {key.lower(): value for key, value in self.headers.items()}
                status, content_type, body = engine.pages.get(self.path, (404, "text/plain", "not here"))
                if self.path in engine.drains:
                    waiting, engine.drains[self.path] = engine.drains[self.path], []
                    status, content_type, body = 200, "application/json", json.dumps(waiting)
                data = body.encode()
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(data)))
                if 300 <= status < 400:
                    self.send_header("Location", "http://elsewhere/metrics")
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.listen(Handler, tls)
        return self


class ListSink:
    """A sink that keeps its rows as dicts; maps are dicts too."""

    def __init__(self) -> None:
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self.closed = False

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        with self._lock:
            for kind, table in tables.items():
                self._rows.setdefault(kind, []).extend(table.to_pylist(maps_as_pydicts="strict"))

    def close(self) -> None:
        self.closed = True

    def rows(self, kind: str) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._rows.get(kind, ()))
