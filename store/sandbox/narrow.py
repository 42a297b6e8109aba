"""Which of a kind's rows a statement can need at all, so that the rows in no sealed file are not copied whole.

Idea: where one table is read, once, a row that the WHERE clause drops is dropped by its first condition that fails; and of rows
that are only listed, in no order or in that of columns, the first n of all are among the first n of each part.

Invariant: what is kept is a superset. Whatever is not understood narrows nothing, and the statement itself runs on what is kept.
now() is the begin of a transaction: what is worked out here is the same in a statement that runs in the same one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from store.sandbox.check import nodes
from store.sandbox.wanted import MOST_CONDITIONS, MOST_ROWS, MOST_VALUES, Condition, Wanted, fits, num_values

if TYPE_CHECKING:
    import duckdb

OPERATORS: Final = {
    "COMPARE_EQUAL": "=",
    "COMPARE_NOTEQUAL": "<>",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
}
_TURNED: Final = {"=": "=", "<>": "<>", ">": "<", ">=": "<=", "<": ">", "<=": ">="}
_NULLS: Final = {"OPERATOR_IS_NULL": "IS NULL", "OPERATOR_IS_NOT_NULL": "IS NOT NULL"}
_DIRECTIONS: Final = {"ORDER_DEFAULT": "", "ASCENDING": "ASC", "DESCENDING": "DESC"}
_NULL_ORDERS: Final = {"ORDER_DEFAULT": "", "NULLS FIRST": "NULLS FIRST", "NULLS LAST": "NULLS LAST"}
_COMPUTES: Final = frozenset(
    [
        *("+", "-", "*", "trunc", "epoch_ns", "to_seconds", "to_minutes", "to_hours", "to_days", "date_trunc"),
        *("now", "get_current_timestamp", "transaction_timestamp", "today"),
    ]
)
"""Functions that give the same for the same constants, within a transaction."""
_CONSTANTS: Final = frozenset(["TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UINTEGER", "UBIGINT", "VARCHAR"])
"""Types of constants that are the same once they were written as text: a DOUBLE would be read as a DECIMAL."""
MOST_COMPUTED: Final = 50
"""Of a statement: each takes a millisecond."""


class _Unclear(Exception):
    """What a statement compares with cannot be worked out; the statement will say so itself."""


def narrow(
    connection: duckdb.DuckDBPyConnection,
    statement: Mapping[str, Any],
    kinds: Mapping[str, Mapping[str, str]],
    max_rows: int,
) -> dict[str, Wanted]:
    """Kind -> what this statement can need of it, columns left open; empty where nothing can be told.

    connection   in the transaction in which the statement will run; in a new one where something could not be worked out
    kinds        kind -> column -> type, as `column_types`
    max_rows     the answer has no more (one more tells that it was cut)
    """
    node = statement["node"]
    tables = [one for one in nodes(node) if one.get("type") in ("BASE_TABLE", "TABLE_FUNCTION", "SHOW_REF", "PIVOT")]
    table = node.get("from_table") or {}
    kind = _lower(table.get("table_name", ""))
    plain = (
        node.get("type") == "SELECT_NODE"
        and len(tables) == 1
        and table.get("type") == "BASE_TABLE"
        and kind in kinds
        and not node["cte_map"]["map"]
        and not any((table["sample"], node["sample"], table["column_name_alias"], table["schema_name"]))
    )
    if not plain:
        return {}
    reader = _Reader(connection, kinds[kind])
    try:
        where, is_exact = reader.all_of(node["where_clause"])
    except _Unclear:
        connection.execute("ROLLBACK")  # the error has ended it
        connection.execute("BEGIN TRANSACTION")
        return {}
    order, limit = _first_rows(node, kinds[kind], max_rows) if is_exact else ((), None)
    return {kind: Wanted(None, where, order, limit)}


class _Reader:
    """Conditions out of a parse tree, on columns of these types."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, types: Mapping[str, str]) -> None:
        self._connection, self._types = connection, types
        self._num_computed = 0

    def all_of(self, clause: Mapping[str, Any] | None) -> tuple[list[Condition], bool]:
        """(conditions that hold where the WHERE clause does, whether they say all that it says). Raises _Unclear."""
        found: list[Condition] = []
        values, is_exact = 0, True
        for part in _conjuncts(clause):
            conditions = self._conditions(part)
            values += sum(num_values(one) for one in conditions or ())
            if conditions is None or len(found) + len(conditions) > MOST_CONDITIONS or values > MOST_VALUES:
                is_exact = False
            else:
                found += conditions
        return found, is_exact

    def _conditions(self, part: Mapping[str, Any]) -> list[Condition] | None:
        """Conditions that say what this part says; None where there are none."""
        kind, children = part["type"], part.get("children", ())
        if kind in OPERATORS:
            return self._compared(part["left"], OPERATORS[kind], part["right"])
        if kind == "COMPARE_BETWEEN":  # all three are compared in one type: one bound alone says nothing
            low = self._compared(part["input"], ">=", part["lower"])
            high = self._compared(part["input"], "<=", part["upper"])
            return None if low is None or high is None else low + high
        if kind in _NULLS and (column := self._column(children[0])) is not None:
            return [(column, _NULLS[kind], None)]
        if kind == "COMPARE_IN" and (column := self._column(children[0])) is not None:
            if len(children) > MOST_VALUES:
                return None
            values = [self._value(column, child) for child in children[1:]]
            return None if None in values else [(column, "IN", [one for one in values if one is not None])]
        return None

    def _compared(self, left: Mapping[str, Any], operator: str, right: Mapping[str, Any]) -> list[Condition] | None:
        column = self._column(left)
        if column is None:
            column, right, operator = self._column(right), left, _TURNED[operator]
        value = None if column is None else self._value(column, right)
        return None if column is None or value is None else [(column, operator, value)]

    def _column(self, part: Mapping[str, Any]) -> str | None:
        if part.get("class") != "COLUMN_REF" or len(part["column_names"]) != 1:
            return None
        name = _lower(part["column_names"][0])
        return name if name in self._types else None

    def _value(self, column: str, part: Mapping[str, Any]) -> int | str | None:
        """What a part without columns comes to, where it is a value of that column; else None."""
        value: Any = None
        if part.get("class") == "CONSTANT":
            value = part["value"].get("value") if part["value"]["type"]["id"] in _CONSTANTS else None
        elif self._types[column] == "int64" and self._num_computed < MOST_COMPUTED and _is_computed(part):
            self._num_computed += 1
            value = self._computed(part)
        return value if fits(value, self._types[column]) else None

    def _computed(self, part: Mapping[str, Any]) -> Any:
        import duckdb

        try:
            (empty,) = self._connection.execute("SELECT json_serialize_sql('SELECT 1')").fetchone() or ("",)
            tree = json.loads(empty)
            tree["statements"][0]["node"]["select_list"] = [part]
            (text,) = self._connection.execute("SELECT json_deserialize_sql(?)", [json.dumps(tree)]).fetchone() or ("",)
            return (self._connection.execute(text).fetchone() or (None,))[0]
        except duckdb.Error as error:
            raise _Unclear from error


