"""A scripted Prometheus API for tests: it holds samples, answers raw queries of a stretch, and can be made to misbehave."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

from tests.loopback import Loopback

MS = 1_000_000
_QUERY = re.compile(r"(?P<selector>.*)\[(?P<ms>\d+)ms\]", re.DOTALL)


class ScriptedPrometheus(Loopback):
    """`add` samples; `max_span_ms`: stretches beyond it are refused as too much, as a server with a limit does.

    left_open   whether a stretch's left edge is not part of it (Prometheus 3) or is (Prometheus 2)
    answer      instead of an API answer: (status, content type, body) for every request
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[dict[str, str], float, float]] = []  # labels, s, value
        self.warnings: Sequence[str] = ()
        self.native: list[dict[str, str]] = []
        self.max_span_ms = 1 << 62
        self.left_open = True
        self.answer: tuple[int, str, str] | None = None
        self.queries: list[tuple[str, int]] = []
        self.headers: dict[str, str] = {}

    def add(self, at_s: float, name: str, value: float, **labels: str) -> None:
        """One sample of one scrape."""
        self.samples.append(({"__name__": name, **labels}, at_s, value))

    def page(self, at_s: float, numbers: Mapping[str, float], **target: str) -> None:
        """One scrape of a target: series by `name` or `name{label="x"}` -> number; `up` is 1."""
        for key, value in {"up": 1.0, **numbers}.items():
            name, _, rest = key.partition("{")
            own = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            self.add(at_s, name, value, **own, **target)

    def start(self, tls: ssl.SSLContext | None = None) -> ScriptedPrometheus:
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"status": "success", "data": {"version": "3.5.0"}})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
                script.headers = {key.lower(): value for key, value in self.headers.items()}
                form = {key: values[0] for key, values in parse_qs(body).items()}
                self._send(*script.reply(form["query"], float(form["time"])))

            def _send(self, status: int, document: Any) -> None:
                content_type, data = "application/json", json.dumps(document).encode()
                if script.answer is not None:
                    status, content_type, text = script.answer
                    data = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Location", "http://elsewhere/")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.listen(Handler, tls)
        return self

    def reply(self, query: str, end_s: float) -> tuple[int, dict[str, Any]]:
        """What Prometheus answers to an instant query of a range selector."""
        match = _QUERY.fullmatch(query)
        if match is None or "(" in match["selector"]:
            return 400, {"status": "error", "errorType": "bad_data", "error": "parse error: unexpected character"}
        span_ms = int(match["ms"])
        self.queries.append((match["selector"], span_ms))
        if span_ms > self.max_span_ms:
            error = "query processing would load too many samples into memory in query execution"
            return 422, {"status": "error", "errorType": "execution", "error": error}
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', match["selector"]))
        start_ms, end_ms = round(end_s * 1000) - span_ms, round(end_s * 1000)
        found: dict[str, dict[str, Any]] = {}
        for labels, at_s, value in self.samples:
            at_ms = round(at_s * 1000)
            is_inside = start_ms < at_ms <= end_ms or (at_ms == start_ms and not self.left_open)
            if is_inside and wanted.items() <= labels.items():
                series = found.setdefault(json.dumps(labels, sort_keys=True), {"metric": labels, "values": []})
                series["values"].append([at_ms / 1000, repr(value)])
        result = [*found.values(), *({"metric": labels, "histograms": [[end_s, {}]]} for labels in self.native)]
        reply: dict[str, Any] = {"status": "success", "data": {"resultType": "matrix", "result": result}}
        return 200, reply | ({"warnings": list(self.warnings)} if self.warnings else {})
