"""What kvscope knows of one kind of engine: its words, its endpoints, what it shows, and which setting shows more.

One subclass an engine, in a file of its name, listed in `registry`. Everything here is pure except that `page` and
`discover` ask through the client they are given: rows come out, `attach` moves them. Invariant: an adapter never raises
for what an engine does not have (an older release, a closed endpoint); it leaves null, and says in `lines` what opens it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from engine_probe.adapters.metric_names import MetricNames
from engine_probe.adapters.prometheus import Page, PageParser
from engine_probe.adapters.provides import Provides
from engine_probe.sampling import Sampling

if TYPE_CHECKING:
    import pyarrow as pa

Rows = dict[str, list[dict[str, Any]]]
"""Kind -> rows."""


class Client(Protocol):
    """The engine's HTTP side, as `attach.fetch.EngineClient` offers it."""

    url: str

    def metrics(self, path: str = "/metrics", *, hint: str = "") -> tuple[bytes, str | None]:
        """Body and content type of a page. Raises EngineUnreachable, UnknownFormat, UsageError."""

    def json(self, path: str) -> Any:
        """What `path` answers as JSON, None where it does not answer 200 with JSON."""


@dataclass(slots=True)
class Discovery:
    """What the engine's endpoints told at its last start. Null and empty are unknown or off.

    kv_sources     KV-event publishers by rank, in vLLM's form; {} where they are off, None where it is not told
    plugin_worker  name under which a probe inside the engine reports, None where there is none
    worker         name under which its router knows it, None where it has none
    details        what only this engine's adapter understands
    """

    version: str | None = None
    models: list[str] = field(default_factory=list)
    max_context: int | None = None
    kv_sources: Mapping[str, Any] | None = None
    series: frozenset[str] = frozenset()
    ranks: list[str] = field(default_factory=list)
    prefix_caching: bool | None = None
    plugin_worker: str | None = None
    worker: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What `attach` does beside the scrapes.

    kv_links   how each KV-event endpoint is attached; empty where none is
    otlp_url   address of our trace receiver, None where there is none
    polls      further endpoints asked: None where one answers, else why it does not; one not asked yet is absent
    block_rate share of KV blocks whose rows are kept
    """

    interval_s: float = 1.0
    kv_links: Sequence[str] = ()
    kv_error: str | None = None
    has_replay: bool = False
    otlp_url: str | None = None
    log_path: str | None = None
    log_error: str | None = None
    polls: Mapping[str, str | None] = field(default_factory=dict)
    block_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """`subject` is seen (True), not seen (False), or will be once the engine does its part (None)."""

    subject: str
    seen: bool | None
    text: str

    def __str__(self) -> str:
        word = {True: "seen", False: "not seen", None: "waiting"}[self.seen]
        return f"{self.subject:<10} {word:<9} {self.text}"


class Poll(Protocol):
    """One more endpoint, asked again and again by one thread alone (some drain what they tell, some answer late).

    One object serves an endpoint through all lives of the engine: it may remember what it was told.
    """

    path: str
    method: Literal["GET", "POST"]
    timeout_s: float
    """How long an answer may take; some engines wait for news before they answer."""
    hint: str
    """What to do where the engine has no such endpoint."""

    def is_due(self, page: Page | None) -> bool:
        """Whether to ask now; `page` is the newest scrape."""

    def tables(self, body: bytes, at_ns: int) -> Mapping[str, pa.Table]:
        """Rows of one answer, kind -> table; {} for none. Raises UnknownFormat for what no known release answers."""


class LogReader(Protocol):
    """What one start of the engine writes into its log."""

    def feed(self, line: str) -> Rows:
        """Take in one line; rows where it tells of a request or a decision, else {}. Never raises for a strange line."""

    def worker_facts(self) -> dict[str, Any]:
        """Columns of a `worker` row told so far; `flags` in the engine's own names. {} where nothing was told."""


