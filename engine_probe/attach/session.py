"""One attach to one engine: finds it, follows it until told to stop, says what was seen and what was not.

The scraping runs in the caller's thread; KV events, spans and writing have threads of their own. Invariants: the
engine's death ends nothing (`Follower`); stopping takes one last look and drains every source before the sink is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from engine_probe.attach.follower import AttachOptions, Follower, Say
from engine_probe.attach.funnel import FLUSH_S, Funnel
from engine_probe.attach.otlp_receiver import OtlpReceiver
from engine_probe.errors import EngineUnreachable

if TYPE_CHECKING:
    from engine_probe.sending.sink import Sink

WAIT_PAUSE_S: Final = 1.0


@dataclass(slots=True)
class Summary:
    """What an attach saw: rows by kind, the engine's counters over all its lives, and what nobody saw."""

    worker: str
    engine_version: str | None
    seconds: float
    scrapes: int
    failed_scrapes: int
    restarts: int
    rows: Mapping[str, int]
    lost_rows: Mapping[str, int]
    counters: Mapping[str, float]
    counter_gains: Mapping[str, float]
    unseen: Sequence[Mapping[str, Any]]
    kv_events: Mapping[str, int] | None = None
    sink_error: str | None = None
    seen: Sequence[Mapping[str, Any]] = field(default_factory=list)


class AttachSession:
    """`run` once. `say` takes one sentence at a time; the sink is closed at the end.

    sink_trouble   asked now and then: why the sink does not get rid of its rows, None where it does
    """

    def __init__(
        self,
        options: AttachOptions,
        sink: Sink,
        say: Say,
        *,
        clock: Callable[[], int] = time.time_ns,
        flush_s: float = FLUSH_S,
        sink_trouble: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._options = options
        self._say = say
        self._clock = clock
        self._funnel = Funnel(sink, clock=clock, flush_s=flush_s)
        self._trouble = Trouble(self._funnel, sink_trouble, say)
        self._follower = Follower(options, self._funnel, say, clock=clock)
        self._otlp: OtlpReceiver | None = None

    def run(self, stop: threading.Event) -> Summary:
        """Attach, follow until `stop` or the duration's end, drain.

        Raises EngineUnreachable, UnknownFormat, UsageError where attaching fails; afterwards nothing the engine does.
        """
        try:
            self._connect(stop)
        except BaseException:
            self._funnel.close()
            self._follower.close()
            raise
        begun = time.monotonic()
        self._funnel.start()
        try:
            self._open_otlp()
            self._follower.open()
            self._follow(stop, begun)
        finally:
            self._drain()
        return self._summary(time.monotonic() - begun)

    def _connect(self, stop: threading.Event) -> None:
        told = False
        while True:
            try:
                self._follower.connect()
                return
            except EngineUnreachable as error:
                if not self._options.wait or stop.is_set():
                    raise
                if not told:
                    self._say(f"{error.message} Waiting for it.")
                    told = True
                if stop.wait(WAIT_PAUSE_S):
                    raise

    def _follow(self, stop: threading.Event, begun: float) -> None:
        end = None if self._options.duration_s is None else begun + self._options.duration_s
        while True:
            until = self._follower.due if end is None else min(self._follower.due, end)
            if stop.wait(max(until - time.monotonic(), 0.0)) or (end is not None and time.monotonic() >= end):
                return
            self._follower.tick()
            self._trouble.tell()

    def _open_otlp(self) -> None:
        if self._options.otlp_port is not None:
            worker = self._follower.scraper.worker
            self._otlp = OtlpReceiver(self._options.otlp_port, worker, self._spans, clock=self._clock)
            self._otlp.start()
            self._follower.otlp_url = self._otlp.url

    def _spans(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Requests from spans, unless the plugin reports the same requests at the same vantage."""
        seen = self._follower.scraper.discovery
        if seen.plugin_worker is None:
            model = next(iter(seen.models), None)
            self._funnel.put_rows("request", [{**row, "model": row.get("model") or model} for row in rows])

    def _drain(self) -> None:
        if self._otlp is not None:
            self._otlp.stop()
        self._follower.drain()
        self._funnel.close()
        self._follower.close()

    def _summary(self, seconds: float) -> Summary:
        scraper, lives = self._follower.scraper, self._follower.scraper.lives
        return Summary(
            worker=scraper.worker,
            engine_version=scraper.discovery.version,
            seconds=round(seconds, 3),
            scrapes=scraper.scrapes,
            failed_scrapes=scraper.failures,
            restarts=lives.restarts,
            rows=dict(self._funnel.written),
            lost_rows=dict(self._funnel.lost),
            counters=lives.totals,
            counter_gains=lives.gains,
            unseen=[{"first_ns": u.first_ns, "last_ns": u.last_ns, "reason": u.reason} for u in lives.unseen],
            kv_events=self._follower.kv_counts(),
            sink_error=self._funnel.error,
            seen=self._follower.lines,
        )


class Trouble:
    """Says once that rows are not taken, and once that they are again."""

    def __init__(self, funnel: Funnel, sink_trouble: Callable[[], str | None], say: Say) -> None:
        self._funnel = funnel
        self._sink_trouble = sink_trouble
        self._say = say
        self._is_in_trouble = False

    def tell(self) -> None:
        trouble = self._funnel.error or self._sink_trouble()
        if trouble and not self._is_in_trouble:
            self._say(f"Rows are kept back: {trouble}")
        elif self._is_in_trouble and not trouble:
            self._say("Rows are taken again.")
        self._is_in_trouble = bool(trouble)
