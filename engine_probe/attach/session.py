"""One attach: finds out what the engine shows, follows it until told to stop, says what was seen and what was not.

The scraping runs in the caller's thread; KV events, spans and writing have threads of their own. Invariants: the
engine's death ends nothing (it is marked, and asked for again with growing pauses); stopping takes one last look and
drains every source before the sink is closed.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_probe.adapters.adapter import Adapter, LogReader, Surroundings
from engine_probe.adapters.kv_events import KvEventDecoder
from engine_probe.adapters.registry import adapter
from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.attach.fetch import EngineClient
from engine_probe.attach.funnel import FLUSH_S, Funnel
from engine_probe.attach.kv_link import KvEndpoint, endpoints_from_option, endpoints_from_sources
from engine_probe.attach.kv_reader import KvReader
from engine_probe.attach.log_tail import LogTail
from engine_probe.attach.otlp_receiver import OtlpReceiver
from engine_probe.attach.poller import Poller
from engine_probe.attach.scraper import Scraper, process_start
from engine_probe.errors import EngineUnreachable, KvscopeError, UsageError
from engine_probe.sampling import Sampling

if TYPE_CHECKING:
    from engine_probe.sink import Sink

MAX_PAUSE_S: Final = 5.0
WAIT_PAUSE_S: Final = 1.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """What the user asked for. `duration_s` None: until told to stop. `wait`: the engine may not be up yet."""

    url: str
    salt: bytes
    engine: str = "vllm"
    worker: str | None = None
    interval_s: float = 1.0
    duration_s: float | None = None
    kv_events: str | None = None
    kv_replay: str | None = None
    otlp_port: int | None = None
    log: Path | None = None
    engine_key: str | None = None
    verify: bool | ssl.SSLContext = True
    wait: bool = False
    worker_map: WorkerMap = field(default_factory=WorkerMap)
    """Whose a series is, by rules of the user's."""
    block_rate: float = 1.0
    """Share of the KV blocks whose rows are kept (by their hash, each for its whole life)."""


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
        self._sink_trouble = sink_trouble
        self._in_trouble = False
        self._clock = clock
        self._client = EngineClient(options.url, key=options.engine_key, verify=options.verify)
        self._probe_client = EngineClient(options.url, key=options.engine_key, verify=options.verify)
        self._funnel = Funnel(sink, clock=clock, flush_s=flush_s)
        engine = adapter(options.engine)
        name = options.worker or self._client.url.partition("://")[2]
        self._log = None if options.log is None else _log_tail(engine, options.log, name)
        self._scraper = Scraper(
            engine,
            self._client,
            self._funnel,
            options.worker,
            log=self._log,
            worker_map=options.worker_map,
            clock=clock,
        )
        self._sampling = Sampling(options.block_rate)
        self._decoder = KvEventDecoder(options.salt, sampling=self._sampling)
        self._poller: Poller | None = None
        self._polled: Mapping[str, str | None] = {}
        self._kv: KvReader | None = None
        self._kv_links: list[str] = []
        self._kv_error: str | None = None
        self._otlp: OtlpReceiver | None = None
        self._lines: list[Mapping[str, Any]] = []
        self._left_out_spans = 0

    def run(self, stop: threading.Event) -> Summary:
        """Attach, follow until `stop` or the duration's end, drain.

        Raises EngineUnreachable, UnknownFormat, UsageError where attaching fails; afterwards nothing the engine does.
        """
        try:
            self._connect(stop)
        except BaseException:
            self._funnel.close()
            self._close()
            raise
        begun = time.monotonic()
        self._funnel.start()
        try:
            self._open_otlp()
            self._open_kv()
            self._open_polls()
            self._tell()
            self._follow(stop, begun)
        finally:
            self._drain()
        return self._summary(time.monotonic() - begun)

    def _connect(self, stop: threading.Event) -> None:
        told = False
        while True:
            try:
                self._scraper.connect()
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
        options = self._options
        end = None if options.duration_s is None else begun + options.duration_s
        interval_s = options.interval_s
        due, failures = begun + interval_s, 0
        while True:
            now = time.monotonic()
            left = due - now if end is None else min(due, end) - now
            if stop.wait(max(left, 0.0)) or (end is not None and time.monotonic() >= end):
                return
            restarts, was_up = self._scraper.lives.restarts, self._scraper.lives.is_up
            if self._scraper.scrape():
                failures = 0
                if not was_up or self._scraper.lives.restarts != restarts:
                    self._back(restarted=self._scraper.lives.restarts != restarts)
            else:
                failures += 1
                if was_up and not self._scraper.lives.is_up:
                    self._say(f"The engine is down: {self._scraper.last_error}")
            self._tell_trouble()
            # Scrapes keep their rhythm; a late one does not make the next ones come in a burst.
            pause = (
                min(interval_s * 2 ** min(failures - 1, 8), max(MAX_PAUSE_S, interval_s)) if failures else interval_s
            )
            due = max(due + pause, time.monotonic()) if not failures else time.monotonic() + pause

    def _back(self, *, restarted: bool) -> None:
        self._say(
            "The engine restarted; its counters count from 0 again." if restarted else "The engine answers again."
        )
        try:
            self._open_kv()
        except KvscopeError as error:
            self._kv_error = error.message
        self._tell()

    def _tell(self) -> None:
        around = Surroundings(
            interval_s=self._options.interval_s,
            kv_links=self._kv_links,
            kv_error=self._kv_error,
            has_replay=self._kv is not None and all(endpoint.replay for endpoint in self._kv.endpoints),
            otlp_url=None if self._otlp is None else self._otlp.url,
            log_path=None if self._options.log is None else str(self._options.log),
            log_error=None if self._log is None else self._log.error,
            polls=self._polled,
            block_rate=self._options.block_rate,
        )
        lines = self._scraper.adapter.lines(self._scraper.discovery, around)
        told = [{"subject": line.subject, "seen": line.seen, "text": line.text} for line in lines]
        if told != self._lines:
            self._lines = list(told)
            for line in lines:
                self._say(str(line))

    def _tell_trouble(self) -> None:
        """Say once that rows are not taken, and once that they are again."""
        trouble = self._funnel.error or self._sink_trouble()
        if trouble and not self._in_trouble:
            self._say(f"Rows are kept back: {trouble}")
        elif self._in_trouble and not trouble:
            self._say("Rows are taken again.")
        self._in_trouble = bool(trouble)
        polled = {} if self._poller is None else self._poller.state()
        if polled != self._polled and self._scraper.lives.is_up:
            self._polled = polled
            self._tell()
        if self._kv is not None and self._kv.error is not None and self._kv_error is None:
            self._kv_error = self._kv.error
            self._tell()

    # --- sources

    def _open_kv(self) -> None:
        """Subscribe where the engine publishes; after a restart only if it publishes elsewhere now."""
        endpoints = self._kv_endpoints()
        if self._kv is not None:
            if list(self._kv.endpoints) == endpoints or not endpoints:
                return
            self._kv.stop()
            self._kv = None
        if not endpoints:
            return
        reader = KvReader(
            self._scraper.worker,
            endpoints,
            self._decoder,
            self._funnel.put,
            process_start=lambda: process_start(self._probe_client),
            clock=self._clock,
        )
        try:
            self._kv_links = reader.start()
        except EngineUnreachable as error:
            self._kv_error = error.message
            return
        self._kv, self._kv_error = reader, None

    def _kv_endpoints(self) -> list[KvEndpoint]:
        options, found = self._options, self._scraper.discovery
        if options.kv_events is not None:
            return endpoints_from_option(
                options.kv_events, options.kv_replay, self._client.host, max(len(found.ranks), 1)
            )
        return endpoints_from_sources(found.kv_sources or {}, self._client.host)

    def _open_polls(self) -> None:
        scraper, options = self._scraper, self._options
        polls = scraper.adapter.polls(scraper.discovery, scraper.worker, options.salt, self._sampling)
        if not polls:
            return

        def client(timeout_s: float) -> EngineClient:
            return EngineClient(options.url, key=options.engine_key, verify=options.verify, timeout_s=timeout_s)

        self._poller = Poller(
            polls,
            client,
            self._funnel.put,
            newest=lambda: scraper.newest,
            interval_s=options.interval_s,
            clock=self._clock,
        )
        self._poller.start()

    def _open_otlp(self) -> None:
        if self._options.otlp_port is not None:
            self._otlp = OtlpReceiver(self._options.otlp_port, self._scraper.worker, self._spans, clock=self._clock)
            self._otlp.start()

    def _spans(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Requests from spans, unless the plugin reports the same requests at the same vantage."""
        if self._scraper.discovery.plugin_worker is not None:
            self._left_out_spans += len(rows)
            return
        model = self._scraper.discovery.models[:1]
        self._funnel.put_rows(
            "request", [{**row, "model": row.get("model") or next(iter(model), None)} for row in rows]
        )

    # --- the end

    def _drain(self) -> None:
        if self._otlp is not None:
            self._otlp.stop()
        if self._kv is not None:
            self._kv.stop()
        if self._poller is not None:
            self._poller.stop()
        if self._scraper.lives.is_up:
            self._scraper.scrape()
        self._scraper.finish()
        self._funnel.close()
        self._close()

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._client.close()
        self._probe_client.close()

    def _summary(self, seconds: float) -> Summary:
        scraper, lives, counts = self._scraper, self._scraper.lives, self._decoder.counts
        events = None
        if self._kv is not None:
            events = {name: getattr(counts, name) for name in type(counts).__slots__}
            events |= {"replayed": self._kv.replayed, "refused": self._kv.refused}
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
            kv_events=events,
            sink_error=self._funnel.error,
            seen=self._lines,
        )


def _log_tail(engine: Adapter, path: Path, worker: str) -> LogTail:
    """Raises UsageError where this engine's log tells nothing."""
    if engine.log_reader(worker) is None:
        raise UsageError(f"kvscope reads nothing from the log of {engine.title}; leave --log out.")

    def make() -> LogReader:
        reader = engine.log_reader(worker)
        assert reader is not None
        return reader

    return LogTail(path, make)
