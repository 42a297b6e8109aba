"""Is this text one harmless SELECT (or an EXPLAIN of one)? Answered by DuckDB's own parser, inside the jailed child.

Idea: `json_serialize_sql` parses with the parser that will execute the text and serialises SELECT statements alone, so
every other statement is refused by construction. The tree is then walked: a table function must be on a short list,
a table's name must not be a path, a scalar function must not tell about the process.

Invariant: nothing is executed here, and the text that is executed is the text that was checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import duckdb

MAX_SQL_BYTES: Final = 256 * 1024

TABLE_FUNCTIONS: Final = frozenset(
    [
        "range",
        "generate_series",
        "unnest",
        "repeat",
        "repeat_row",
        "json_each",
        "json_tree",
        "histogram",
        "histogram_values",
        "summary",
        "duckdb_tables",
        "duckdb_views",
        "duckdb_columns",
        "duckdb_functions",
        "duckdb_types",
        "duckdb_keywords",
        "icu_calendar_names",
        "pg_timezone_names",
    ]
)
"""Table functions that only compute, or describe the tables. Everything else reads files or changes something."""

SCALARS_REFUSED: Final = frozenset(
    [
        "getenv",
        "current_setting",
        "write_log",
        "pg_sleep",
        "sleep_ms",
        "json_execute_serialized_sql",
        "nextval",
        "currval",
    ]
)
"""Scalar functions that tell about the process, write a log, or only waste time."""

TABLES_REFUSED: Final = frozenset(
    ["pg_settings", "duckdb_databases", "pragma_database_list", "duckdb_logs", "pg_prepared_statements"]
)
"""DuckDB's own views that tell about the process: its settings, with the folder that it may read, and its files."""

SHOW_TABLES: Final = """SELECT view_name AS name, comment AS one_row_is FROM duckdb_views()
WHERE database_name = current_database() AND NOT internal AND NOT temporary ORDER BY name"""
"""What SHOW TABLES runs as: DuckDB's own form would list our helpers too."""

_STATEMENT_HINT: Final = {
    "PRAGMA": "DESCRIBE and SHOW TABLES tell about the tables",
    "CALL": "DESCRIBE and SHOW TABLES tell about the tables",
    "COPY": "take the result with `--format csv|parquet -o FILE`",
    "EXPORT": "take the data with `kvscope store export`",
    "CREATE": "put the intermediate result into a WITH clause",
    "SET": "settings are fixed here",
    "ATTACH": "the tables of this store are there already",
    "LOAD": "extensions cannot be loaded here",
}
_AROUND_TABLES: Final = frozenset(["main", "memory", "temp"])
"""The schema and the databases of a child: `main.request` is a whole row as `request` is."""
_EXPLAIN = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*explain\b", re.IGNORECASE | re.DOTALL)
_OPTION = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*(?P<word>analyze\b|analyse\b|\()", re.IGNORECASE | re.DOTALL)


class Refused(Exception):
    """The text is not allowed, or not SQL. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What a SELECT reads, in lower case: names of tables, and names that may be their columns (None: all columns).

    catalog   it asks which tables and columns there are, so all of them must be there
    """

    tables: frozenset[str]
    columns: frozenset[str] | None
    catalog: bool = False

    def __or__(self, other: Reads) -> Reads:
        every = self.columns is None or other.columns is None
        columns = None if every else (self.columns or frozenset()) | (other.columns or frozenset())
        return Reads(self.tables | other.tables, columns, self.catalog or other.catalog)


@dataclass(frozen=True, slots=True)
class Checked:
    """A text that may run, what it reads, and its parse tree."""

    sql: str
    reads: Reads
    explain: bool
    statement: dict[str, Any]


def check(connection: duckdb.DuckDBPyConnection, sql: str) -> Checked:
    """Raises Refused unless `sql` is one SELECT (FROM, VALUES, TABLE, DESCRIBE, SHOW, SUMMARIZE) or EXPLAIN of one."""
    if len(sql.encode("utf-8", errors="replace")) > MAX_SQL_BYTES:
        raise Refused(f"The text is longer than {MAX_SQL_BYTES // 1024} KiB.")
    if bad := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]", sql):
        raise Refused(f"The text has the control character U+{ord(bad[0]):04X} at position {bad.start()}. Remove it.")
    explained = _explained(sql)
    body = sql if explained is None else explained
    tree = _parse(connection, body)
    statements = tree["statements"]
    if not statements:
        raise Refused("There is no statement in the text. Write one, for example: SELECT count(*) FROM request")
    if len(statements) > 1:
        raise Refused(f"The text has {len(statements)} statements; one at a time. Send them one after another.")
    _refuse_what_reaches_out(statements[0])
    if _is_show_tables(statements[0]):
        body = SHOW_TABLES
    return Checked(
        body if explained is None else f"EXPLAIN {body}", _reads(statements[0]), explained is not None, statements[0]
    )


def reads_of(connection: duckdb.DuckDBPyConnection, sql: str) -> Reads:
    """What one of our own SELECT texts (a view) reads."""
    return _reads(_parse(connection, sql))


def _explained(sql: str) -> str | None:
    """The statement behind EXPLAIN, or None where the text is no EXPLAIN. Raises Refused for ANALYZE."""
    found = _EXPLAIN.match(sql)
    if found is None:
        return None
    rest = sql[found.end() :]
    if option := _OPTION.match(rest):
        raise Refused(
            "EXPLAIN is allowed without options only: EXPLAIN ANALYZE would run the statement"
            if option["word"] != "("
            else "EXPLAIN is allowed without options only; write EXPLAIN SELECT ..."
        )
    return rest


