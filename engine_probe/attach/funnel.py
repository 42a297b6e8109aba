"""Brings the rows of all sources together and writes them to one sink, a few times a second, from one thread.

Invariant: a row given is written, or counted as lost and told with a `gap` mark. A sink that is busy or away is asked
again later; rows that the sink refuses as wrong are lost at once, since asking again cannot help. When too many rows
wait, the kinds that overload drops first go first (`events.DROP_ORDER`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from engine_probe.errors import BatchRejected, InvalidRows, KvscopeError
from engine_probe.events import DROP_ORDER

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.sending.sink import Sink

log = logging.getLogger(__name__)

MAX_ROWS: Final = 500_000
FLUSH_S: Final = 0.5
MAX_PAUSE_S: Final = 10.0
DRAIN_S: Final = 15.0


class Funnel:
    """`put` from any thread; `close` writes what is left. `who` speaks in the marks that tell of lost rows."""

    def __init__(
        self,
        sink: Sink,
        *,
        flush_s: float = FLUSH_S,
        max_rows: int = MAX_ROWS,
        clock: Callable[[], int] = time.time_ns,
        who: str = "kvscope attach",
    ) -> None:
        self._sink = sink
        self._who = who
        self._flush_s = flush_s
        self._max_rows = max_rows
        self._clock = clock
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._waiting: dict[str, list[pa.Table]] = {}
        self._stuck: list[Mapping[str, pa.Table]] = []
        self._untold: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-funnel", daemon=True)
        self.written: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.error: str | None = None

    def start(self) -> None:
        self._thread.start()

    def put(self, tables: Mapping[str, pa.Table]) -> None:
        """Take tables in; they are written soon."""
        with self._lock:
            for kind, table in tables.items():
                if table.num_rows:
                    self._waiting.setdefault(kind, []).append(table)
            self._shed()

    def put_rows(self, kind: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take rows in."""
        from engine_probe.schema import table_from_rows

        rows = list(rows)
        if rows:
            self.put({kind: table_from_rows(kind, rows)})

    def flush(self) -> bool:
        """Write what waits. False where the sink did not take it: the very same tables are offered again next time.

        A sink that numbers its batches may have committed one that it reported as failed; offered unchanged, it is
        recognised and not written twice.
        """
        import pyarrow as pa

        with self._writing:
            while self._stuck:
                if not self._offer(self._stuck[0]):
                    return False
                self._stuck.pop(0)
            with self._lock:
                waiting, self._waiting = self._waiting, {}
                untold, self._untold = self._untold, Counter()
            if untold:
                waiting.setdefault("mark", []).append(_gap(self._who, untold, self._clock()))
            tables = {kind: pa.concat_tables(parts) for kind, parts in waiting.items() if parts}
            if tables and not self._offer(tables):
                self._stuck.insert(0, tables)
            return not self._stuck

    def close(self) -> None:
        """Write what is left, trying for a bounded time, and close the sink."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(DRAIN_S)
        deadline = time.monotonic() + DRAIN_S
        while not self.flush() and time.monotonic() < deadline:
            time.sleep(0.5)
        if self._untold:
            self.flush()  # what the last pass lost is told too
        with self._lock:
            for tables in (*self._stuck, *({kind: part} for kind, parts in self._waiting.items() for part in parts)):
                self.lost.update({kind: table.num_rows for kind, table in tables.items()})
            self._stuck.clear()
            self._waiting.clear()
        self._sink.close()

    def _run(self) -> None:
        pause_s = self._flush_s
        while not self._stop.wait(pause_s):
            pause_s = self._flush_s if self.flush() else min(pause_s * 2, MAX_PAUSE_S)

    def _offer(self, tables: Mapping[str, pa.Table]) -> bool:
        """True where these tables are dealt with: written, or lost for good."""
        try:
            self._sink.write(tables)
        except (InvalidRows, BatchRejected) as error:
            if len(tables) > 1:  # one bad row must not take the other kinds with it
                self._stuck += [one for one in ({kind: part} for kind, part in tables.items()) if not self._offer(one)]
                return True
            log.error("rows refused", extra={"error": error.message})
            self.error = error.message
            with self._lock:
                self._lose({kind: table.num_rows for kind, table in tables.items()})
            return True
        except (KvscopeError, OSError) as error:
            self.error = str(error)
            return False
        except Exception as error:  # a mistake of ours: these rows are lost, and the next ones must not be
            log.exception("rows could not be written")
            self.error = f"{type(error).__name__}: {error}"
            with self._lock:
                self._lose({kind: table.num_rows for kind, table in tables.items()})
            return True
        self.error = None
        self.written.update({kind: table.num_rows for kind, table in tables.items()})
        return True

    def _lose(self, rows: Mapping[str, int]) -> None:
        self.lost.update(rows)
        self._untold.update({kind: count for kind, count in rows.items() if kind != "mark"})

    def _shed(self) -> None:
        """Drop what overload drops first until the rest fits. The lock is held."""
        total = sum(table.num_rows for parts in self._waiting.values() for table in parts)
        for kind in DROP_ORDER:
            parts = self._waiting.get(kind, [])
            while parts and total > self._max_rows:
                dropped = parts.pop(0).num_rows
                total -= dropped
                self._lose({kind: dropped})


def _gap(who: str, lost: Mapping[str, int], at_ns: int) -> pa.Table:
    from engine_probe.schema import table_from_rows

    what = ", ".join(f"{count} {kind}" for kind, count in sorted(lost.items()))
    attrs = {"dropped_rows": str(sum(lost.values())), "seen_by": who.rpartition(" ")[2]}
    attrs |= {f"dropped_{kind}": str(count) for kind, count in sorted(lost.items())}
    text = f"{who} lost rows: {what}."
    row = {"mark": "gap", "subject": who, "at_ns": at_ns, "text": text, "attrs": attrs}
    return table_from_rows("mark", [row])
