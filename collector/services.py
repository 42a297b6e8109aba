"""What one running collector consists of, made once and handed to the routes.

`open_services` is the whole composition; `close` ends it in the order that loses nothing: batches first, store last.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from fastapi import FastAPI
from starlette.requests import Request

from collector.alerting.alerting import Alerting
from collector.counts.fleet import Fleet
from collector.counts.slos import Slos
from collector.intake.ingest import Ingest
from collector.intake.otlp_metrics import OtlpMetrics
from collector.intake.traces import Traces
from collector.live.latencies import Latencies
from collector.live.live import Live
from collector.live.live_judge import LiveJudge
from collector.live.meters import Meters
from collector.live.metrics_page import MetricsPage
from collector.reading.reads import Reads
from collector.settings import RetentionSettings, Settings, SloSettings, SqlSettings
from engine_probe.errors import NotReady, StoreError
from store.audit import audited
from store.duckdb_store import DuckDBStore
from store.interface import Store
from store.metrics import Slo, SloRule
from store.open import open_store
from store.upkeep.maintenance import Maintenance
from store.upkeep.retention import RetentionPolicy

if TYPE_CHECKING:
    from store.sandbox.sandbox import SqlRunner

RUNS_AGE_S: Final = 5.0
"""Names of runs are looked up at most so often: finding them scans every kind."""
WAITING_JUDGEMENTS: Final = 8


@dataclass(slots=True)
class Services:
    """The parts.

    owns_store   the store was opened here and is closed here
    reads        queries of the API; `pages` never wait behind them, nor behind SQL and judgements
    num_watchers readers that follow the overview live
    findings     verdicts in short, oldest first; on disk too, where the store has a book of alerts
    """

    settings: Settings
    store: Store
    owns_store: bool
    ingest: Ingest
    traces: Traces
    otlp_metrics: OtlpMetrics
    meters: Meters
    latencies: Latencies
    live: Live
    metrics_page: MetricsPage
    reads: Reads
    pages: Reads
    sql_reads: Reads
    judging: Reads
    upkeep: Maintenance | None
    live_judge: LiveJudge | None
    started_ns: int
    findings: deque[Mapping[str, Any]]
    alerting: Alerting | None = None
    num_watchers: int = 0
    _finding_number: count[int] = field(default_factory=lambda: count(1))
    _runs: _Runs | None = None
    _sql: SqlRunner | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _finding_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_draining(self) -> bool:
        """Stopping: what was accepted is finished, nothing new is taken."""
        return self.ingest.is_draining

    def drain(self) -> None:
        """Take no more batches from now on."""
        self.ingest.is_draining = True

    @property
    def is_drained(self) -> bool:
        """Nothing that was accepted is still on its way."""
        return self.ingest.num_requests == 0

    def known_runs(self) -> Store:
        """The store as far as naming runs goes, looked up at most every RUNS_AGE_S."""
        with self._lock:
            if self._runs is None:
                self._runs = _Runs(self.store)
            return cast(Store, self._runs)

    def forget_runs(self) -> None:
        """Look the names of runs up again at the next need."""
        with self._lock:
            self._runs = None

    def run_sql(self, sql: str, max_rows: int | None, cancelled: threading.Event, *, as_arrow: bool) -> bytes:
        """A person's statement in a child process: a JSON document, or an Arrow IPC stream.

        Raises QueryRefused, QueryKilled, StoreBusy, StoreError.
        """
        if not isinstance(self.store, DuckDBStore):
            raise StoreError(f"the store {type(self.store).__name__} has no SQL for people")
        with self._lock:
            if self._sql is None:
                self._sql = _sql_runner(self.settings.sql)
            runner = self._sql
        with audited(self.store, sql):
            picture = self.store.sql_data  # taken once the statement's time runs
            if as_arrow:
                return runner.run(sql, data=picture, max_rows=max_rows, cancelled=cancelled).to_ipc()
            return runner.run_json(sql, picture, max_rows=max_rows, cancelled=cancelled)

    def keep_finding(self, finding: Mapping[str, Any]) -> int:
        """Keep a verdict in short, under the next number; answers with the number."""
        with self._finding_lock:
            if self.alerting is None:
                number = next(self._finding_number)
            else:
                number = self.alerting.book.keep_finding(finding, self.settings.read.keep_findings)
            self.findings.append({"id": number, **finding})
        self.meters.found(str(finding["status"]))
        return number

    def close(self) -> None:
        """Finish the accepted batches, then let go of the store."""
        self.drain()
        if self._sql is not None:
            self._sql.close()
        if self.alerting is not None:
            self.alerting.ask_to_stop()
        self.ingest.close()
        for pool in (self.reads, self.pages, self.sql_reads, self.judging):
            pool.close()
        if self.alerting is not None:
            self.alerting.stop()
        if self.live_judge is not None:
            self.live_judge.stop()
        if self.upkeep is not None:
            self.upkeep.stop()
        if self.owns_store:
            self.store.close()


def open_services(settings: Settings, store: Store | None) -> Services:
    """Make every part; opens the store at `settings.store_url` where none is given. Raises StoreError, SchemaTooNew."""
    opened: Store = open_configured(settings) if store is None else store
    meters = Meters(settings.metrics.max_sources)
    most = settings.metrics
    fleet = Fleet(most.max_series, slos_of(settings.slo), most.top_tenants, most.top_prefixes)
    read = settings.read
    live = Live(read.open_requests, read.open_expiry_s)
    latencies = Latencies(most.max_series, live.block_sizes, fleet.outcomes)
    ingest = Ingest(opened, settings.ingest, settings.server, meters, latencies, live, fleet)
    upkeep = None
    if isinstance(opened, DuckDBStore):
        upkeep = Maintenance(opened, policy_of(settings.retention), interval_s=settings.retention.interval_s)
        upkeep.start()
    live_judge = None
    if most.ledger_interval_s is not None:
        live_judge = LiveJudge(
            opened.in_background() if isinstance(opened, DuckDBStore) else opened,
            fleet.book,
            fleet.worker,
            interval_s=most.ledger_interval_s,
            lookback_s=most.ledger_lookback_s,
            max_busy_ratio=most.ledger_max_busy_ratio,
        )
        live_judge.start()
    services = Services(
        settings=settings,
        store=opened,
        owns_store=store is None,
        ingest=ingest,
        traces=Traces(ingest),
        otlp_metrics=OtlpMetrics(ingest),
        meters=meters,
        latencies=latencies,
        live=live,
        metrics_page=MetricsPage(
            meters,
            ingest,
            latencies,
            live,
            opened,
            fleet,
            judged=tuple if live_judge is None else live_judge.metrics,
            disk_budget_bytes=settings.retention.disk_budget_bytes,
            slo_goal=settings.slo.goal,
        ),
        reads=Reads("read", read.max_concurrent, read.max_waiting, meters),
        pages=Reads("pages", 1, read.max_waiting, meters),
        sql_reads=Reads("sql", settings.sql.max_children, settings.sql.max_children, meters),
        judging=Reads("judging", 1, WAITING_JUDGEMENTS, meters),
        upkeep=upkeep,
        live_judge=live_judge,
        started_ns=time.time_ns(),
        findings=deque(maxlen=read.keep_findings),
    )
    if isinstance(opened, DuckDBStore):
        _begin_alerting(services, opened)
    return services


def _begin_alerting(services: Services, store: DuckDBStore) -> None:
    """Alerts go on where the last process left them. Raises AlertMisuse for receivers that cannot work."""
    settings = services.settings
    alerting = Alerting(
        store,
        settings.alerts,
        base_url_of(settings),
        judging=services.judging,
        keep_finding=services.keep_finding,
        registry=services.meters.registry,
    )
    services.findings.extend(reversed(alerting.book.findings(settings.read.keep_findings)))
    services.alerting = alerting
    alerting.start()


def base_url_of(settings: Settings) -> str:
    """Where people reach the collector, as links in messages say it."""
    if settings.alerts.public_url is not None:
        return settings.alerts.public_url.rstrip("/")
    host = settings.server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def open_configured(settings: Settings) -> DuckDBStore:
    """The store of the settings, opened for writing. Raises StoreError, StoreBusy, SchemaTooNew."""
    # One reader more than the API uses at once: pages and judgements read beside it.
    return open_store(
        settings.store_url,
        num_readers=settings.read.max_concurrent + 1,
        memory_limit_bytes=settings.store_memory_bytes,
    )


def policy_of(retention: RetentionSettings) -> RetentionPolicy:
    """The store's policy as the settings have it."""
    limits = retention.model_dump()
    del limits["interval_s"]
    return RetentionPolicy(**limits)


