"""Alerting in the service: a thread that looks and plans, a thread that delivers, and the book that both write.

Idea: judging costs seconds of CPU, so it must not be felt. Looks go through the same single-file pool as people's judgements (never two
at once), a tick is spread over its checks (a person waits for one look at most), and the thread rests at least four times as
long as it worked (`max_busy_ratio`), so a slow machine looks more seldom and serves no worse. Batches are never waited for, and
where memory is short its reads give theirs to a commit before anybody else's. A window is read once a tick, whatever asks about it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from alerts.condition import Check
from alerts.courier import Courier, Patience
from alerts.evaluator import Evaluator, Rhythm
from alerts.lifecycle import Pace
from alerts.notifier import Notifier
from alerts.receivers import Receiver, read_receivers
from collector.alerting.intake import end_unheard
from collector.reading.reads import Reads
from collector.settings import AlertSettings
from engine_probe.errors import KvscopeError
from store import metric_catalogue as names
from store.alert_book import AlertBook
from store.duckdb_store import DuckDBStore
from store.evidence.lineage import window_sql
from store.interface import Window

if TYPE_CHECKING:
    from alerts.seen_once import SeenOnce

log = logging.getLogger(__name__)

NS: Final = 1_000_000_000
PLAN_S: Final = 5.0
"""Messages that wait for company are looked at so often."""
_LOOK_BOUNDS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Alerting:
    """Evaluator, notifier and courier over one book. `start` begins, `stop` ends; the book answers in between."""

    def __init__(
        self,
        store: DuckDBStore,
        settings: AlertSettings,
        base_url: str,
        *,
        judging: Reads,
        keep_finding: Callable[[dict[str, Any]], int],
        registry: CollectorRegistry,
    ) -> None:
        self.book = AlertBook(store)
        self.settings, self.base_url = settings, base_url
        self.receivers: tuple[Receiver, ...] = ()
        if settings.receivers_file is not None:
            self.receivers = read_receivers(settings.receivers_file)
        self._meters = _Meters(registry, self.book, [receiver.name for receiver in self.receivers])
        self.courier = Courier(
            self.book,
            self.receivers,
            Patience(settings.retry_first_s, settings.retry_limit_s, settings.give_up_s),
            on_end=self._meters.delivered,
        )
        self.notifier = Notifier(self.book, self.receivers, base_url)
        self._store, self._judging, self._keep_finding = store.in_background(), judging, keep_finding
        self._num_rows: int | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look for the first time after one interval; deliver at once what an earlier process left."""
        self.courier.start()
        if self.settings.enabled or self.receivers:
            self._thread = threading.Thread(target=self._run, name="kvscope-alerts", daemon=True)
            self._thread.start()

    def ask_to_stop(self) -> None:
        """Begin nothing more."""
        self._stopping.set()

    def stop(self) -> None:
        """End after the look that runs; what is not delivered stays in the outbox."""
        self.ask_to_stop()
        self.courier.stop()
        if self._thread is not None:
            self._thread.join(15.0)

    def tell(self) -> None:
        """Something changed: plan messages, and send them."""
        if self.notifier.tell(time.time_ns()):
            self.courier.wake()

    @cached_property
    def evaluator(self) -> Evaluator:
        """Made at the first look."""
        from alerts.seen_once import SeenOnce

        seen = SeenOnce()
        return Evaluator(
            self.book,
            checks_of(self._store, self.settings, seen),
            rhythm_of(self.settings),
            keep_finding=self._keep_finding,
            base_url=self.base_url,
            judge=lambda name, look: self._judging.wait_for(f"alerts/{name}", look),
            on_end=seen.forget,
            is_empty=lambda window: not _has_requests(self._store, window),
            is_old=self._is_old,
            on_look=self._meters.looked,
        )

    def _is_old(self, window: Window) -> bool:
        """Nothing arrived in it, and no row of a request came since the last call."""
        before, self._num_rows = self._num_rows, self._store.books.num_appended("request")
        return before == self._num_rows and not _has_requests(self._store, window)

    def _run(self) -> None:
        next_look = time.monotonic() + self.settings.interval_s
        while not self._stopping.wait(min(PLAN_S, self.settings.interval_s)):
            try:
                if self.settings.enabled and time.monotonic() >= next_look:
                    next_look = self._look()
                self.tell()
            except KvscopeError as error:
                if not self._stopping.is_set():
                    log.warning("alerts not looked after", extra={"reason": error.message})
            except Exception:
                log.exception("alerting stumbled")

    def _look(self) -> float:
        """Look once; when the next look is due, however this one ended."""
        started = time.monotonic()
        try:
            end_unheard(self.book, time.time_ns())
            self.evaluator.tick(time.time_ns())
        except KvscopeError as error:
            if not self._stopping.is_set():
                log.warning("no look was taken", extra={"reason": error.message})
        took = time.monotonic() - started
        return started + max(self.settings.interval_s, took / self.settings.max_busy_ratio)


