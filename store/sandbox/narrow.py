"""Which of a kind's rows a statement can need at all, so that the rows in no sealed file are not copied whole.

Idea: where one table is read, once, a row that the WHERE clause drops is dropped by its first condition that fails; and of rows
that are only listed, in no order or in that of columns, the first n of all are among the first n of each part.

Invariant: what is kept is a superset. Whatever is not understood narrows nothing, and the statement itself runs on what is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from engine_probe.events import KINDS

if TYPE_CHECKING:
    import duckdb

NOW_SLACK_NS: Final = 600 * 10**9
"""A bound that holds now() is looser by so much: it is worked out a moment before the statement runs."""

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
_NOW: Final = frozenset(["now", "get_current_timestamp", "current_timestamp", "transaction_timestamp"])
_COMPUTES: Final = (
    frozenset(["epoch_ns", "+", "-", "*", "trunc", "to_seconds", "to_minutes", "to_hours", "to_days"]) | _NOW
)
_CONSTANTS: Final = frozenset(["TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UINTEGER", "UBIGINT", "VARCHAR"])


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows of a kind that a statement can need.

    columns   None: all
    where     all of them hold: (column, operator, value); IS NULL and IS NOT NULL have the value None, IN has a list
    order     (column, ASC | DESC | "", NULLS FIRST | NULLS LAST | "") of the first `limit` rows
    limit     None: all
    """

    columns: Sequence[str] | None = None
    where: Sequence[tuple[str, str, Any]] = ()
    order: Sequence[tuple[str, str, str]] = ()
    limit: int | None = None

    def document(self) -> dict[str, Any]:
        """As JSON, for `wanted_of`."""
        return asdict(self)

    def sql(self, kind: str, types: Mapping[str, str], more: Sequence[str] = ()) -> str:
        """The SELECT; `types` are the columns that there are, `more` further conditions of ours.

        Raises ValueError for what no statement of ours would say: it may come from a process that a person's text has broken.
        """
        some = "*" if self.columns is None else ", ".join(_column(name, types) for name in self.columns)
        conditions = [*more, *(_condition(column, operator, value, types) for column, operator, value in self.where)]
        text = f'SELECT {some} FROM "{kind}"'
        if conditions:
            text += " WHERE " + " AND ".join(conditions)
        if self.limit is None:
            return text
        if self.order:
            text += " ORDER BY " + ", ".join(_order(*one, types=types) for one in self.order)
        if not isinstance(self.limit, int) or isinstance(self.limit, bool) or self.limit < 0:
            raise ValueError(f"a limit of {self.limit!r}")
        return f"{text} LIMIT {self.limit}"


def column_types(kind: str) -> dict[str, str]:
    """Column -> type of the contract, with the two that the store adds."""
    return {column.name: column.type for column in KINDS[kind]} | {"source": "string", "received_ns": "int64"}


def wanted_of(document: Mapping[str, Any]) -> Wanted:
    """From `Wanted.document`. Raises ValueError for another document."""
    try:
        return Wanted(**document)
    except TypeError as error:
        raise ValueError(f"no rows are wanted like this: {error}") from None


def narrow(
    connection: duckdb.DuckDBPyConnection,
    statement: Mapping[str, Any],
    kinds: Mapping[str, Mapping[str, str]],
    max_rows: int,
) -> dict[str, Wanted]:
    """Kind -> what this statement can need of it, columns left open; empty where nothing can be told.

    kinds      kind -> column -> type, as `column_types`
    max_rows   the answer has no more (one more tells that it was cut)
    """
    node = statement["node"]
    tables = [one for one in _nodes(node) if one.get("type") in ("BASE_TABLE", "TABLE_FUNCTION", "SHOW_REF", "PIVOT")]
    table = node.get("from_table") or {}
    kind = str(table.get("table_name", "")).lower()
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
    understood = [reader.conditions(part) for part in _conjuncts(node["where_clause"])]
    where = [one for conditions, _ in understood for one in conditions]
    is_exact = all(exact for _, exact in understood)
    order, limit = _first_rows(node, kinds[kind], max_rows) if is_exact else ((), None)
    return {kind: Wanted(None, where, order, limit)}


