"""Follows a source that serves no requests (an exporter, a metrics server): when it was away its numbers are missing.

It has the verbs of `Lives`, but nothing of it is an engine's life: an exporter that is restarted restarts no worker.
Invariant: a stretch in which it did not answer is one `gap` mark, written when it answers again or watching ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_probe.attach.life import Lives, Rows, Unseen


class SourceLives(Lives):
    """One source, by the name that people know it under (its title and address)."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self._source = source
        self._first_failure_ns: int | None = None
        self._reason = ""

    def seen(self, counters: Mapping[str, float], start_s: float | None, at_ns: int) -> Rows:
        """It answered. A counter that falls is a host's reboot or a pod that went: `deltas` deals with it."""
        if self._seen_ns is None:
            self._baseline = dict(counters)
        self._timeouts, self._seen_ns, self._down_ns = 0, at_ns, None
        self._present = dict(counters)
        return self._gap(at_ns)

    def failed(self, reason: str, at_ns: int, *, is_timeout: bool = False) -> Rows:
        """It did not answer."""
        super().failed(reason, at_ns, is_timeout=is_timeout)
        if self._first_failure_ns is None:
            self._first_failure_ns, self._reason = at_ns, reason
        return []

    def end(self, at_ns: int) -> Rows:
        """Watching ends."""
        return self._gap(at_ns)

    def _gap(self, at_ns: int) -> list[dict[str, Any]]:
        first_ns, self._first_failure_ns = self._first_failure_ns, None
        if first_ns is None:
            return []
        self.unseen.append(Unseen(first_ns, at_ns, f"no answer: {self._reason}"))
        seconds = max(at_ns - first_ns, 0) / 1e9
        text = (
            f"{self._source} did not answer for {seconds:.1f} s: its numbers of that time are missing ({self._reason})"
        )
        attrs = {"source": "metrics", "first_ns": str(first_ns), "last_ns": str(at_ns), "seen_by": "attach"}
        return [{"mark": "gap", "subject": self._source, "at_ns": at_ns, "text": text, "attrs": attrs}]
