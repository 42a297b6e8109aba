"""What the collector counts about itself: batches, rows, refusals, queue, commits, senders' lag.

One registry an app, so that two apps in a process (tests) do not mix. Children of labels are few and made once; every
label that a sender could fill with inventions is bounded. Nothing is counted per row.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from collector.problem_document import slug
from engine_probe.errors import KvscopeError

OTHER = "other"
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside every counter that nobody here reads
_COMMIT_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_MAX_COLUMNS = 100


class Bounded:
    """Label values up to a number; what comes later is `other`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        with self._lock:
            if value in self._known or len(self._known) < self._most:
                self._known.add(value)
                return value
        return OTHER


class Meters:
    """The collector's own numbers, all in `registry`; safe from several threads."""

    def __init__(self, max_sources: int) -> None:
        self.registry = CollectorRegistry()
        self.bounded_source = Bounded(max_sources)
        self._bounded_column = Bounded(_MAX_COLUMNS)
        self._batches = self._counter("ingest_batches", "batches by how they ended", "result")
        self._rows = self._counter("ingest_rows", "rows committed", "kind")
        self._bytes = self._counter("ingest_bytes", "bytes of bodies received, as sent")
        self._rejected = self._counter("ingest_rejected_batches", "batches refused, by the error's name", "reason")
        self._rejected_rows = self._counter(
            "ingest_rejected_rows", "rows of refused batches that could be decoded", "kind", "reason"
        )
        self._ignored = self._counter(
            "ingest_ignored_columns", "rows that carried a column not in the contract", "column"
        )
        self._spans = self._counter("ingest_spans", "OTLP spans by what became of them", "result")
        self._points = self._counter("ingest_points", "OTLP metric points by what became of them", "result")
        self._gaps = self._counter("gap_marks", "gap marks: a sender said that it lost rows", "source")
        self._commit = Histogram(
            "kvscope_ingest_commit_seconds",
            "time from handing a batch to the store to its commit",
            buckets=_COMMIT_BOUNDS_S,
            registry=self.registry,
        )
        self._newest = Gauge(
            "kvscope_source_newest_row_timestamp_seconds",
            "newest instant a sender's rows carry, as Unix time",
            ["source"],
            registry=self.registry,
        )
        self._lag = Gauge(
            "kvscope_source_lag_seconds",
            "receipt of a sender's latest batch minus its newest row",
            ["source"],
            registry=self.registry,
        )
        self.queries = Histogram(
            "kvscope_query_seconds", "time of read queries", ["route"], registry=self.registry, buckets=_COMMIT_BOUNDS_S
        )

    def received(self, num_bytes: int) -> None:
        """A body came in."""
        self._bytes.inc(num_bytes)

    def committed(self, source: str, tables: Mapping[str, pa.Table], received_ns: int, commit_s: float) -> None:
        """A batch is on disk."""
        self._batches.labels("accepted").inc()
        self._commit.observe(commit_s)
        newest = 0
        for kind, table in tables.items():
            if table.num_rows:
                self._rows.labels(kind).inc(table.num_rows)
                newest = max(newest, pc.max(table.column("at_ns")).as_py())
        if newest:
            name = self.bounded_source(source)
            self._newest.labels(name).set(newest / 1e9)
            self._lag.labels(name).set((received_ns - newest) / 1e9)
        if "mark" in tables and (gaps := pc.sum(pc.equal(tables["mark"].column("mark"), "gap")).as_py()):
            self._gaps.labels(self.bounded_source(source)).inc(gaps)

    def duplicate(self) -> None:
        """A batch had been committed before."""
        self._batches.labels("duplicate").inc()

    def rejected(self, error: KvscopeError, rows: Mapping[str, int] | None = None) -> None:
        """A batch was refused; `rows` by kind where they could be decoded."""
        self._batches.labels("rejected").inc()
        self._rejected.labels(slug(type(error))).inc()
        for kind, count in (rows or {}).items():
            self._rejected_rows.labels(kind, slug(type(error))).inc(count)

    def ignored(self, columns: Mapping[str, int]) -> None:
        """Columns that this contract does not know, with the rows that carried them."""
        for column, count in columns.items():
            self._ignored.labels(self._bounded_column(column)).inc(count)

    def spans(self, **counts: int) -> None:
        """OTLP spans: stored, duplicate, ignored, rejected."""
        for result, count in counts.items():
            if count:
                self._spans.labels(result).inc(count)

    def points(self, **counts: int) -> None:
        """OTLP metric points: stored, duplicate, rejected."""
        for result, count in counts.items():
            if count:
                self._points.labels(result).inc(count)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"kvscope_{name}", doc, labels, registry=self.registry)
