"""Names that a pattern chooses: what a dashboard's variable becomes in the queries of its tables.

A pattern is matched as Prometheus matches a label: as a whole, by RE2 (so that no pattern takes long), and a name that nobody told is
the empty one. The database does it, for there is no RE2 in Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

from fastapi import Query

from engine_probe.errors import StoreError, UsageError
from store.interface import Store

ALL: Final = ".*"
COLUMNS: Final = ("worker", "model", "tenant")
"""Columns of `request` that a dashboard lets people choose from; a parameter is called `COLUMN_matches`."""
PatternText = Annotated[
    str | None,
    Query(
        max_length=10_000,
        description="RE2 pattern that the whole name must match, as a label's in PromQL; a name that is not told is empty",
        examples=[".*"],
    ),
]


def matching(store: Store, pattern: str | None, names: Iterable[str]) -> set[str]:
    """Those of the names that the pattern chooses; all of them where there is none. Raises UsageError for a pattern that is none."""
    found = set(names)
    if pattern is None or pattern == ALL:
        return found
    sql = "SELECT name FROM (SELECT unnest(?::VARCHAR[]) AS name) WHERE regexp_full_match(name, ?)"
    return {row["name"] for row in _tried(store, pattern, sql, [sorted(found | {""}), pattern])} & found


def check_pattern(store: Store, pattern: str) -> None:
    """Raises UsageError for a pattern that is none."""
    _tried(store, pattern, "SELECT regexp_full_match('', ?) AS found", [pattern])


def _tried(store: Store, pattern: str, sql: str, params: list[object]) -> list[dict[str, str]]:
    try:
        found: list[dict[str, str]] = store.query(sql, params).to_pylist()
    except StoreError as error:
        if error.facts.get("error") != "InvalidInputException":
            raise
        raise UsageError(
            f"{pattern[:100]!r} is no pattern: {error.message}; give one that RE2 reads, such as (w0|w1)",
            pattern=pattern[:100],
        ) from error
    return found
