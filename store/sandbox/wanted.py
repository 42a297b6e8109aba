"""Which rows of a kind a statement can need: said by the child as JSON, made into a SELECT by the collector.

Invariant: what a child says is data. Every name is one that there is, every word is from a list, every value fits its column
and is written by us; what is not so raises ValueError before anything of it is SQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine_probe.events import KINDS

Condition = tuple[str, str, int | str | list[int | str] | None]

OPERATORS: Final = ("=", "<>", ">", ">=", "<", "<=")
NULLS: Final = ("IS NULL", "IS NOT NULL")
DIRECTIONS: Final = ("", "ASC", "DESC")
NULL_ORDERS: Final = ("", "NULLS FIRST", "NULLS LAST")
MOST_CONDITIONS: Final = 100
MOST_VALUES: Final = 10_000
"""Of all conditions together: each takes DuckDB some microseconds to read."""
MOST_ROWS: Final = 2**63 - 1
_RANGES: Final = {"int64": range(-(2**63), 2**63), "uint64": range(2**64)}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows of a kind that a statement can need.

    columns   None: all
    where     all of them hold: (column, operator, value); IS NULL and IS NOT NULL have the value None, IN has a list
    order     (column, ASC | DESC | "", NULLS FIRST | NULLS LAST | "") of the first `limit` rows
    limit     None: all
    """

    columns: Sequence[str] | None = None
    where: Sequence[Condition] = ()
    order: Sequence[tuple[str, str, str]] = ()
    limit: int | None = None

    def sql(self, kind: str, types: Mapping[str, str], more: Sequence[str] = ()) -> str:
        """The SELECT; `types` are the columns that there are, `more` further conditions of ours.

        Raises ValueError for what no statement of ours would say: it may come from a process that a person's text has broken.
        """
        if len(self.where) > MOST_CONDITIONS or sum(num_values(one) for one in self.where) > MOST_VALUES:
            raise ValueError(f"more than {MOST_CONDITIONS} conditions, or {MOST_VALUES} values in them")
        conditions = [*more, *(_condition(column, operator, value, types) for column, operator, value in self.where)]
        text = f'SELECT {_columns(self.columns, types)} FROM "{kind}"'
        if conditions:
            text += " WHERE " + " AND ".join(conditions)
        if self.limit is None:
            return text
        if self.order:
            _distinct([column for column, *_ in self.order])
            text += " ORDER BY " + ", ".join(_order(*one, types=types) for one in self.order)
        if isinstance(self.limit, bool) or not 0 <= self.limit <= MOST_ROWS:
            raise ValueError(f"a limit of {self.limit!r}")
        return f"{text} LIMIT {self.limit}"


def column_types(kind: str) -> dict[str, str]:
    """Column -> type of the contract, with the two that the store adds."""
    return {column.name: column.type for column in KINDS[kind]} | {"source": "string", "received_ns": "int64"}


def fits(value: Any, type_name: str) -> bool:
    """Whether a value is one that a column of the type can have, so that it is compared as one of that type."""
    if type_name == "string":
        return isinstance(value, str) and "\0" not in value
    return isinstance(value, int) and not isinstance(value, bool) and value in _RANGES.get(type_name, ())


def num_values(condition: Condition) -> int:
    """How many values a condition has."""
    return len(condition[2]) if isinstance(condition[2], list) else 1


def _columns(columns: Sequence[str] | None, types: Mapping[str, str]) -> str:
    if columns is None:
        return "*"
    if not columns:
        raise ValueError("no column is wanted")
    _distinct(columns)
    return ", ".join(_column(name, types) for name in columns)


def _distinct(columns: Sequence[str]) -> None:
    if len(set(columns)) < len(columns):
        raise ValueError("a column is named twice")


def _column(name: str, types: Mapping[str, str]) -> str:
    if name not in types:
        raise ValueError(f"there is no column {name!r}")
    return f'"{name}"'


def _condition(column: str, operator: str, value: Any, types: Mapping[str, str]) -> str:
    quoted = _column(column, types)
    if operator in NULLS and value is None:
        return f"{quoted} {operator}"
    values = value if operator == "IN" and isinstance(value, list) else [value]
    if operator not in ("IN", *OPERATORS) or not values or not all(fits(one, types[column]) for one in values):
        raise ValueError(f"the condition {column} {operator} {value!r}"[:200])
    texts = [str(one) if isinstance(one, int) else "'" + one.replace("'", "''") + "'" for one in values]
    return f"{quoted} IN ({', '.join(texts)})" if operator == "IN" else f"{quoted} {operator} {texts[0]}"


def _order(column: str, direction: str, nulls: str, types: Mapping[str, str]) -> str:
    if direction not in DIRECTIONS or nulls not in NULL_ORDERS:
        raise ValueError(f"the order {column} {direction} {nulls}"[:200])
    return " ".join(part for part in (_column(column, types), direction, nulls) if part)
