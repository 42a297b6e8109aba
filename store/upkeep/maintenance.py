"""Upkeep in the background: sealing, retention and the disk budget, once a minute beside the running store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import TYPE_CHECKING

from engine_probe.errors import KvscopeError
from store.upkeep.retention import PruneReport, RetentionPolicy, prune

if TYPE_CHECKING:
    from store.duckdb_store import DuckDBStore

log = logging.getLogger(__name__)


class Maintenance:
    """Applies a policy again and again; a failing pass is logged and the next one tries again.

    last     report of the newest pass that ended well, None before the first
    error    what the newest pass failed with, None where it did not
    """

    def __init__(
        self,
        store: DuckDBStore,
        policy: RetentionPolicy,
        *,
        interval_s: float = 60.0,
        on_pass: Callable[[PruneReport], None] | None = None,
    ) -> None:
        self._store, self._policy, self._interval_s, self._on_pass = store, policy, interval_s, on_pass
        self._stopping = Event()
        self._thread: Thread | None = None
        self.last: PruneReport | None = None
        self.error: KvscopeError | None = None

    def start(self) -> None:
        """Begin; the first pass comes after one interval."""
        self._thread = Thread(target=self._run, name="kvscope-store-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the pass that runs, if one does. Call it before the store is closed."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def run_once(self) -> PruneReport | None:
        """One pass; None where it failed (see `error`)."""
        try:
            self.last, self.error = prune(self._store, self._policy), None
        except KvscopeError as error:
            self.error = error
            log.warning("upkeep failed", extra={"url": self._store.url, "reason": error.message})
            return None
        if self._on_pass is not None:
            self._on_pass(self.last)
        return self.last

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.run_once()
