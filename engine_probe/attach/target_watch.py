"""Asks a source of targets again and again, in a thread of its own.

Invariant: a name server, an API or a network file system that does not answer holds up no scrape; its answer is taken when
it comes. The thread is a daemon: a question that is never answered does not keep the process alive.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from engine_probe.attach.targets import Target, Targets
from engine_probe.errors import ProbeError

log = logging.getLogger(__name__)

Told = Sequence[Target] | ProbeError


class TargetWatch:
    """`start` once, `news` now and then, `stop` once; `stop` waits for nothing."""

    def __init__(self, targets: Targets, refresh_s: float) -> None:
        self._targets = targets
        self._refresh_s = refresh_s
        self._stop = threading.Event()
        self._told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvscope-targets", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def news(self) -> Told | None:
        """The newest answer since the last call; None where there is none yet."""
        newest: Told | None = None
        while not self._told.empty():
            newest = self._told.get()
        return newest

    def _run(self) -> None:
        while not self._stop.wait(self._refresh_s):
            self._told.put(self._ask())

    def _ask(self) -> Told:
        try:
            return self._targets.read()
        except ProbeError as error:
            return error
        except Exception as error:  # a mistake of ours must not end in silence
            log.exception("reading the targets failed")
            return ProbeError(f"ended by a mistake of kvscope ({type(error).__name__}: {error})")
