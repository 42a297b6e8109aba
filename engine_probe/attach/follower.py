"""Follows one engine through its lives: its page, its KV events, its further endpoints, its log. Its caller says when.

Idea: an attach to one engine and an attach to a fleet do the same with each engine; they differ in who keeps the time
and who owns the sink. Invariants: after `connect` nothing that the engine does raises; its death is marked and it is
asked again with growing pauses; `drain` takes one last look.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engine_probe.adapters.adapter import Adapter, LogReader, Surroundings
from engine_probe.adapters.kv_events import KvEventDecoder
from engine_probe.adapters.prometheus_server import ENGINE as PROMETHEUS
from engine_probe.adapters.registry import adapter
from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.attach.fetch import TIMEOUT_S, EngineClient
from engine_probe.attach.find import find_engine
from engine_probe.attach.funnel import Funnel
from engine_probe.attach.kv_link import KvEndpoint, endpoints_from_option, endpoints_from_sources
from engine_probe.attach.kv_reader import KvReader
from engine_probe.attach.log_tail import LogTail
from engine_probe.attach.poller import Poller
from engine_probe.attach.scraper import Scraper, process_start
from engine_probe.errors import EngineUnreachable, KvscopeError, UsageError
from engine_probe.sampling import Sampling

MAX_PAUSE_S: Final = 5.0
AUTO: Final = "auto"
"""In place of an engine's name: find out who answers."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """What the user asked for, of one engine. `duration_s` None: until told to stop. `wait`: the engine may not be up yet."""

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
    matches: Sequence[str] = ()
    """Of a Prometheus server: selectors of the series to take."""
    worker_label: str | None = None
    """Of a Prometheus server: label that names the worker."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of a Prometheus server: further headers."""
    block_rate: float = 1.0
    """Share of the KV blocks whose rows are kept (by their hash, each for its whole life)."""


