"""A whole attach in a thread, for tests: it writes into a list, and leaving its block stops it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

from engine_probe.attach.follower import AttachOptions
from engine_probe.attach.session import AttachSession, Summary
from engine_probe.schema import table_from_rows
from engine_probe.wire.validate import validate
from tests.attach_engine import FakeEngine, ListSink, page

STRANGE_PAGES = [
    (200, "text/html", "<html><body>Sign in</body></html>", "HTML"),
    (200, "text/plain", page(), "kvscope attach vllm"),
    (200, "text/plain", "", "is empty: it has no series"),
    (401, "text/plain", "who are you", "--engine-key"),
    (404, "text/plain", "nothing", "has no /metrics"),
    (200, "text/plain", "broken{ 1\n", "Line 1"),
    (503, "text/plain", "wait", "answers 503"),
]
"""What may answer in place of an exporter or a router: (status, content type, body, a part of the sentence on it)."""


class Attached:
    """A session in a thread. `error` is what `run` raised; `trouble` is what the sink says of itself."""

    def __init__(self, engine: FakeEngine, name: str = "vllm", **options: Any) -> None:
        self.sink = ListSink()
        self.said: list[str] = []
        self.summary: Summary | None = None
        self.error: Exception | None = None
        self.trouble: str | None = None
        facts: dict[str, Any] = {"url": engine.url, "salt": b"s", "interval_s": 0.05, "engine": name}
        self.session = AttachSession(
            AttachOptions(**(facts | options)),
            self.sink,
            self.said.append,
            flush_s=0.02,
            sink_trouble=lambda: self.trouble,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            self.summary = self.session.run(self._stop)
        except Exception as error:
            self.error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition() or self.error is not None:
                return
            time.sleep(0.01)
        raise AssertionError(f"did not happen within 10 s; said: {self.said}")

    def marks(self) -> list[str]:
        return [row["mark"] for row in self.sink.rows("mark")]

    def values(self, name: str) -> list[float]:
        return [row["value"] for row in self.sink.rows("sample") if row["name"] == name]

    def valid(self) -> None:
        """Every row written is of the contract."""
        for kind in ("sample", "worker", "mark", "request", "step", "block", "transfer"):
            rows = self.sink.rows(kind)
            if rows:
                validate(kind, table_from_rows(kind, rows), time.time_ns())
