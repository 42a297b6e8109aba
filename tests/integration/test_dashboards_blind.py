"""`kvscope dashboards check --prometheus` where that Prometheus knows of no collector."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

from tests.conftest import Ended
from tests.loopback import Loopback


def test_a_prometheus_in_which_all_is_empty_scrapes_no_collector(kvscope: Callable[..., Ended]) -> None:
    """One expression may be empty because nothing tells it; all of them are a scrape that does not happen."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = Loopback()
    server.listen(Empty)
    try:
        ended = kvscope("dashboards", "check", "--prometheus", server.url)
    finally:
        server.stop()
    assert ended.code == 1
    assert "scrapes none" in ended.err
    assert "0 returned data" in ended.out
