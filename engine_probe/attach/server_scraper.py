"""Follows a Prometheus server: the raw samples that it scraped since the last look, read as the pages that they were.

The server is asked again for the last half minute, since a scrape's samples appear when the scrape is over; what was
taken is not taken twice. Invariant: it behaves towards its follower as a scraper of one engine does, but speaks of many
workers, and the server's own absence is a `gap` and no worker's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from engine_probe.adapters.adapter import Adapter, Discovery
from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.attach.fetch import EngineClient
from engine_probe.attach.funnel import Funnel
from engine_probe.attach.prometheus_api import Answer, PrometheusApi, selectors_of, told_once
from engine_probe.attach.scraper import Scraper
from engine_probe.attach.source_life import SourceLives
from engine_probe.errors import EngineUnreachable, KvscopeError, UnknownFormat
from engine_probe.readers.server_targets import ServerTargets

FIRST_LOOK_NS: Final = 300_000_000_000
OVERLAP_NS: Final = 30_000_000_000
MIN_PAUSE_S: Final = 5.0
"""A server that scrapes every 15 s is not asked every second."""


class ServerScraper(Scraper):
    """One server and the selectors of what to take from it."""

    def __init__(
        self,
        adapter: Adapter,
        client: EngineClient,
        funnel: Funnel,
        worker: str | None,
        *,
        api: PrometheusApi,
        matches: Sequence[str],
        worker_map: WorkerMap | None = None,
        worker_label: str | None = None,
        clock: Callable[[], int] = time.time_ns,
        min_pause_s: float = MIN_PAUSE_S,
    ) -> None:
        super().__init__(adapter, client, funnel, worker, worker_map=worker_map, clock=clock)
        self._api = api
        self._selectors = selectors_of(matches)
        self._targets = ServerTargets(worker_map, worker_label)
        self._asked_ns = 0
        self._min_pause_ns = round(min_pause_s * 1e9)
        self._version: str | None = None
        self._warnings: list[str] = []

    def connect(self) -> None:
        """The first look: which targets there are, and the newest sample of each series.

        Raises EngineUnreachable, UnknownFormat (no samples, or no Prometheus API), UsageError (key, selector).
        """
        now_ns = self._clock()
        answer = self._api.raw(self._selectors, now_ns - FIRST_LOOK_NS, now_ns)
        if not answer.series:
            raise UnknownFormat(
                f"{self._api.url} has no samples of {', '.join(self._selectors)} in the last five minutes. Check the "
                "selector, and that the server scrapes what you mean (its page /targets).",
                url=self._api.url,
            )
        self._version = self._api.version()
        self._lives = SourceLives(f"Prometheus at {self._api.url}")
        answer.series = {labels: points[-1:] for labels, points in answer.series.items()}
        self._take_answer(answer, now_ns)

    def scrape(self) -> bool:
        """One look, at most every few seconds. False where the server did not answer; why is in `last_error`."""
        now_ns = self._clock()
        if now_ns - self._asked_ns < self._min_pause_ns and self.last_error is None:
            return True
        return self._look(now_ns)

    def finish(self) -> None:
        """Take the last samples, and write the numbers that stood still."""
        if self._lives is None:
            return
        if self.last_error is None:
            self._look(self._clock())
        self._targets.finish()
        self._funnel.put(self._targets.drain())
        self._funnel.put_rows("mark", self.lives.end(self._clock()))

    def _look(self, now_ns: int) -> bool:
        try:
            answer = self._api.raw(self._selectors, self._asked_ns - OVERLAP_NS, now_ns)
        except KvscopeError as error:
            self.failures += 1
            self.last_error = error.message
            is_timeout = isinstance(error, EngineUnreachable) and bool(error.facts.get("is_timeout"))
            self._funnel.put_rows("mark", self.lives.failed(error.message, self._clock(), is_timeout=is_timeout))
            return False
        self.last_error = None
        self._take_answer(answer, now_ns)
        return True

    def _take_answer(self, answer: Answer, now_ns: int) -> None:
        self.scrapes += 1
        self._asked_ns = now_ns
        self._targets.take(answer.series)
        self._funnel.put(self._targets.drain())
        self._funnel.put_rows("mark", self.lives.seen({}, None, now_ns))
        self._warnings = told_once([*self._warnings, *answer.warnings])
        details: Mapping[str, object] = {"kinds": self._targets.kinds(), "warnings": tuple(self._warnings)}
        if details != self.discovery.details:
            self.discovery = Discovery(version=self._version, series=frozenset(self._selectors), details=details)
            self.has_news = self.scrapes > 1