class Adapter(ABC):
    """One kind of engine. Subclasses fill the class attributes and override what differs."""

    engine: ClassVar[str]
    """Canonical name: the word on the command line and in `worker.engine`."""
    title: ClassVar[str]
    """As its makers write it."""
    tables: ClassVar[tuple[MetricNames, ...]]
    """Tables of its page; the first is its own, the others may stand beside it (a connector's, a host's)."""
    provides: ClassVar[tuple[Provides, ...]]
    metrics_path: ClassVar[str] = "/metrics"
    metrics_flag: ClassVar[str] = ""
    """The setting without which there is no metrics page; empty where it is always there."""
    metrics_port: ClassVar[str] = ""
    """Where its page is, if that is not where it serves."""
    guide: ClassVar[str]
    """Its page in docs."""
    serves: ClassVar[bool] = True
    """False for what serves no requests (a host's exporter, a metrics server): its restart is no worker's restart."""
    is_nameless: ClassVar[bool] = False
    """True where its rows are about others (a host's, a GPU's) and have no worker but by label, rule or `--worker`."""

    def recognises(self, page: Page) -> bool:
        """Whether this engine made the page."""
        first = self.tables[0]
        return any(first.bare(sample.series.name) is not None for sample in page.samples)

    def page(self, client: Client, parser: PageParser) -> Page:
        """One scrape. Raises EngineUnreachable, UnknownFormat, UsageError."""
        body, content_type = client.metrics(self.metrics_path, hint=self.page_hint())
        return parser.parse(body, content_type)

    def page_hint(self) -> str:
        """What to do where the address that was given has no such page."""
        if self.metrics_flag:
            return f"Start {self.title} with {self.metrics_flag}."
        where = f" It is on {self.metrics_port}." if self.metrics_port else ""
        return f"Is this the port where {self.title} shows its metrics?{where} See {self.guide}."

    def discover(self, client: Client, page: Page) -> Discovery:
        """Ask the slow endpoints: after connecting, and after each restart."""
        return Discovery(series=frozenset(page.names()))

    def facts(self, page: Page, seen: Discovery) -> dict[str, dict[str, Any]]:
        """Columns of a `worker` row by rank ("0" where there is one)."""
        return {"0": self.common_facts(seen)}

    def common_facts(self, seen: Discovery) -> dict[str, Any]:
        """The `worker` columns that every discovery tells."""
        return {
            "engine": self.engine,
            "engine_version": seen.version,
            "model": seen.models[0] if seen.models else None,
            "max_context": seen.max_context,
            "prefix_caching": seen.prefix_caching,
        }

    def rank_worker(self, worker: str, rank: str) -> str:
        """Name of one rank (one scheduler, one KV cache) of the instance `worker`."""
        return worker if rank in ("", "0") else f"{worker}/dp{rank}"

    def open_sources(self, seen: Discovery) -> tuple[str, ...]:
        """Names of those of `provides` that are open now, as far as the engine itself tells; a client's are unknown."""
        return ("metrics",) if seen.series else ()

    def polls(self, seen: Discovery, worker: str, salt: bytes, sampling: Sampling) -> Sequence[Poll]:
        """Further endpoints to read beside the page. `salt` and `sampling` are for those that tell of blocks."""
        return ()

    def log_reader(self, worker: str) -> LogReader | None:
        """A reader of the log that starts now; None where this engine's log tells nothing that kvscope reads."""
        return None

    @abstractmethod
    def lines(self, seen: Discovery, around: Surroundings) -> list[Line]:
        """One line for each thing worth seeing, most important first: seen or not, from where, what shows more."""

    def metrics_line(self, seen: Discovery, around: Surroundings) -> Line:
        """The first line of every engine."""
        model = ", ".join(seen.models) or "models unknown"
        text = f"{self.title} {seen.version or 'of unknown version'} serving {model}; "
        text += f"{len(seen.series)} series every {around.interval_s:g} s"
        if len(seen.ranks) > 1:
            text += f"; {len(seen.ranks)} data-parallel ranks"
        return Line("metrics", bool(seen.series), text)


def cards(answer: Any) -> list[dict[str, Any]]:
    """Model cards of an OpenAI-compatible `/v1/models` answer that have an id; adapters (`parent`) among them."""
    data = answer.get("data") if isinstance(answer, dict) else None
    return [card for card in data or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
