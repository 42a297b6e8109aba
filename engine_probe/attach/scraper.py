"""One scrape of the engine after another: pages -> `sample`, `worker` and `mark` rows, and what the page reveals.

Canonical series are stored at every scrape, others at their edges (`thinning`). The engine's lives, restarts and
counter resets are followed by `Lives`, its settings by `WorkerFacts`. After each (re)start the slow endpoints are asked
again.
Invariant: a scrape never raises for what the engine does; it returns False, and the next one tries again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from engine_probe.adapters.adapter import Adapter, Discovery
from engine_probe.adapters.facts import WorkerFacts
from engine_probe.adapters.metric_names import HOST_PREFIXES, SampleMapper
from engine_probe.adapters.prometheus import Page, PageParser
from engine_probe.adapters.registry import recognise
from engine_probe.adapters.thinning import Row, Thinner
from engine_probe.adapters.worker_map import WorkerMap
from engine_probe.attach.fetch import EngineClient
from engine_probe.attach.funnel import Funnel
from engine_probe.attach.life import Lives
from engine_probe.attach.log_tail import LogTail
from engine_probe.attach.source_life import SourceLives
from engine_probe.errors import EngineUnreachable, KvscopeError, UnknownFormat
from engine_probe.events import CANONICAL_SAMPLES

if TYPE_CHECKING:
    import pyarrow as pa

COUNTERS: Final = frozenset(name for name in CANONICAL_SAMPLES if name.endswith("_total"))
PROCESS_START: Final = "process_start_time_seconds"
PLUGIN_DELAY_S: Final = 1.0  # the plugin's flush interval, and time for the write
_PROCESS_START_LINE = re.compile(rb"^process_start_time_seconds (\S+)$", re.MULTILINE)


class Scraper:
    """Scrapes one engine instance. Not thread-safe: one thread calls `connect`, `scrape` and `finish`."""

    def __init__(
        self,
        adapter: Adapter,
        client: EngineClient,
        funnel: Funnel,
        worker: str | None,
        *,
        log: LogTail | None = None,
        worker_map: WorkerMap | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.adapter = adapter
        self._map = worker_map or WorkerMap()
        self._client = client
        self._funnel = funnel
        self._given_worker = worker
        self._log = log
        self._clock = clock
        self._parser = PageParser()
        self._thinner = Thinner()
        self._facts = WorkerFacts()
        self._mapper: SampleMapper | None = None
        self._lives: Lives | None = None
        self.discovery = Discovery()
        self.newest: Page | None = None
        self.scrapes = 0
        self.failures = 0
        self.last_error: str | None = None
        self.has_news = False
        """What is seen changed without a restart; who tells it sets it back."""

    @property
    def worker(self) -> str:
        """The name of the instance: given, or told by the plugin inside it or its router, or its address."""
        seen = self.discovery
        return self._given_worker or seen.plugin_worker or seen.worker or self._client.url.partition("://")[2]

    @property
    def facts(self) -> Mapping[str, Any]:
        """Columns of a `worker` row known of the instance (its first rank) now."""
        return self._facts.known(self.worker)

    @property
    def lives(self) -> Lives:
        assert self._lives is not None, "connect first"
        return self._lives

    def connect(self) -> None:
        """The first scrape: find out who answers and what it shows.

        Raises EngineUnreachable (nobody answers), UnknownFormat (it is another engine), UsageError (key).
        """
        at_ns = self._clock()
        page = self._page()
        self._check(page)
        self.discovery = self.adapter.discover(self._client, page)
        serves = self.adapter.serves
        whose = self._given_worker if self.adapter.is_nameless else self.worker
        drops = HOST_PREFIXES if serves else (*HOST_PREFIXES, "process_")
        tables = self.adapter.tables
        self._mapper = SampleMapper(whose, tables, drop_prefixes=drops, names_worker=self._map.worker)
        self._lives = Lives(self.worker) if serves else SourceLives(f"{self.adapter.title} at {self._client.url}")
        self._take(page, at_ns)

    def scrape(self) -> bool:
        """One scrape. False where the engine did not answer as it should; why is in `last_error`."""
        at_ns = self._clock()
        try:
            page = self._page()
            self._check(page)
        except KvscopeError as error:
            self.failures += 1
            self.last_error = error.message
            is_timeout = isinstance(error, EngineUnreachable) and bool(error.facts.get("is_timeout"))
            # Now, not when it was asked: until the failure it may have lived.
            self._funnel.put_rows("mark", self.lives.failed(error.message, self._clock(), is_timeout=is_timeout))
            return False
        self.last_error = None
        self._take(page, at_ns)
        return True

    def finish(self) -> None:
        """Write the numbers that stood still up to the end, and the end itself where the engine is down."""
        self._take_log()
        self._funnel.put({"sample": sample_table(self._thinner.flush())})
        self._funnel.put_rows("mark", self.lives.end(self._clock()))

    def _page(self) -> Page:
        return self.adapter.page(self._client, self._parser)

    def _take(self, page: Page, at_ns: int) -> None:
        assert self._mapper is not None
        self.scrapes += 1
        self.newest = page
        rows = self._mapper.rows(page, at_ns)
        counters: dict[str, float] = {}
        start_s = None
        for _, _, name, _, value in rows:
            if name in COUNTERS:
                counters[name] = counters.get(name, 0.0) + value
            elif name == PROCESS_START:
                start_s = value
        restarts, was_up = self.lives.restarts, self.lives.is_up
        self.lives.plugin_delay_s = PLUGIN_DELAY_S if self.discovery.plugin_worker is not None else None
        marks = self.lives.seen(counters, start_s, at_ns)
        if self.lives.restarts != restarts or (not was_up and self.scrapes > 1):
            self.discovery = self.adapter.discover(self._client, page)
        self._funnel.put({"sample": sample_table(self._thinner.thin(rows))})
        self._funnel.put_rows("mark", marks)
        self._worker_facts(page, at_ns)

    def _worker_facts(self, page: Page, at_ns: int) -> None:
        """What the page says of each rank goes before what the log says of all."""
        told = self._take_log()
        for rank, facts in self.adapter.facts(page, self.discovery).items():
            merged = {**told, **{key: value for key, value in facts.items() if value is not None}}
            merged["flags"] = {**told.get("flags", {}), **facts.get("flags", {})}
            name = self.adapter.rank_worker(self.worker, rank)
            for kind, rows in self._facts.observe(name, merged, at_ns).items():
                self._funnel.put_rows(kind, rows)

    def _take_log(self) -> Mapping[str, Any]:
        """Rows of the log to the funnel; answers the settings that it told so far."""
        if self._log is None:
            return {}
        told = self._log.poll()
        for kind, rows in self._log.drain().items():
            self._funnel.put_rows(kind, [self._map.renamed(row) for row in rows])
        return told

    def _check(self, page: Page) -> None:
        """Raises UnknownFormat where somebody else made the page."""
        if self.adapter.recognises(page):
            return
        url, title = self._client.url, self.adapter.title
        other = recognise(page)
        if other is not None:
            raise UnknownFormat(
                f"{url} is {other.title}, not {title}: use `kvscope attach {other.engine} {url}`.", url=url
            )
        names = page.names()
        if not names:
            raise UnknownFormat(
                f"{url}{self.adapter.metrics_path} is empty: it has no series. {title} may be starting, or its statistics "
                "are off.",
                url=url,
            )
        if "http_requests_total" in names or "python_info" in names:
            hint = self.adapter.metrics_flag or "its statistics switched on (vLLM: without --disable-log-stats)"
            raise UnknownFormat(
                f"{url}/metrics has no {title} numbers. If this is {title}, start it with {hint}.", url=url
            )
        where = f" Its page is on {self.adapter.metrics_port}." if self.adapter.metrics_port else ""
        raise UnknownFormat(
            f"{url}/metrics is a Prometheus page, but not {title}'s. Is this the engine's HTTP port?{where}", url=url
        )


def process_start(client: EngineClient) -> float | None:
    """Unix s at which the engine's process started, asked now; None where nobody answers or the page does not say."""
    try:
        body, _ = client.metrics()
    except KvscopeError:
        return None
    match = _PROCESS_START_LINE.search(body)
    try:
        return None if match is None else float(match[1])
    except ValueError:
        return None


def sample_table(rows: Sequence[Row]) -> pa.Table:
    """`sample` rows as a table of the full schema."""
    import pyarrow as pa

    from engine_probe.schema import arrow_schema, conform

    schema = arrow_schema("sample")
    columns = {
        "worker": [row[0] for row in rows],
        "at_ns": [row[1] for row in rows],
        "name": [row[2] for row in rows],
        "labels": [list(row[3].items()) for row in rows],
        "value": [row[4] for row in rows],
    }
    arrays = [pa.array(values, schema.field(name).type) for name, values in columns.items()]
    return conform("sample", pa.table(arrays, names=list(columns)))
