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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from engine_probe.adapters.facts import WorkerFacts
from engine_probe.adapters.prometheus import Page, PageParser
from engine_probe.adapters.thinning import Row, Thinner
from engine_probe.adapters.vllm import SampleMapper, cache_config, cache_config_facts, detect, worker_name
from engine_probe.attach.fetch import EngineClient
from engine_probe.attach.funnel import Funnel
from engine_probe.attach.life import Lives
from engine_probe.errors import EngineUnreachable, KvscopeError, UnknownFormat
from engine_probe.events import CANONICAL_SAMPLES

if TYPE_CHECKING:
    import pyarrow as pa

COUNTERS: Final = frozenset(name for name in CANONICAL_SAMPLES if name.endswith("_total"))
PROCESS_START: Final = "process_start_time_seconds"
PLUGIN_DELAY_S: Final = 1.0  # the plugin's flush interval, and time for the write
PLUGIN_INFO: Final = "kvscope_plugin_info"
_PROCESS_START_LINE = re.compile(rb"^process_start_time_seconds (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Discovery:
    """What the engine's endpoints told at its last start. Null and empty are unknown or off."""

    version: str | None = None
    models: list[str] = field(default_factory=list)
    max_context: int | None = None
    kv_sources: Mapping[str, Any] | None = None
    series: frozenset[str] = frozenset()
    ranks: list[str] = field(default_factory=list)
    prefix_caching: bool | None = None
    plugin_worker: str | None = None


class Scraper:
    """Scrapes one vLLM instance. Not thread-safe: one thread calls `connect`, `scrape` and `finish`."""

    def __init__(
        self,
        client: EngineClient,
        funnel: Funnel,
        worker: str | None,
        *,
        log_facts: Callable[[], Mapping[str, Any]] = dict,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._funnel = funnel
        self._given_worker = worker
        self._log_facts = log_facts
        self._clock = clock
        self._parser = PageParser()
        self._thinner = Thinner()
        self._facts = WorkerFacts()
        self._mapper: SampleMapper | None = None
        self._lives: Lives | None = None
        self.discovery = Discovery()
        self.scrapes = 0
        self.failures = 0
        self.last_error: str | None = None

    @property
    def worker(self) -> str:
        """The name of the instance: given, or told by the plugin inside it, or the host and port of its address."""
        return self._given_worker or self.discovery.plugin_worker or self._client.url.partition("://")[2]

    @property
    def lives(self) -> Lives:
        assert self._lives is not None, "connect first"
        return self._lives

    def connect(self) -> None:
        """The first scrape: find out who answers and what it shows.

        Raises EngineUnreachable (nobody answers), UnknownFormat (it is not vLLM), UsageError (key).
        """
        at_ns = self._clock()
        page = self._page()
        self._check_is_vllm(page)
        self._discover(page)
        self._mapper = SampleMapper(self.worker)
        self._lives = Lives(self.worker)
        self._take(page, at_ns)

    def scrape(self) -> bool:
        """One scrape. False where the engine did not answer as it should; why is in `last_error`."""
        at_ns = self._clock()
        try:
            page = self._page()
            self._check_is_vllm(page)
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
        self._funnel.put({"sample": sample_table(self._thinner.flush())})
        self._funnel.put_rows("mark", self.lives.end(self._clock()))

    def _page(self) -> Page:
        body, content_type = self._client.metrics()
        return self._parser.parse(body, content_type)

    def _take(self, page: Page, at_ns: int) -> None:
        assert self._mapper is not None
        self.scrapes += 1
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
            self._discover(page)
        self._funnel.put({"sample": sample_table(self._thinner.thin(rows))})
        self._funnel.put_rows("mark", marks)
        self._worker_facts(page, at_ns)

    def _worker_facts(self, page: Page, at_ns: int) -> None:
        """What the page says of each rank goes before what the log says of all."""
        seen, told = self.discovery, self._log_facts()
        for rank, labels in (cache_config(page) or {"0": {}}).items():
            facts = {
                "engine_version": seen.version,
                "model": seen.models[0] if seen.models else None,
                "max_context": seen.max_context,
                "dp": len(seen.ranks) if len(seen.ranks) > 1 else None,
            }
            page_facts = cache_config_facts(labels, max(len(seen.ranks), 1))
            merged = {
                **told,
                **{k: v for k, v in (page_facts | {k: v for k, v in facts.items() if v}).items() if v is not None},
            }
            merged["flags"] = {**told.get("flags", {}), **page_facts["flags"]}
            for kind, rows in self._facts.observe(worker_name(self.worker, rank), merged, at_ns).items():
                self._funnel.put_rows(kind, rows)

    def _discover(self, page: Page) -> None:
        version = self._client.json("/version")
        models = self._client.json("/v1/models")
        sources = self._client.json("/kv_event_sources")
        cards = [card for card in _list(models, "data") if isinstance(card, dict) and isinstance(card.get("id"), str)]
        contexts = [card["max_model_len"] for card in cards if isinstance(card.get("max_model_len"), int)]
        configs = cache_config(page)
        plugin = [s.series.labels for s in page.samples if s.series.name == PLUGIN_INFO]
        first: Mapping[str, str] = min(plugin, key=lambda labels: labels.get("engine", ""), default={})
        self.discovery = Discovery(
            version=str(version["version"]) if isinstance(version, dict) and "version" in version else None,
            models=[card["id"] for card in cards if card.get("parent") is None],
            max_context=contexts[0] if contexts else None,
            kv_sources=sources if isinstance(sources, dict) else None,
            series=frozenset(page.names()),
            ranks=sorted(configs, key=lambda rank: (len(rank), rank)),
            prefix_caching=next((cache_config_facts(labels)["prefix_caching"] for labels in configs.values()), None),
            plugin_worker=_base_worker(first),
        )

    def _check_is_vllm(self, page: Page) -> None:
        who = detect(page)
        if who == "vllm":
            return
        url = self._client.url
        if who == "vllm_router":
            raise UnknownFormat(
                f"{url} is a router that repeats its engines' numbers. Attach to each engine itself.",
                url=url,
            )
        names = page.names()
        for prefix, engine in (
            ("sglang:", "SGLang"),
            ("llamacpp:", "llama-server"),
            ("trtllm_", "TensorRT-LLM"),
            ("tgi_", "TGI"),
        ):
            if any(name.startswith(prefix) for name in names):
                raise UnknownFormat(f"{url} is {engine}, not vLLM: `kvscope attach vllm` reads vLLM only.", url=url)
        if "http_requests_total" in names or "python_info" in names:
            raise UnknownFormat(
                f"{url}/metrics has no vLLM numbers. If this is vLLM, start it without --disable-log-stats.", url=url
            )
        raise UnknownFormat(
            f"{url}/metrics is a Prometheus page, but not vLLM's. Is this the engine's HTTP port?", url=url
        )


def _base_worker(labels: Mapping[str, str]) -> str | None:
    """The instance's name: the plugin tells that of one rank, `worker_name(base, rank)`."""
    worker = labels.get("worker")
    return None if worker is None else worker.removesuffix(worker_name("", labels.get("engine")))


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


def _list(answer: Any, key: str) -> Sequence[Any]:
    value = answer.get(key) if isinstance(answer, dict) else None
    return value if isinstance(value, list) else ()
