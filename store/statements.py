"""Statements composed with SQLAlchemy Core and rendered for DuckDB cursors, so that results stay Arrow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa
from duckdb_sqlalchemy import Dialect

from engine_probe.errors import StoreError, StoreMisuse
from store.interface import Window
from store.tables import TABLES

_DIALECT: Final = Dialect(paramstyle="numeric_dollar")


def render(statement: Any) -> tuple[str, list[Any]]:
    """SQL text with `$1, $2, ...` and the values in that order."""
    compiled = statement.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})
    values = compiled.params
    return str(compiled), [values[name] for name in compiled.positiontup or ()]


def literal(text: str) -> str:
    """The text as an SQL literal, for statements that take no parameters (COPY, ATTACH) or are slow with them."""
    return "'" + text.replace("'", "''") + "'"


def rows_of(type_name: str) -> str:
    """SQL of a column with a row for each item of a list, which is bound as one text (`one_text`).

    Of a list that is bound as it is DuckDB 1.x looks at every item whether some Python module made it, and for one that is not installed
    it searches the path anew each time: 100 us an item.
    """
    return f"unnest(from_json(?, '[\"{type_name}\"]'))"


def one_text(items: Sequence[object]) -> str:
    """The items as the parameter that `rows_of` takes: whole numbers of any size, or texts."""
    return json.dumps(list(items))


def can_be_literal(value: object) -> bool:
    """Whether a value can be written into a statement: whole numbers, and text that no NUL would cut off."""
    return isinstance(value, int) or (isinstance(value, str) and "\0" not in value)


def render_literal(expression: Any) -> str:
    """SQL text with the values written into it, for statements that take no parameters (COPY)."""
    return str(expression.compile(dialect=_DIALECT, compile_kwargs={"literal_binds": True}))


def create_statement(table: sa.Table) -> str:
    """`CREATE TABLE` text of a table of ours, ending in a semicolon."""
    text = str(sa.schema.CreateTable(table).compile(dialect=_DIALECT)).strip()
    lines = [line.rstrip().replace("\t", "    ").replace("UBigInt", "UBIGINT") for line in text.splitlines()]
    return "\n".join(line for line in lines if line) + ";\n"


def instant_column(kind: str) -> str:
    """The instant that places a row of `kind` in a window: a request belongs to its arrival, the rest to `at_ns`."""
    return "arrival_ns" if kind == "request" else "at_ns"


def in_window(kind: str, window: Window) -> list[sa.ColumnElement[bool]]:
    """Conditions that a row of `kind` is in the window."""
    columns = TABLES[kind].c
    instant = columns[instant_column(kind)]
    conditions = [columns.run_id.is_(None) if window.run_id is None else columns.run_id == window.run_id]
    if window.start_ns is not None:
        conditions.append(instant >= window.start_ns)
    if window.end_ns is not None:
        conditions.append(instant < window.end_ns)
    return conditions


def select_rows(
    kind: str,
    window: Window,
    columns: Sequence[str] | None,
    *,
    where: str | None = None,
    params: Sequence[Any] = (),
    order_by: str | None = None,
    limit: int | None = None,
) -> sa.Select[Any]:
    """Rows of one kind in a window; see `Store.rows`."""
    table = table_of(kind)
    if unknown := [name for name in columns or () if name not in table.c]:
        raise StoreMisuse(
            f"The kind {kind} has no column {', '.join(unknown)}. It has {', '.join(table.c.keys())}.", kind=kind
        )
    statement = sa.select(*(table.c[name] for name in columns or table.c.keys()[:-2])).where(*in_window(kind, window))
    if where is not None:
        statement = statement.where(own_text(f"({where})", params))
    if order_by is not None:
        statement = statement.order_by(sa.text(_escape(order_by)))
    if limit is not None:
        statement = statement.limit(limit)
    return statement


def table_of(kind: str) -> sa.Table:
    """Table of a kind; StoreMisuse naming the known kinds where there is none."""
    if kind not in TABLES:
        raise StoreMisuse(f"There is no kind {kind!r}. The kinds are {', '.join(TABLES)}.", kind=kind)
    return TABLES[kind]


def own_text(sql: str, params: Sequence[Any]) -> sa.TextClause:
    """Our own SQL text whose `?` take `params` in order; `?` inside quotes stays a character."""
    pieces: list[str] = []
    names: list[str] = []
    quote = ""
    for character in sql:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "?":
            names.append(f"own_{len(names)}")
            pieces.append(f":{names[-1]}")
            continue
        pieces.append("\\:" if character == ":" else character)
    if len(names) != len(params):
        raise StoreError(f"The text {sql!r} has {len(names)} question marks for {len(params)} values.")
    return sa.text("".join(pieces)).bindparams(**dict(zip(names, params, strict=True)))


def _escape(sql: str) -> str:
    return sql.replace(":", "\\:")
