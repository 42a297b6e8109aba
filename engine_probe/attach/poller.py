"""Reads an engine's further endpoints, each in a thread of its own: some answer late, and some hand out what they tell once.

Invariant: of all kvscope in this process one thread alone asks one such endpoint, one request at a time, so that no
answer is split. An endpoint that does not answer is asked again with growing pauses; why is in `errors`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from engine_probe.adapters.adapter import Poll
from engine_probe.adapters.prometheus import Page
from engine_probe.attach.fetch import EngineClient
from engine_probe.errors import KvscopeError

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

MAX_PAUSE_S: Final = 10.0
JOIN_S: Final = 20.0

Emit = Callable[[Mapping[str, "pa.Table"]], None]


class Poller:
    """`start` once, `stop` once: it takes one last look.

    make_client   time-out (s) -> a connection; each thread has its own
    newest        the newest page scraped, by which an endpoint may be left alone
    """

    def __init__(
        self,
        polls: Sequence[Poll],
        make_client: Callable[[float], EngineClient],
        emit: Emit,
        *,
        newest: Callable[[], Page | None] = lambda: None,
        interval_s: float = 1.0,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._make_client = make_client
        self._emit = emit
        self._newest = newest
        self._interval_s = interval_s
        self._clock = clock
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(poll,), name=f"kvscope-poll{poll.path}", daemon=True)
            for poll in polls
        ]
        self.paths = frozenset(poll.path for poll in polls)
        self.errors: dict[str, str] = {}
        self.answers: dict[str, int] = {}

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask each endpoint once more, so that nothing stays behind, and end."""
        self._stop.set()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0.0))

    def state(self) -> dict[str, str | None]:
        """By path: None where it answers, else why it does not; one that was not asked yet is absent."""
        return dict.fromkeys(tuple(self.answers)) | dict(self.errors)

    def _run(self, poll: Poll) -> None:
        client = self._make_client(poll.timeout_s)
        failures = 0
        try:
            while True:
                is_last = self._stop.is_set()
                if poll.is_due(self._newest()):
                    failures = 0 if self._ask(client, poll) else failures + 1
                if is_last:
                    return
                self._stop.wait(min(self._interval_s * 2 ** min(failures, 8), max(MAX_PAUSE_S, self._interval_s)))
        except Exception as error:  # a mistake of ours must not end in silence
            log.exception("reading an endpoint ended")
            self.errors[poll.path] = f"ended by a mistake of kvscope ({type(error).__name__}: {error})"
        finally:
            client.close()

    def _ask(self, client: EngineClient, poll: Poll) -> bool:
        try:
            body, _ = client.metrics(poll.path, hint=poll.hint, method=poll.method)
            tables = poll.tables(body, self._clock())
        except KvscopeError as error:
            self.errors[poll.path] = error.message
            return False
        self.errors.pop(poll.path, None)
        self.answers[poll.path] = self.answers.get(poll.path, 0) + 1
        if tables:
            self._emit(tables)
        return True
