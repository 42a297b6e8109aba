"""The requests of a window that are judged: one row each, in order of arrival, without those of the warm-up."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from diagnosis.loading.requests import COLUMNS, in_arrival_order, is_warmup, told_twice
from diagnosis.windows import holds_nothing, shown
from engine_probe.errors import BadWindow
from store.evidence.lineage import window_sql
from store.evidence.one_request import one_requests
from store.interface import Store, Window


def judged_requests(store: Store, window: Window, name: str, vantage: str) -> tuple[pa.Table, int, int]:
    """(the window's requests in arrival order, one row each and without warm-up; rows merged into others; warm-up requests)."""
    columns = [*COLUMNS, "prompt_blocks"]
    table = in_arrival_order(store.rows("request", window, columns, where="vantage = ?", params=[vantage]))
    delivered = table.num_rows
    if told_twice(table):
        table = merged_rows(store, window, vantage, columns, "arrival_ns, request_id")
    num_again = delivered - table.num_rows
    warm = is_warmup(table)
    num_warmup = int(warm.sum())
    table = table.filter(pa.array(~warm)) if num_warmup else table
    if table.num_rows == 0:
        extra = f" ({num_warmup} warm-up requests are left out)" if num_warmup else ""
        raise BadWindow(
            holds_nothing(store, window, f"window {name} ({shown(window)}) holds no {vantage} requests{extra}"),
            window=str(window),
        )
    return table, num_again, num_warmup


def merged_rows(store: Store, window: Window, vantage: str, columns: Sequence[str], order_by: str) -> pa.Table:
    """The window's requests of this vantage, the rows of one request merged into one."""
    condition, params = window_sql(window, "arrival_ns")
    return one_requests(store, f"{condition} AND vantage = ?", [*params, vantage], columns, order_by=order_by)
