"""A bounded buffer of rows between an engine's own thread and a sink, for probes that make a few rows a step.

Invariant: giving a row never waits for network or disk, and never raises; what does not fit, and what the sink refuses,
is counted and told with a `gap` mark.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from engine_probe.events import DROP_ORDER

if TYPE_CHECKING:
    from engine_probe.sending.sink import Sink

log = logging.getLogger(__name__)

MAX_ROWS: Final = 20_000
FLUSH_S: Final = 0.5
CLOSE_S: Final = 3.0


class Outbox:
    """A bounded buffer and the thread that empties it into a sink.

    `put` takes a lock for the length of an append. When the buffer is full, the oldest row of the kind goes that overload drops
    first (`events.DROP_ORDER`: blocks before steps, requests last), or the row that comes where none is before it; what was
    dropped is counted by kind and told with a `gap` mark at the next flush.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        subject: str = "plugin",
        max_rows: int = MAX_ROWS,
        flush_s: float = FLUSH_S,
        log: logging.Logger = log,
    ) -> None:
        import pyarrow  # noqa: F401  # now, at start-up, and not in the thread while requests are being served

        self._sink = sink
        self._subject = subject
        self._log = log
        self._max_rows = max_rows
        self._flush_s = flush_s
        self._lock = threading.Lock()
        self._rows: dict[str, deque[dict[str, Any]]] = {}
        self._size = 0
        self._dropped: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-outbox", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows that were lost on this side, by kind."""
        return self._dropped

    @property
    def failures(self) -> int:
        """Writes that the sink refused."""
        return self._failures

    def put(self, kind: str, row: dict[str, Any]) -> None:
        """Append one row; never waits for the network or the disk."""
        with self._lock:
            if self._size >= self._max_rows:
                first = next((name for name in DROP_ORDER if name == kind or self._rows.get(name)), kind)
                self._dropped[first] += 1
                if first == "request" or not self._rows.get(first):
                    return
                self._rows[first].popleft()
                self._size -= 1
            self._rows.setdefault(kind, deque()).append(row)
            self._size += 1

    def flush(self) -> None:
        """Hand everything to the sink now. What the sink refuses is lost, counted, and logged once."""
        from engine_probe.schema import table_from_rows

        with self._lock:
            rows, self._rows, self._size = self._rows, {}, 0
            dropped = Counter(self._dropped)
        lost = dropped - self._told
        if lost:
            rows.setdefault("mark", deque()).append(_gap(lost, self._subject))
        if not rows:
            return
        try:
            self._sink.write({kind: table_from_rows(kind, part) for kind, part in rows.items()})
        except Exception as error:
            self._failures += 1
            with self._lock:
                self._dropped.update({kind: len(part) for kind, part in rows.items() if kind != "mark"})
            if self._failures == 1:
                self._log.warning("kvscope lost rows that could not be sent (said once): %s", error)
        else:
            self._told = dropped

    def close(self) -> None:
        """Flush and close the sink, for at most CLOSE_S: an engine that stops must not be held up."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(CLOSE_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._stop.wait(self._flush_s):
            self.flush()
        self.flush()
        try:
            self._sink.close()
        except Exception as error:
            self._log.warning("kvscope could not close its sink: %s", error)


def _gap(lost: Mapping[str, int], subject: str) -> dict[str, Any]:
    what = ", ".join(f"{count} {kind}" for kind, count in sorted(lost.items()))
    return {
        "mark": "gap",
        "subject": subject,
        "at_ns": time.time_ns(),
        "text": f"The {subject} lost rows: {what}.",
        "attrs": {"dropped_rows": str(sum(lost.values()))} | {f"dropped_{k}": str(n) for k, n in sorted(lost.items())},
    }
