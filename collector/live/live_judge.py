"""The ledger as a counter: in the background, the seconds of every ended request by the cause that owns them.

Again and again the newest minutes are read and split as a diagnosis splits them (`diagnosis.alone`), and each request is
counted once, when it has been over for SETTLE_S: by then its steps are there too. The same pass adds the regret of routing
decisions, hotspots that reach into the newest minute, and contradictions of the telemetry. What is left out is counted: a request
longer than the minutes that are read, and everything while more requests came than are judged at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from threading import Event, Lock, Thread
from typing import Final

import numpy as np
from prometheus_client.core import Metric

from collector.counts.book import Book, metric_of
from collector.counts.bounded import Names
from diagnosis.alone import judge_alone
from diagnosis.facts import Facts
from diagnosis.hotspots.holders import informed
from diagnosis.hotspots.judge import find
from diagnosis.hotspots.kinds import KINDS
from diagnosis.hotspots.reading import read
from diagnosis.hotspots.regret import regret_of
from diagnosis.loading.load import load
from diagnosis.windows import vantages
from engine_probe.errors import BadWindow, KvscopeError
from store import metric_catalogue as names
from store.interface import Store, Window

log = logging.getLogger(__name__)

SETTLE_S: Final = 5.0
"""A request has to be over for so long: rows of its last steps may come after its own."""
DECIDED_RATIO: Final = 0.2
"""A routing decision is judged when it is this share of the minutes read old (a minute of five): then most requests tell what came of it."""
MOST_REQUESTS: Final = 60_000
RECENT_S: Final = 60.0
S: Final = 1_000_000_000


class LiveJudge:
    """Counts into a book; `run_once` is one pass, `start` passes every interval on a thread of its own."""

    def __init__(
        self,
        store: Store,
        book: Book,
        worker: Names,
        *,
        interval_s: float,
        lookback_s: float,
        max_busy_ratio: float = 0.2,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store, self._book, self._worker = store, book, worker
        self._interval_s, self._lookback_ns, self._clock = interval_s, int(lookback_s * S), clock
        self._max_busy_ratio = max_busy_ratio
        self._judged: dict[tuple[str, int], int] = {}
        self._started_ns = clock()
        self._since_ns = self._routed_until_ns = self._started_ns
        self._stopping = Event()
        self._thread: Thread | None = None
        self._lock = Lock()
        self._newest_ns: int | None = None
        self._contradictions: dict[str, bool] = {}
        self._hotspots: dict[tuple[str, str], int] = {}

    def start(self) -> None:
        """Begin; the first pass comes after one interval."""
        self._thread = Thread(target=self._run, name="kvscope-live-judge", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the pass that runs, if one does. Call it before the store is closed."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def run_once(self) -> None:
        """One pass. What fails is logged and counted, and the next pass tries again."""
        now_ns = self._clock()
        window = Window(now_ns - self._lookback_ns, now_ns, None)
        for part, forget in ((self._count_ledger, self._forget_checks), (self._count_regret, self._forget_hotspots)):
            try:
                with self._store.sharing():
                    part(window, now_ns)
                continue
            except BadWindow:
                pass  # nothing came
            except KvscopeError as error:
                log.warning("live judgement failed", extra={"reason": error.message})
                self._book.add(names.LEDGER_SKIPPED, ("failed_passes",), 1)
            except Exception:
                log.exception("live judgement failed")
                self._book.add(names.LEDGER_SKIPPED, ("failed_passes",), 1)
            forget()

    def metrics(self) -> Iterator[Metric]:
        """Gauges of the newest pass; the counters are in the book."""
        with self._lock:
            newest_ns, contradictions, hotspots = self._newest_ns, dict(self._contradictions), dict(self._hotspots)
        if newest_ns is not None:
            newest = metric_of(names.LEDGER_NEWEST)
            newest.add_metric((), newest_ns / S)
            yield newest
        checks, spots = metric_of(names.CONTRADICTIONS), metric_of(names.HOTSPOTS)
        for check, is_one in contradictions.items():
            checks.add_metric((check,), float(is_one))
        for labels, count in hotspots.items():
            spots.add_metric(labels, count)
        yield from (checks, spots)

    def _forget_checks(self) -> None:
        """What cannot be judged any more is not shown: a contradiction of an hour ago is none of now."""
        with self._lock:
            self._contradictions = {}

    def _forget_hotspots(self) -> None:
        with self._lock:
            self._hotspots = {}

    def _count_ledger(self, window: Window, now_ns: int) -> None:
        until_ns = now_ns - int(SETTLE_S * S)
        seen = vantages(self._store, window)
        vantage = next((name for name in ("engine", "client") if name in seen), None)
        if vantage is None:
            self._forget_checks()
            with self._lock:
                self._newest_ns = until_ns  # nothing is left to be split
            return
        ended = self._ended(vantage, window)
        if ended > MOST_REQUESTS:
            self._book.add(names.LEDGER_SKIPPED, ("too_many",), ended)
            log.warning("too many requests for the live ledger", extra={"requests": ended, "most": MOST_REQUESTS})
            self._forget_checks()
            return
        too_long = self._too_long(vantage, window)
        if too_long:
            self._book.add(names.LEDGER_SKIPPED, ("too_long",), too_long)
        facts = load(self._store, window, "live", vantage)
        new = self._new_rows(facts, until_ns)
        alone = judge_alone(facts)
        for metric, ledger in alone.ledgers.items():
            mine = new[ledger.rows]
            workers = facts.requests.worker[ledger.rows][mine]
            for code in np.unique(workers).tolist():
                of_worker = workers == code
                name = self._worker(facts.requests.worker_names[code] or "") if code >= 0 else ""
                seconds = ledger.parts[mine][of_worker].sum(axis=0).tolist()
                self._book.add_all(
                    names.CAUSE_SECONDS,
                    (((metric, cause, name), max(0.0, s)) for cause, s in zip(ledger.names, seconds, strict=True)),
                )
                self._book.add(names.CAUSE_REQUESTS, (metric, name), float(of_worker.sum()))
        with self._lock:
            self._newest_ns = until_ns
            self._contradictions = {check.check: check.status == "contradiction" for check in alone.checks}
        self._since_ns = now_ns

    def _new_rows(self, facts: Facts, until_ns: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[requests] over for long enough, since this judge began, and not counted yet; they are remembered."""
        requests = facts.requests
        ends = np.fmax(np.fmax(requests.end_s, requests.last_token_s), requests.arrival_s)
        ends_ns = requests.origin_ns + (ends * S).astype(np.int64)
        arrivals_ns = requests.origin_ns + np.rint(requests.arrival_s * S).astype(np.int64)
        new = np.zeros(len(requests), dtype=np.bool_)
        for row in np.flatnonzero((ends_ns <= until_ns) & (ends_ns >= self._started_ns)).tolist():
            key = (requests.request_id[row], int(arrivals_ns[row]))
            if key not in self._judged:
                self._judged[key] = int(arrivals_ns[row])
                new[row] = True
        oldest_ns = requests.origin_ns - S
        self._judged = {key: at_ns for key, at_ns in self._judged.items() if at_ns >= oldest_ns}
        return new

    def _ended(self, vantage: str, window: Window) -> int:
        sql = "SELECT count(*) FROM request WHERE run_id IS NULL AND vantage = ? AND arrival_ns >= ? AND arrival_ns < ?"
        return int(self._store.query(sql, [vantage, window.start_ns, window.end_ns]).column(0)[0].as_py())

    def _too_long(self, vantage: str, window: Window) -> int:
        """Requests that ended since the last pass and came before the minutes that are read."""
        sql = "SELECT count(*) FROM request WHERE run_id IS NULL AND vantage = ? AND arrival_ns < ? AND at_ns >= ? AND at_ns < ?"
        params = [vantage, window.start_ns, self._since_ns, window.end_ns]
        return int(self._store.query(sql, params).column(0)[0].as_py())

    def _count_regret(self, window: Window, now_ns: int) -> None:
        observed = informed(self._store, window, read(self._store, window))
        until_ns = now_ns - int(DECIDED_RATIO * self._lookback_ns)
        if observed.has_routes:
            decisions = observed.decisions
            seconds = regret_of(observed).seconds
            at_ns = observed.origin_ns + (decisions.at_s * S).astype(np.int64)
            known = (
                np.isfinite(seconds) & (decisions.chosen >= 0) & (at_ns >= self._routed_until_ns) & (at_ns < until_ns)
            )
            lost = np.bincount(decisions.chosen[known], np.maximum(seconds[known], 0.0), observed.num_workers)
            judged = np.bincount(decisions.chosen[known], minlength=observed.num_workers)
            for code in np.flatnonzero(judged).tolist():
                labels = (self._worker(observed.workers[code] or ""),)
                self._book.add(names.ROUTING_REGRET, labels, float(lost[code]))
                self._book.add(names.ROUTES_JUDGED, labels, float(judged[code]))
            self._routed_until_ns = until_ns
        recent_ns = now_ns - int(RECENT_S * S)
        # judged and none is 0 of every kind, which is not the same as never judged
        found: dict[tuple[str, str], int] = {("", kind): 0 for kind in KINDS}
        for spot in find(observed).hotspots:
            if spot.interval["end_ns"] >= recent_ns:
                name = spot.subject["id"] if spot.subject["kind"] == "worker" else None
                labels_of = (self._worker(name or ""), spot.kind or "")
                found[labels_of] = found.get(labels_of, 0) + 1
        with self._lock:
            # a hotspot that is gone is 0, so that an alert sees it end
            self._hotspots = dict.fromkeys(self._hotspots, 0) | found

    def _run(self) -> None:
        rest_s = self._interval_s
        while not self._stopping.wait(rest_s):
            started = time.perf_counter()
            self.run_once()
            took_s = time.perf_counter() - started
            rest_s = max(self._interval_s, took_s / self._max_busy_ratio - took_s)
