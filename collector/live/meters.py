"""What the collector counts about itself: batches, rows, refusals, queue, commits, senders' lag.

One registry an app, so that two apps in a process (tests) do not mix. Children of labels are few and made once; every
label that a sender could fill with inventions is bounded. Nothing is counted per row.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from collector.counts.bounded import Names
from collector.problem_document import slug
from engine_probe.digits import whole_number
from engine_probe.errors import KvscopeError
from store import metric_catalogue as names

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside every counter that nobody here reads
_COMMIT_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_MAX_COLUMNS = 100
_MOST_ROWS = 1 << 53


class Meters:
    """The collector's own numbers, all in `registry`; safe from several threads."""

    def __init__(self, max_sources: int) -> None:
        self.registry = CollectorRegistry()
        self.bounded_source = Names(max_sources)
        self._bounded_column = Names(_MAX_COLUMNS)
        self._batches = self._counter(names.INGEST_BATCHES)
        self._rows = self._counter(names.INGEST_ROWS)
        self._bytes = self._counter(names.INGEST_BYTES)
        self._rejected = self._counter(names.INGEST_REJECTED)
        self._rejected_rows = self._counter(names.INGEST_REJECTED_ROWS)
        self._ignored = self._counter(names.INGEST_IGNORED)
        self._spans = self._counter(names.INGEST_SPANS)
        self._points = self._counter(names.INGEST_POINTS)
        self._gaps = self._counter(names.GAP_MARKS)
        self._gap_rows = self._counter(names.GAP_ROWS)
        self._counting = self._counter(names.INGEST_COUNTING)
        self._findings = self._counter(names.FINDINGS)
        self._commit = self._histogram(names.INGEST_COMMIT)
        self._newest = self._gauge(names.SOURCE_NEWEST)
        self._lag = self._gauge(names.SOURCE_LAG)
        self.queries = self._histogram(names.QUERY)

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
        if "mark" in tables:
            self._count_gaps(source, tables["mark"])

    def counted(self, seconds: float) -> None:
        """A committed batch was counted for `/metrics` and the live picture."""
        self._counting.inc(seconds)

    def found(self, status: str) -> None:
        """A diagnosis was made."""
        self._findings.labels(status).inc()

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

    def _count_gaps(self, source: str, marks: pa.Table) -> None:
        gaps = marks.filter(pc.equal(marks.column("mark"), "gap"))
        if gaps.num_rows == 0:
            return
        name = self.bounded_source(source)
        self._gaps.labels(name).inc(gaps.num_rows)
        told = [dict(attrs or ()).get("dropped_rows") for attrs in gaps["attrs"].to_pylist()]
        lost = [None if text is None else whole_number(text, _MOST_ROWS) for text in told]
        if any(number is not None for number in lost):
            self._gap_rows.labels(name).inc(sum(number or 0 for number in lost))

    def _counter(self, family: names.Family) -> Counter:
        return Counter(family.name.removesuffix("_total"), family.doc, family.labels, registry=self.registry)

    def _gauge(self, family: names.Family) -> Gauge:
        return Gauge(family.name, family.doc, family.labels, registry=self.registry)

    def _histogram(self, family: names.Family) -> Histogram:
        return Histogram(family.name, family.doc, family.labels, registry=self.registry, buckets=_COMMIT_BOUNDS_S)