class Follower:
    """One engine. Not thread-safe: its caller uses it from one thread at a time.

    say    takes one sentence at a time
    due    monotonic instant (s) of the next scrape
    tells_lines   whether what is seen is said line by line (it is kept in `lines` either way)
    """

    def __init__(
        self, options: AttachOptions, funnel: Funnel, say: Say, *, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._options = options
        self._funnel = funnel
        self._say = say
        self._clock = clock
        self._client = self._new_client()
        self._probe_client: EngineClient | None = None
        self._log: LogTail | None = None
        self._scraper: Scraper | None = None
        self._closing: list[Callable[[], None]] = []
        if options.engine != AUTO:
            self._know(adapter(options.engine))
        self._sampling = Sampling(options.block_rate)
        self._decoder = KvEventDecoder(options.salt, sampling=self._sampling)
        self._poller: Poller | None = None
        self._polled: Mapping[str, str | None] = {}
        self._kv: KvReader | None = None
        self._kv_links: list[str] = []
        self._kv_error: str | None = None
        self._failures = 0
        self.otlp_url: str | None = None
        self.tells_lines = True
        self.lines: list[Mapping[str, Any]] = []
        self.due = 0.0

    @property
    def scraper(self) -> Scraper:
        """What reads the engine's page. With `engine` auto it is there after `connect`."""
        assert self._scraper is not None, "connect first"
        return self._scraper

    def connect(self) -> None:
        """One attempt to find the engine. Raises EngineUnreachable, UnknownFormat, UsageError."""
        if self._scraper is None:
            self._know(find_engine(self._client)[0])
        self.scraper.connect()

    def _know(self, engine: Adapter) -> None:
        """Whose page it is. Raises UsageError where its log is asked for, and tells nothing."""
        options = self._options
        name = options.worker or self._client.url.partition("://")[2]
        self._log = None if options.log is None else _log_tail(engine, options.log, name)
        if engine.engine == PROMETHEUS:
            self._scraper = self._server_scraper(engine)
            return
        self._scraper = Scraper(
            engine,
            self._client,
            self._funnel,
            options.worker,
            log=self._log,
            worker_map=options.worker_map,
            clock=self._clock,
        )

    def _server_scraper(self, engine: Adapter) -> Scraper:
        from engine_probe.attach.prometheus_api import PrometheusApi
        from engine_probe.attach.server_scraper import ServerScraper

        options = self._options
        api = PrometheusApi(options.url, key=options.engine_key, headers=options.headers, verify=options.verify)
        self._closing.append(api.close)
        return ServerScraper(
            engine,
            self._client,
            self._funnel,
            options.worker,
            api=api,
            matches=options.matches,
            worker_map=options.worker_map,
            worker_label=options.worker_label,
            clock=self._clock,
        )

    def open(self) -> None:
        """Open what the engine offers beside its page, and say what is seen. Call once, after `connect`."""
        self._open_kv()
        self._open_polls()
        self._tell()
        self.due = time.monotonic() + self._options.interval_s

    def tick(self) -> None:
        """One scrape, and what follows from it; sets `due`."""
        scraper, interval_s = self.scraper, self._options.interval_s
        restarts, was_up = scraper.lives.restarts, scraper.lives.is_up
        if scraper.scrape():
            self._failures = 0
            if not was_up or scraper.lives.restarts != restarts:
                self._back(restarted=scraper.lives.restarts != restarts)
        else:
            self._failures += 1
            if was_up and not scraper.lives.is_up:
                self._say(f"The engine is down: {scraper.last_error}")
        self._tell_changes()
        now = time.monotonic()
        if self._failures:
            self.due = now + min(interval_s * 2 ** min(self._failures - 1, 8), max(MAX_PAUSE_S, interval_s))
        else:  # scrapes keep their rhythm; a late one does not make the next ones come in a burst
            self.due = max(self.due + interval_s, now)

    def drain(self) -> None:
        """Take one last look and write what is known to the funnel, which stays open."""
        if self._kv is not None:
            self._kv.stop()
        if self._poller is not None:
            self._poller.stop()
        if self.scraper.lives.is_up:
            self.scraper.scrape()
        self.scraper.finish()

    def close(self) -> None:
        """Let go of connections and files."""
        if self._log is not None:
            self._log.close()
        for close in self._closing:
            close()
        self._client.close()
        if self._probe_client is not None:
            self._probe_client.close()

    def kv_counts(self) -> dict[str, int] | None:
        """What the KV events counted; None where they are not followed."""
        if self._kv is None:
            return None
        counts = self._decoder.counts
        events = {name: getattr(counts, name) for name in type(counts).__slots__}
        return events | {"replayed": self._kv.replayed, "refused": self._kv.refused}

    def _back(self, *, restarted: bool) -> None:
        self._say(
            "The engine restarted; its counters count from 0 again." if restarted else "The engine answers again."
        )
        try:
            self._open_kv()
        except KvscopeError as error:
            self._kv_error = error.message
        self._open_polls()
        self._tell()

    def _tell(self) -> None:
        around = Surroundings(
            interval_s=self._options.interval_s,
            kv_links=self._kv_links,
            kv_error=self._kv_error,
            has_replay=self._kv is not None and all(endpoint.replay for endpoint in self._kv.endpoints),
            otlp_url=self.otlp_url,
            log_path=None if self._options.log is None else str(self._options.log),
            log_error=None if self._log is None else self._log.error,
            polls=self._polled,
            block_rate=self._options.block_rate,
        )
        lines = self.scraper.adapter.lines(self.scraper.discovery, around)
        told = [{"subject": line.subject, "seen": line.seen, "text": line.text} for line in lines]
        if told != self.lines:
            self.lines = list(told)
            for line in lines if self.tells_lines else ():
                self._say(str(line))

    def _tell_changes(self) -> None:
        polled = {} if self._poller is None else self._poller.state()
        if polled != self._polled and self.scraper.lives.is_up:
            self._polled = polled
            self._tell()
        if self._kv is not None and self._kv.error is not None and self._kv_error is None:
            self._kv_error = self._kv.error
            self._tell()
        if self.scraper.has_news:
            self.scraper.has_news = False
            self._tell()

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
            self.scraper.worker,
            endpoints,
            self._decoder,
            self._funnel.put,
            process_start=lambda: self._process_start(),
            clock=self._clock,
        )
        try:
            self._kv_links = reader.start()
        except EngineUnreachable as error:
            self._kv_error = error.message
            return
        self._kv, self._kv_error = reader, None

    def _kv_endpoints(self) -> list[KvEndpoint]:
        options, found = self._options, self.scraper.discovery
        if options.kv_events is not None:
            return endpoints_from_option(
                options.kv_events, options.kv_replay, self._client.host, max(len(found.ranks), 1)
            )
        return endpoints_from_sources(found.kv_sources or {}, self._client.host)

    def _open_polls(self) -> None:
        scraper, options = self.scraper, self._options
        polls = scraper.adapter.polls(scraper.discovery, scraper.worker, options.salt, self._sampling)
        if self._poller is not None:
            if {poll.path for poll in polls} == self._poller.paths:
                return  # they remember what they were told, and notice a restart by their own numbers
            self._poller.stop()
            self._poller = None
        if not polls:
            return

        def client(timeout_s: float) -> EngineClient:
            return self._new_client(timeout_s)

        self._poller = Poller(
            polls,
            client,
            self._funnel.put,
            newest=lambda: scraper.newest,
            interval_s=options.interval_s,
            clock=self._clock,
        )
        self._poller.start()

    def _process_start(self) -> float | None:
        """When the engine's process started; asked by the thread of the KV events, on a connection of its own."""
        if self._probe_client is None:
            self._probe_client = self._new_client()
        return process_start(self._probe_client)

    def _new_client(self, timeout_s: float = TIMEOUT_S) -> EngineClient:
        options = self._options
        return EngineClient(options.url, key=options.engine_key, verify=options.verify, timeout_s=timeout_s)


def _log_tail(engine: Adapter, path: Path, worker: str) -> LogTail:
    """Raises UsageError where this engine's log tells nothing."""
    if engine.log_reader(worker) is None:
        raise UsageError(f"kvscope reads nothing from the log of {engine.title}; leave --log out.")

    def make() -> LogReader:
        reader = engine.log_reader(worker)
        assert reader is not None
        return reader

    return LogTail(path, make)