def checks_of(store: DuckDBStore, settings: AlertSettings, seen: SeenOnce | None = None) -> list[Check]:
    """What is looked for. Hotspots first: they silence what comes after. Judging is imported here: a collector answers before."""
    from alerts.checks.contradiction import ContradictionCheck
    from alerts.checks.hotspot import HotspotCheck
    from alerts.checks.latency import LatencyCheck

    made: list[Check] = [HotspotCheck(store, settings.min_regret_s), ContradictionCheck(store, seen=seen)]
    made += [
        LatencyCheck(store, name, min_change_ratio=settings.min_change_ratio, seen=seen) for name in settings.metrics
    ]
    return made


def rhythm_of(settings: AlertSettings) -> Rhythm:
    """The settings' seconds, in ns."""

    def ns(seconds: float) -> int:
        return round(seconds * NS)

    pace = Pace(hold=ns(settings.hold_s), cool_down=ns(settings.cool_down_s), lost=ns(settings.lost_s))
    return Rhythm(ns(settings.window_s), ns(settings.settle_s), pace)


def _has_requests(store: DuckDBStore, window: Window) -> bool:
    condition, params = window_sql(window, "arrival_ns")
    found = store.query(f"SELECT 1 FROM request WHERE {condition} LIMIT 1", params)
    return len(found) > 0


class _Meters(Collector):
    """What alerting counts about itself."""

    def __init__(self, registry: CollectorRegistry, book: AlertBook, receivers: Sequence[str]) -> None:
        self._book, self._receivers = book, receivers
        made, looks = names.ALERT_DELIVERIES, names.ALERT_LOOK
        self._ended = Counter(made.name, made.doc, made.labels, registry=registry)
        self._looks = Histogram(looks.name, looks.doc, looks.labels, registry=registry, buckets=_LOOK_BOUNDS_S)
        failed = names.ALERT_FAILED_LOOKS
        self._failed = Counter(failed.name, failed.doc, failed.labels, registry=registry)
        registry.register(self)

    def delivered(self, receiver: str, state: str) -> None:
        """A message left the queue."""
        self._ended.labels(receiver, state).inc()

    def looked(self, check: str, seconds: float, ended_well: bool) -> None:
        """A check was made."""
        self._looks.labels(check).observe(seconds)
        if not ended_well:
            self._failed.labels(check).inc()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            held, counts = self._book.open_alerts(), self._book.counts()
        except KvscopeError as error:  # the rest of the page is worth having without these
            log.warning("alerts not counted", extra={"reason": error.message})
            return
        alerts = GaugeMetricFamily(names.ALERTS.name, names.ALERTS.doc, labels=names.ALERTS.labels)
        for state in ("pending", "firing"):
            alerts.add_metric([state], sum(alert.state == state for alert in held))
        yield alerts
        outbox = GaugeMetricFamily(names.ALERT_OUTBOX.name, names.ALERT_OUTBOX.doc, labels=names.ALERT_OUTBOX.labels)
        # who waits for nothing is a 0: what is absent meanwhile, a rule over the last minutes would not see
        none = {(receiver, state): 0 for receiver in self._receivers for state in ("waiting", "dead")}
        for (receiver, state), count in (none | counts).items():
            if state != "delivered":
                outbox.add_metric([receiver, state], count)
        yield outbox
