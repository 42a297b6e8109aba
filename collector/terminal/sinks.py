"""Where the rows of a verb that observes go: a collector, or a store that it opens itself; and how such a verb ends.

Invariant: rows that were given to a sink are written, kept in the spool, or named as lost when the verb ends.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collector.terminal.output import DEFAULT_STORE, say
from engine_probe.errors import EXIT_OK, EXIT_UNREACHABLE, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from engine_probe.sending.sink import Sink
    from store.interface import Store


class StoreSink:
    """Writes straight into a store: each write is one batch with an identity of its own."""

    def __init__(self, store: Store, source: str) -> None:
        from secrets import token_hex

        self._store = store
        self._source = source
        self._epoch = token_hex(16)
        self._seq = 0

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Commit the tables. After an error the same tables must be offered again: they keep their identity."""
        from store.interface import Batch, BatchId

        self._store.append(Batch(tables, BatchId(self._source, self._epoch, self._seq), source=self._source))
        self._seq += 1

    def close(self) -> None:
        self._store.close()


def open_sink(to: str | None, store: str | None, source: str, token: str | None, spool: Path | None) -> Sink:
    """The collector `to`, else the store. Raises UsageError where both are given."""
    if to is not None and store is not None:
        raise UsageError("Give --to (a collector) or --store (a store), not both.")
    if to is not None:
        from engine_probe.attach.names import spool_folder
        from engine_probe.sending.sink import HttpSink

        return HttpSink(to, source, token=token, spool_dir=spool_folder(spool, source))
    from store.open import open_store

    return StoreSink(open_store(store or DEFAULT_STORE), source)


def trouble_of(sink: Sink) -> str | None:
    """Why a collector does not take rows at the moment; None where it takes them, or where there is none."""
    stats = getattr(sink, "stats", None)
    if stats is None or not stats.failures or not stats.pending_batches + stats.in_flight_batches:
        return None
    error: str | None = stats.last_error
    return error


def undelivered(sink: Sink, spool: Path | None) -> str | None:
    """One sentence on what a collector did not take, after the sink was closed; None where it took everything."""
    stats = getattr(sink, "stats", None)
    if stats is None:
        return None
    held, dropped = stats.pending_batches + stats.in_flight_batches, sum(stats.dropped_rows.values())
    parts = []
    if held:
        parts.append(
            f"{held} batches " + ("stay in the spool for the next start" if spool else "were lost: give --spool")
        )
    if dropped:
        parts.append(f"{dropped:,} rows were dropped")
    return f"Not delivered: {'; '.join(parts)} ({stats.last_error or 'the collector was away'})." if parts else None


def exit_code_of(sink: Sink, spool: Path | None, lost_rows: Mapping[str, int]) -> int:
    """3 where rows of this verb are nowhere, after the sink was closed; 0 where they are stored, or wait in the spool."""
    stats = getattr(sink, "stats", None)
    dropped = 0 if stats is None else sum(stats.dropped_rows.values())
    held = 0 if stats is None or spool else stats.pending_batches + stats.in_flight_batches
    return EXIT_UNREACHABLE if dropped or held or sum(lost_rows.values()) else EXIT_OK


def stop_on_signals() -> threading.Event:
    """An event that Ctrl-C or SIGTERM sets; a second one ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, _: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        say("Stopping: writing what is left. (Once more to stop at once.)")
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
    return stop


def seconds_of(option: str, text: str) -> float:
    """`250ms`, `1s`, `1.5`, `2m`, `1h` -> seconds, more than 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text.strip())
    value = float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[match[2] or "s"] if match else 0.0
    if not 0.05 <= value <= 31_536_000:
        raise UsageError(f"{option} is {text!r}; expected a time such as 500ms, 1s or 2m, of at least 50ms.")
    return value