def _conjuncts(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "CONJUNCTION_AND":
        for child in part["children"]:
            yield from _conjuncts(child)
    else:
        yield part


def _first_rows(
    node: Mapping[str, Any], types: Mapping[str, str], max_rows: int
) -> tuple[list[tuple[str, str, str]], int | None]:
    """(order, limit) where rows are only listed; else ((), None)."""
    listed = all(
        (one["class"] == "COLUMN_REF")
        or (one["class"] == "STAR" and not one["columns"] and not one["replace_list"] and not one["rename_list"])
        for one in node["select_list"]
    )
    groups = node["group_expressions"] or node["group_sets"] or node["having"] or node["qualify"]
    modifiers = {one["type"]: one for one in node["modifiers"]}
    if not listed or groups or node["aggregate_handling"] != "STANDARD_HANDLING":
        return [], None
    if set(modifiers) - {"ORDER_MODIFIER", "LIMIT_MODIFIER"} or len(modifiers) < len(node["modifiers"]):
        return [], None
    limit, offset = max_rows + 1, 0
    if "LIMIT_MODIFIER" in modifiers:
        asked = [
            _whole(modifiers["LIMIT_MODIFIER"][part], default) for part, default in (("limit", limit), ("offset", 0))
        ]
        if None in asked:
            return [], None
        limit, offset = min(limit, asked[0] or 0), asked[1] or 0
    if limit + offset > MOST_ROWS:
        return [], None
    order = []
    aliases = {_lower(one["alias"]) for one in node["select_list"]}
    for one in modifiers.get("ORDER_MODIFIER", {}).get("orders", ()):
        by = one["expression"]
        name = _lower(by["column_names"][0]) if by["class"] == "COLUMN_REF" else ""
        if name not in types or len(by["column_names"]) != 1 or name in aliases:
            return [], None
        order.append((name, _DIRECTIONS[one["type"]], _NULL_ORDERS[one["null_order"]]))
    names = [name for name, *_ in order]
    return [one for at, one in enumerate(order) if one[0] not in names[:at]], limit + offset


def _whole(part: Mapping[str, Any] | None, default: int) -> int | None:
    """A whole number of the text; `default` where there is none, None where it is something else."""
    if part is None:
        return default
    if part["class"] != "CONSTANT" or part["value"]["type"]["id"] not in _CONSTANTS:
        return None  # the digits of a DECIMAL are a whole number too, but another one
    value = part["value"].get("value")
    return value if fits(value, "int64") and value >= 0 else None


def _is_computed(part: Mapping[str, Any]) -> bool:
    """Only constants that keep their type as text, and functions that give the same for them."""
    for one in nodes(part):
        if one.get("class") == "CONSTANT":
            if one["value"]["type"]["id"] not in _CONSTANTS:
                return False
        elif one.get("class") == "FUNCTION":
            if str(one["function_name"]).lower() not in _COMPUTES:
                return False
        elif one.get("class", "CAST") != "CAST":
            return False
    return True


def _lower(name: Any) -> str:
    """As DuckDB compares names: letters beyond ASCII are as they are."""
    text = str(name)
    return text.lower() if text.isascii() else text
