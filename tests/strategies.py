"""Hypothesis strategies of rows and tables of every kind, derived from `events.py`: a new column is tested at once.

What they make is valid: it passes `validate`. Break it on purpose in the test that wants it broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from engine_probe.events import KINDS, Column
from engine_probe.schema import table_from_rows

NOW_NS = 1_764_000_000 * 10**9
"""2025-11-24T16:00:00Z: the present of generated rows."""

INSTANTS = st.integers(NOW_NS - 10**15, NOW_NS)
TEXTS = st.text(max_size=12)


def values(column: Column) -> st.SearchStrategy[Any]:
    """Valid values of one column, never None."""
    if column.choices:
        return st.sampled_from(column.choices)
    if column.type == "string" and (column.required or column.name == "run_id"):
        return st.text(min_size=1, max_size=12)
    if column.type == "list<struct>":
        return st.lists(_struct(column), max_size=3)
    if column.type == "struct":
        return _struct(column)
    if column.type == "map<string,string>":
        return st.dictionaries(TEXTS, TEXTS, max_size=3)
    if column.type.startswith("list<"):
        entries = _scalars(column, column.name, column.type[5:-1])
        lists = st.lists(entries, max_size=4)
        return lists.map(sorted) if column.name == "token_ns" else lists
    return _scalars(column, column.name, column.type)


@st.composite
def rows(draw: st.DrawFn, kind: str, max_columns: int = 8) -> dict[str, Any]:
    """A row: every required column and a few others; absent keys are unknown."""
    optional = [column for column in KINDS[kind] if not column.required]
    some = draw(st.sets(st.sampled_from(optional), max_size=max_columns))
    row = {c.name: draw(values(c)) for c in KINDS[kind] if c.required or c in some}
    if "token_counts" in row:
        row["token_ns"] = row.get("token_ns", [])
        row["token_counts"] = [draw(st.integers(1, 4)) for _ in row["token_ns"]]
    return row


def tables(kind: str, min_rows: int = 0, max_rows: int = 6) -> st.SearchStrategy[pa.Table]:
    """An Arrow table of one kind."""
    return st.lists(rows(kind), min_size=min_rows, max_size=max_rows).map(lambda made: table_from_rows(kind, made))


def batches(max_rows: int = 4) -> st.SearchStrategy[Mapping[str, pa.Table]]:
    """Tables of several kinds, as one batch carries them."""
    kinds = st.sets(st.sampled_from(list(KINDS)), min_size=1, max_size=4)
    return kinds.flatmap(lambda some: st.fixed_dictionaries({k: tables(k, 1, max_rows) for k in KINDS if k in some}))


def _struct(column: Column) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: st.none() | _scalars(column, name, type_) for name, type_ in column.fields}
    made = st.fixed_dictionaries(fields)
    return made.map(_in_order) if "start_ns" in fields else made


def _in_order(span: dict[str, Any]) -> dict[str, Any]:
    if span["start_ns"] is not None and span["end_ns"] is not None:
        span["start_ns"], span["end_ns"] = sorted((span["start_ns"], span["end_ns"]))
    return span


def _scalars(column: Column, name: str, type_: str) -> st.SearchStrategy[Any]:
    if type_ == "string":
        return TEXTS
    if type_ == "bool":
        return st.booleans()
    if type_ == "uint64":
        return st.integers(0, 2**64 - 1)
    if type_ == "int64":
        if name.endswith("_ns"):
            return INSTANTS
        return st.integers(-(2**63), 2**63 - 1) if column.signed else st.integers(0, 2**63 - 1)
    if column.signed:
        return st.floats(allow_nan=False, allow_infinity=False)
    if column.unit == "ratio 0..1":
        return st.floats(0, 1, exclude_min=name == "sample_rate")
    return st.floats(0, 1e9)