def slos_of(settings: SloSettings) -> Slos:
    """What requests are held to, as the settings have it."""
    return Slos(
        [
            SloRule(rule.name, Slo(rule.ttft_s, rule.tpot_s, rule.e2e_s), rule.model, rule.workload, rule.tenant)
            for rule in settings.rules
        ],
        settings.default,
    )


def services_of(request: Request) -> Services:
    """The parts of the app that serves this request. Raises NotReady before start-up and after shutdown."""
    return services_in(request.app)


def services_in(app: FastAPI) -> Services:
    """The parts of a started app."""
    services: Services | None = app.state.services
    if services is None:
        raise NotReady("the collector has not started yet; ask again in a moment")
    return services


class _Runs:
    """`Store.runs`, remembered for RUNS_AGE_S."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: Sequence[str] = ()
        self._until = 0.0

    def runs(self) -> Sequence[str]:
        """Names of the imported runs."""
        if time.monotonic() > self._until:
            self._names = self._store.runs()
            self._until = time.monotonic() + RUNS_AGE_S
        return self._names


def _sql_runner(settings: SqlSettings) -> SqlRunner:
    from store.sandbox.sandbox import SqlLimits, SqlRunner

    limits = SqlLimits(settings.timeout_s, settings.memory_bytes, settings.max_rows)
    return SqlRunner(limits, settings.max_children)
