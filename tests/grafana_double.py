"""A stand-in for the few endpoints of Grafana's HTTP API that publishing calls, with a state, over real HTTP.

Answers and statuses follow Grafana 11.6's HTTP API reference. It is no Grafana: that a dashboard draws cannot be seen here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "glsa_right"


@dataclass
class Double:
    """State of the server. refuse: status that every write is answered with; writes: what was written, in order."""

    url: str = ""
    plugins: set[str] = field(default_factory=lambda: {"yesoreyeram-infinity-datasource"})
    folders: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    dashboards: dict[str, dict[str, Any]] = field(default_factory=dict)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    writes: list[tuple[str, str]] = field(default_factory=list)
    refuse: int | None = None
    is_no_grafana: bool = False

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        """(status, document) of one call."""
        parts = urlsplit(target)
        path, query = unquote(parts.path).removeprefix("/api"), parse_qs(parts.query)
        if method != "GET":
            self.writes.append((method, path))
            if self.refuse is not None:
                return self.refuse, {"message": "You'll need additional permissions to perform this action"}
        words = path.strip("/").split("/")
        match method, words:
            case "GET", ["health"]:
                return 200, {"commit": "0", "database": "ok", "version": "11.6.0"}
            case "GET", ["plugins", name, "settings"]:
                return (200, {"id": name}) if name in self.plugins else (404, {"message": "Plugin not found"})
            case "GET", ["folders", uid]:
                return (200, self.folders[uid]) if uid in self.folders else (404, {"message": "folder not found"})
            case "POST", ["folders"]:
                self.folders[body["uid"]] = body
                return 200, body
            case "GET", ["datasources", "name", name]:
                found = next((one for one in self.sources if one["name"] == name), None)
                return (200, found) if found else (404, {"message": "Data source not found"})
            case "POST", ["datasources"]:
                return 200, {"datasource": self.keep_source(body), "message": "Datasource added"}
            case "PUT", ["datasources", number]:
                held = next(one for one in self.sources if one["id"] == int(number))
                held.update(body)
                return 200, {"datasource": held, "message": "Datasource updated"}
            case "GET", ["dashboards", "uid", uid]:
                return (
                    (200, self.dashboards[uid]) if uid in self.dashboards else (404, {"message": "Dashboard not found"})
                )
            case "POST", ["dashboards", "db"]:
                uid = body["dashboard"]["uid"]
                version = self.dashboards.get(uid, {}).get("dashboard", {}).get("version", 0) + 1
                kept = {**body["dashboard"], "id": len(self.dashboards) + 1, "version": version}
                self.dashboards[uid] = {"dashboard": kept, "meta": {"folderUid": body["folderUid"]}}
                return 200, {"uid": uid, "status": "success", "version": version}
            case "GET", ["annotations"]:
                return 200, [one for one in self.annotations if set(query["tags"]) <= set(one["tags"])]
            case "POST", ["annotations"]:
                self.annotations.append(body)
                return 200, {"message": "Annotation added", "id": len(self.annotations)}
        raise AssertionError(f"publishing calls what it should not: {method} {target}")

    def keep_source(self, body: dict[str, Any]) -> dict[str, Any]:
        """A new data source: secrets are kept, and only that they are there is told."""
        number = len(self.sources) + 1
        told = {key: value for key, value in body.items() if key != "secureJsonData"}
        secrets = dict.fromkeys(body.get("secureJsonData", {}), True)
        self.sources.append({"uid": f"source-{number}", **told, "id": number, "secureJsonFields": secrets})
        return self.sources[-1]


@contextmanager
def running_double() -> Iterator[Double]:
    """Serve a fresh double on a free loopback port."""
    double = Double()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if double.is_no_grafana:
                self._send(200, b"<html>a proxy's page</html>", "text/html")
                return
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                status, document = 401, {"message": "Invalid API key"}
            else:
                status, document = double.answer(self.command, self.path, body)
            self._send(status, json.dumps(document).encode(), "application/json")

        do_GET = do_POST = do_PUT = _handle

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    double.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
