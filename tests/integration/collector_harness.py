"""A real collector for tests: uvicorn on a free port of the loopback, a DuckDB file, and the pieces to talk to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
from fastapi import FastAPI

from collector import serving
from collector.app import create_app
from collector.settings import Settings, load_settings
from engine_probe.listening import listen, url_of
from engine_probe.schema import table_from_rows
from engine_probe.wire.codec import encode_arrow
from store.interface import Store

NOW_NS = 1_764_403_200_000_000_000
"""2025-11-29T08:00:00Z: an instant in the past of every machine that runs these tests."""
ARROW = {"content-type": "application/vnd.apache.arrow.stream"}
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Collector:
    """A running collector."""

    url: str
    app: FastAPI
    client: httpx.Client
    address: tuple[str, int]
    server: serving.DrainingServer

    @property
    def store(self) -> Store:
        """Its store, for looking at what was committed."""
        store: Store = self.app.state.services.store
        return store

    def post(self, rows: Mapping[str, list[dict[str, Any]]], **headers: str) -> httpx.Response:
        """Send rows as Arrow; `source="a"` becomes `Kvscope-Source: a`."""
        body = encode_arrow({kind: table_from_rows(kind, part) for kind, part in rows.items()})
        return self.client.post("/v1/events", content=body, headers=ARROW | _named(headers))

    def post_tables(self, tables: Mapping[str, pa.Table], **headers: str) -> httpx.Response:
        """Send tables as Arrow."""
        return self.client.post("/v1/events", content=encode_arrow(tables), headers=ARROW | _named(headers))

    def metric(self, name: str, **labels: str) -> float | None:
        """Value of a series on /metrics, None where it is absent."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return None

    def count(self, kind: str, where: str = "true") -> int:
        """Committed rows of a kind."""
        return int(self.store.query(f'SELECT count(*) AS n FROM "{kind}" WHERE {where}').column("n")[0].as_py())


@contextmanager
def running(path: Path | str, *, store: Store | None = None, **settings: Any) -> Iterator[Collector]:
    """A collector with its store at `path`, until the block ends; settings as nested dicts."""
    with listen("127.0.0.1", 0) as sock:
        address = sock.getsockname()[:2]
        server = {"port": address[1], **settings.pop("server", {})}
        made = load_settings(**{"store_url": str(path), "server": server, **settings})
        app = create_app(made, store)
        serves = serving.make_server(app, made)
        thread = threading.Thread(target=serves.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not serves.started:
            assert thread.is_alive(), "the collector did not start"
            assert time.monotonic() < deadline, "the collector took too long to start"
            time.sleep(0.005)
        url = url_of(sock)
        try:
            with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
                yield Collector(url, app, client, (str(address[0]), int(address[1])), serves)
        finally:
            serves.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the collector did not stop"


def request_row(request_id: str, **columns: Any) -> dict[str, Any]:
    """A finished request at the client: 100 ms to the first token, ten more tokens 20 ms apart."""
    row = {
        "request_id": request_id,
        "vantage": "client",
        "state": "finished",
        "arrival_ns": NOW_NS,
        "first_token_ns": NOW_NS + 100_000_000,
        "last_token_ns": NOW_NS + 300_000_000,
        "at_ns": NOW_NS + 300_000_000,
        "output_tokens": 11,
    }
    return row | columns


def step_row(step: int, **columns: Any) -> dict[str, Any]:
    """A scheduler step of worker-0."""
    return {"worker": "worker-0", "at_ns": NOW_NS + step * 10_000_000, "step": step, "duration_s": 0.01} | columns


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    return {f"kvscope-{name.replace('_', '-')}": value for name, value in headers.items()}


__all__ = ["ARROW", "JSON", "NOW_NS", "Collector", "Settings", "request_row", "running", "step_row"]