def _parse(connection: duckdb.DuckDBPyConnection, sql: str) -> dict[str, Any]:
    """DuckDB's parse tree. Raises Refused with DuckDB's message and the place where the text is no SELECT."""
    import duckdb

    try:
        (text,) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchone() or ("{}",)
        tree: dict[str, Any] = json.loads(text)
    except RecursionError:
        raise Refused("The statement is nested too deeply. Break it up with WITH.") from None
    except duckdb.Error as error:
        raise Refused(f"The text cannot be parsed: {_first_lines(error)}") from None
    if tree.get("error", True):
        raise Refused(_why(connection, sql, str(tree.get("error_message", "it is no SELECT"))))
    return tree


def _why(connection: duckdb.DuckDBPyConnection, sql: str, message: str) -> str:
    """Say what the text is instead: the place of a syntax error, or the kind of statement."""
    import duckdb

    try:
        types = [statement.type.name for statement in connection.extract_statements(sql)]
    except duckdb.ParserException as error:
        return _first_lines(error)
    except duckdb.Error:
        return f"Only SELECT and EXPLAIN are allowed here ({message.rstrip('!.')})."
    if len(types) > 1 and "CREATE" in types and re.search(r"\bpivot\b", sql, re.IGNORECASE):
        return "PIVOT needs its values here: write PIVOT ... ON column IN ('a', 'b') USING ..."
    if len(types) > 1:
        return f"The text has {len(types)} statements ({', '.join(types)}); one SELECT at a time."
    name = types[0] if types else "UNKNOWN"
    # PRAGMA is rewritten to a SELECT by extract_statements, which is why the tree decides and not the type.
    name = "PRAGMA" if name in ("SELECT", "MULTI", "EXTENSION") else name
    hint = _STATEMENT_HINT.get(name)
    return f"{name} is not allowed: only SELECT and EXPLAIN run here." + (f" Instead: {hint}." if hint else "")


def _is_show_tables(statement: dict[str, Any]) -> bool:
    shown = statement["node"].get("from_table") or {}
    return shown.get("type") == "SHOW_REF" and shown.get("table_name") == '"tables"'


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every object of a parse tree, in no order; none is walked by recursion, for a statement may nest deeply."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _refuse_what_reaches_out(tree: Any) -> None:
    """Raises Refused at a function or a table that is not allowed."""
    for node in nodes(tree):
        if node.get("type") == "TABLE_FUNCTION":
            name = str((node.get("function") or {}).get("function_name", "")).lower()
            if name not in TABLE_FUNCTIONS:
                raise Refused(
                    f"The table function {name or '(nameless)'} is not allowed here: it could reach beyond the store. "
                    f"Allowed are {', '.join(sorted(TABLE_FUNCTIONS))}, and the tables and views (SHOW TABLES)."
                )
        elif node.get("class") == "FUNCTION" and str(node.get("function_name", "")).lower() in SCALARS_REFUSED:
            raise Refused(f"The function {node['function_name']} is not allowed here.")
        elif node.get("type") == "BASE_TABLE" and str(node["table_name"]).lower() in TABLES_REFUSED:
            raise Refused(f"The table {node['table_name']} is not allowed here. SHOW TABLES lists the tables.")
        elif node.get("type") == "BASE_TABLE" and re.search(r"[/\\.*?:]", name := str(node["table_name"])):
            raise Refused(f"{name!r} looks like a file; files cannot be read here. SHOW TABLES lists the tables.")


def _reads(tree: Any) -> Reads:
    """Tables and columns by name. All columns where the tree does not name them: `*`, `#1`, a whole row, PIVOT, NATURAL."""
    tables: set[str] = set()
    aliases: set[str] = set()
    names: set[str] = set()
    whole: set[str] = set()
    every = catalog = False
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        if not isinstance(node, dict):
            continue
        if node.get("type") == "SHOW_REF" and node.get("show_type") != "SUMMARY":
            catalog = True
            continue  # tells about tables or columns, reads no row
        if node.get("type") == "TABLE_FUNCTION" and str(node["function"]["function_name"]).startswith("duckdb_"):
            catalog = True
        if node.get("type") == "BASE_TABLE":
            tables.add(str(node["table_name"]).lower())
            aliases |= {str(node["table_name"]).lower(), str(node.get("alias", "")).lower()}
        elif node.get("class") == "COLUMN_REF":
            parts = [str(part).lower() for part in node["column_names"]]
            names.update(parts)
            whole |= {parts[-1]} if len(parts) == 1 or parts[-2] in _AROUND_TABLES else set()
        elif node.get("type") in ("SUBQUERY", "JOIN"):
            aliases.add(str(node.get("alias", "")).lower())
            names.update(str(name).lower() for name in node.get("using_columns") or ())
            every = every or node.get("ref_type") not in (None, "REGULAR", "CROSS", "ASOF", "POSITIONAL", "DEPENDENT")
        elif node.get("class") in ("STAR", "POSITIONAL_REFERENCE") or node.get("type") == "PIVOT":
            every = True
        stack.extend(node.values())
    return Reads(frozenset(tables), None if every or whole & aliases else frozenset(names), catalog)


def _first_lines(error: Exception) -> str:
    return "\n".join(message_of(error).splitlines()[:12])


def message_of(error: Exception) -> str:
    """DuckDB's message with its line and caret, without advice that is not for a person here."""
    text = str(error).split("This error signals an assertion failure")[0].rstrip()
    return re.sub(r' *Use "SET [^"]*" to [^.]*\.', " Break the statement up.", text)
