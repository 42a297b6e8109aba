"""What the questions share: a window and grouping columns as SQL text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from engine_probe.errors import UsageError
from engine_probe.events import KINDS
from store.interface import Store, Window
from store.statements import instant_column

NS_PER_S: Final = 1_000_000_000


def in_window(kind: str, window: Window, alias: str = "") -> tuple[str, list[Any]]:
    """(condition, parameters) that keep the rows of `kind` in the window."""
    r = f"{alias}." if alias else ""
    column = instant_column(kind)
    parts = [f"{r}run_id IS NULL"] if window.run_id is None else [f"{r}run_id = ?"]
    params: list[Any] = [] if window.run_id is None else [window.run_id]
    if window.start_ns is not None:
        parts.append(f"{r}{column} >= ?")
        params.append(window.start_ns)
    if window.end_ns is not None:
        parts.append(f"{r}{column} < ?")
        params.append(window.end_ns)
    return " AND ".join(parts), params


def sample_rates(store: Store, rows: str, params: Sequence[Any]) -> tuple[float | None, bool]:
    """(lowest share kept of what these rows stand for, None where all were kept; whether their rates differ).

    rows   "TABLE WHERE condition" or "(SELECT ...)"; it must have `sample_rate`
    """
    found = store.query(f"SELECT min(sample_rate), max(coalesce(sample_rate, 1.0)) FROM {rows}", params)
    lowest, highest = (column[0].as_py() for column in found.columns)
    return lowest, lowest is not None and lowest < highest


def grouping(kind: str, by: Sequence[str]) -> list[str]:
    """The columns to group by, each a text column of the kind; UsageError names what there is."""
    texts = [column.name for column in KINDS[kind] if column.type == "string" and column.name != "run_id"]
    for name in by:
        if name not in texts:
            raise UsageError(f"{kind} rows cannot be grouped by {name!r}. Group by {', '.join(texts)}.")
    return list(dict.fromkeys(by))


def bucket_sql(kind: str, bucket_s: float, alias: str = "") -> str:
    """Start of the bucket of a row (ns), buckets counted from 1970; UsageError for a bucket below a millisecond."""
    width = round(bucket_s * NS_PER_S)
    if width < 1_000_000:
        raise UsageError(f"A bucket of {bucket_s} s is too narrow. Use at least 0.001 s.")
    r = f"{alias}." if alias else ""
    return f"({r}{instant_column(kind)} // {width} * {width})"