class _Reader:
    """Conditions out of a parse tree, on columns of these types."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, types: Mapping[str, str]) -> None:
        self._connection, self._types = connection, types

    def conditions(self, part: Mapping[str, Any]) -> tuple[list[tuple[str, str, Any]], bool]:
        """(conditions that hold where the part does, whether they say all that the part says)."""
        kind, children = part["type"], part.get("children", ())
        if kind in OPERATORS:
            return self._compared(part["left"], OPERATORS[kind], part["right"])
        if kind == "COMPARE_BETWEEN":
            low, low_exact = self._compared(part["input"], ">=", part["lower"])
            high, high_exact = self._compared(part["input"], "<=", part["upper"])
            return low + high, low_exact and high_exact
        if kind in _NULLS and (column := self._column(children[0])) is not None:
            return [(column, _NULLS[kind], None)], True
        if kind == "COMPARE_IN" and (column := self._column(children[0])) is not None:
            values = [self._value(column, child) for child in children[1:]]
            if all(value is not None and exact for value, exact in values):
                return [(column, "IN", [value for value, _ in values])], True
        return [], False

    def _compared(
        self, left: Mapping[str, Any], operator: str, right: Mapping[str, Any]
    ) -> tuple[list[tuple[str, str, Any]], bool]:
        column = self._column(left)
        if column is None:
            column, right, operator = self._column(right), left, _TURNED[operator]
        if column is None:
            return [], False
        value, exact = self._value(column, right)
        if value is None or (not exact and operator in ("=", "<>")):
            return [], False
        if not exact:
            value += NOW_SLACK_NS if operator in ("<", "<=") else -NOW_SLACK_NS
        return [(column, operator, value)], exact

    def _column(self, part: Mapping[str, Any]) -> str | None:
        if part.get("class") != "COLUMN_REF" or len(part["column_names"]) != 1:
            return None
        name = str(part["column_names"][0]).lower()
        return name if name in self._types else None

    def _value(self, column: str, part: Mapping[str, Any]) -> tuple[Any, bool]:
        """(what a part without columns comes to, None where that cannot be told; whether it will be the same a moment later)."""
        value: Any = None
        exact = True
        if part.get("class") == "CONSTANT":
            value = part["value"].get("value") if part["value"]["type"]["id"] in _CONSTANTS else None
        elif self._types[column] == "int64" and _is_computed(part):
            value, exact = self._computed(part), not _holds_now(part)
        return (value, exact) if _fits(value, self._types[column]) else (None, exact)

    def _computed(self, part: Mapping[str, Any]) -> Any:
        import duckdb

        tree = json.loads((self._connection.execute("SELECT json_serialize_sql('SELECT 1')").fetchone() or ("",))[0])
        tree["statements"][0]["node"]["select_list"] = [part]
        try:
            (text,) = self._connection.execute("SELECT json_deserialize_sql(?)", [json.dumps(tree)]).fetchone() or ("",)
            return (self._connection.execute(text).fetchone() or (None,))[0]
        except duckdb.Error:
            return None  # the statement will say so itself


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
    order = []
    aliases = {str(one["alias"]).lower() for one in node["select_list"]}
    for one in modifiers.get("ORDER_MODIFIER", {}).get("orders", ()):
        by = one["expression"]
        name = str(by["column_names"][0]).lower() if by["class"] == "COLUMN_REF" else ""
        if name not in types or len(by["column_names"]) != 1 or name in aliases:
            return [], None
        order.append((name, _DIRECTIONS[one["type"]], _NULL_ORDERS[one["null_order"]]))
    return order, limit + offset


def _whole(part: Mapping[str, Any] | None, default: int) -> int | None:
    """A whole number of the text; `default` where there is none, None where it is something else."""
    if part is None:
        return default
    value = part["value"].get("value") if part["class"] == "CONSTANT" else None
    return value if isinstance(value, int) and value >= 0 else None


def _is_computed(part: Mapping[str, Any]) -> bool:
    """Only constants, and functions that give the same for them, but for one now() that is neither doubled nor scaled."""
    nows = 0
    for one in _nodes(part):
        if "class" not in one:
            continue
        name = str(one.get("function_name", "")).lower()
        if one["class"] not in ("CONSTANT", "CAST", "FUNCTION") or (
            one["class"] == "FUNCTION" and name not in _COMPUTES
        ):
            return False
        if name == "*" and _holds_now(one):
            return False
        nows += name in _NOW
    return nows <= 1


def _holds_now(part: Mapping[str, Any]) -> bool:
    return any(str(one.get("function_name", "")).lower() in _NOW for one in _nodes(part))


def _fits(value: Any, type_name: str) -> bool:
    if type_name == "string":
        return isinstance(value, str) and "\0" not in value
    return type_name in ("int64", "uint64") and isinstance(value, int) and not isinstance(value, bool)


def _column(name: str, types: Mapping[str, str]) -> str:
    if name not in types:
        raise ValueError(f"there is no column {name!r}")
    return f'"{name}"'


def _condition(column: str, operator: str, value: Any, types: Mapping[str, str]) -> str:
    quoted = _column(column, types)
    if operator in _NULLS.values() and value is None:
        return f"{quoted} {operator}"
    values = value if operator == "IN" and isinstance(value, list) else [value]
    if operator not in ("IN", *OPERATORS.values()) or not values or not all(_fits(v, types[column]) for v in values):
        raise ValueError(f"the condition {column} {operator} {value!r}")
    texts = [str(one) if isinstance(one, int) else "'" + one.replace("'", "''") + "'" for one in values]
    return f"{quoted} IN ({', '.join(texts)})" if operator == "IN" else f"{quoted} {operator} {texts[0]}"


def _order(column: str, direction: str, nulls: str, types: Mapping[str, str]) -> str:
    if direction not in _DIRECTIONS.values() or nulls not in _NULL_ORDERS.values():
        raise ValueError(f"the order {column} {direction} {nulls}")
    return " ".join(part for part in (_column(column, types), direction, nulls) if part)


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
