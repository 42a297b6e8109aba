"""A page of requests as OTLP bytes, and where the next one begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from collector.otlp_export.spans import export_request
from collector.reading.request_queries import RequestFilter, list_requests
from store.evidence.lineage import window_sql
from store.interface import Store
from store.metrics import metric
from store.sql_json import json_objects

PAGE_ROWS: Final = 500
CURSOR_HEADER: Final = "Kvscope-Next-Cursor"
ROWS_HEADER: Final = "Kvscope-Rows"
_METRICS: Final = ", ".join(f"{metric(name).expression()} AS {name}_s" for name in ("ttft", "tpot", "e2e"))
_KEY: Final = ("request_id", "vantage", "attempt", "worker", "arrival_ns", "run_id")


@dataclass(frozen=True, slots=True)
class SpanPage:
    """An ExportTraceServiceRequest; num_rows: `request` rows in it; next_cursor: None on the last page."""

    body: bytes
    num_rows: int
    next_cursor: str | None


def span_page(store: Store, wanted: RequestFilter) -> SpanPage:
    """The spans of a page of requests, in order of arrival. Raises UsageError for a cursor that is not one of this order."""
    page = list_requests(store, replace(wanted, sort="arrival", descending=False))
    keys = {_key(row) for row in page.rows}
    condition, params = window_sql(wanted.window, "arrival_ns")
    sql = f"SELECT * EXCLUDE (received_ns), {_METRICS} FROM request WHERE {condition} AND request_id IN (SELECT unnest(?)) ORDER BY arrival_ns"
    rows = json_objects(store.query(sql, [*params, [row["request_id"] for row in page.rows]])) if keys else []
    told = [row for row in rows if _key(row) in keys]
    return SpanPage(export_request(told).SerializeToString(), len(told), page.next_cursor)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)
