"""What a router believes of its workers' load: what it counted itself, or what it last read from them.

Beliefs age between two readings, and a counter that nobody moves reads zero for ever: `is_dead` makes it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine_probe.errors import UsageError

SIGNALS = ("outstanding", "polled")


class HasLoad(Protocol):
    """A worker that tells how busy it is."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class LoadBoard:
    """Load and queue of each worker, as believed.

    signal      outstanding: requests this router assigned and saw no end of; polled: running + waiting, read from the worker
    refresh_s   age at which a polled reading is taken anew
    is_dead     the load counter is never moved (an existing router's fault): every load reads 0
    """

    def __init__(
        self, engines: Sequence[HasLoad], *, signal: str = "outstanding", refresh_s: float = 0.0, is_dead: bool = False
    ) -> None:
        if signal not in SIGNALS:
            raise UsageError(f"no load signal '{signal}' here; known: {', '.join(SIGNALS)}", signal=signal)
        self.is_dead = is_dead
        self._engines = engines
        self._is_polled = signal == "polled"
        self._refresh_ns = round(refresh_s * 1e9)
        self._read_ns: int | None = None
        self._load = [0.0] * len(engines)
        self._queue = [0.0] * len(engines)

    def assigned(self, worker: int) -> None:
        """A request was sent there."""
        if not self._is_polled:
            self._load[worker] += 1

    def ended(self, worker: int) -> None:
        """One that was sent there ended."""
        if not self._is_polled:
            self._load[worker] -= 1

    def read(self, now_ns: int) -> tuple[list[float], list[float]]:
        """(loads, queues) [num_workers] as believed now."""
        if self._read_ns is None or now_ns - self._read_ns >= self._refresh_ns:
            self._read_ns = now_ns
            self._queue = [float(engine.num_waiting) for engine in self._engines]
            if self._is_polled:
                self._load = [float(engine.num_running + engine.num_waiting) for engine in self._engines]
        if self.is_dead:
            return [0.0] * len(self._load), list(self._queue)
        return list(self._load), list(self._queue)
