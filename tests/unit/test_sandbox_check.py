"""Which texts may run: DuckDB's parser decides, and nothing is executed."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pytest

from store.sandbox.check import MAX_SQL_BYTES, TABLE_FUNCTIONS, TABLES_REFUSED, Refused, check


@pytest.fixture(scope="module")
def parser() -> Iterator[duckdb.DuckDBPyConnection]:
    """A DuckDB that only parses."""
    with duckdb.connect(":memory:") as connection:
        yield connection


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "select count(*) from request;",
        "  -- what came in\n/* today */ FROM request",
        "FROM request SELECT prompt_tokens",
        "VALUES (1, 'a'), (2, 'b')",
        "TABLE request",
        "WITH slow AS (SELECT * FROM request) SELECT * FROM slow",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 5) SELECT * FROM t",
        "SELECT 1 UNION ALL SELECT 2 ORDER BY 1",
        "DESCRIBE request",
        "SUMMARIZE request",
        "SHOW TABLES",
        "PIVOT request ON state IN ('finished', 'failed') USING count(*)",
        "SELECT unnest(token_ns) FROM request",
        "SELECT * FROM range(10), generate_series(1, 3)",
        "SELECT column_name FROM duckdb_columns()",
        "SELECT 'DROP TABLE request; ATTACH ''x''' AS text",
        'SELECT 1 AS "drop table x"',
        "EXPLAIN SELECT * FROM request",
        "explain -- why\n select 1",
        "/* a */ EXPLAIN WITH a AS (SELECT 1) SELECT * FROM a",
    ],
)
def test_one_reading_statement_is_allowed(parser: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Every form of SELECT, and EXPLAIN of one, may run."""
    assert check(parser, sql).sql


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("", "no statement"),
        ("   \n\t ", "no statement"),
        ("-- only a comment", "no statement"),
        ("/* only a comment */", "no statement"),
        (";;;", "no statement"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("SELECT 1; DROP TABLE request", "2 statements"),
        ("SELECT 1;;SELECT 2", "2 statements"),
        ("SELECT 1 /* ; */ ; -- x\n DELETE FROM request", "2 statements"),
        ("CREATE TABLE x AS SELECT 1", "CREATE is not allowed"),
        ("CREATE OR REPLACE MACRO m() AS 1", "CREATE is not allowed"),
        ("DROP TABLE request", "DROP is not allowed"),
        ("ALTER TABLE request ADD COLUMN x INT", "ALTER is not allowed"),
        ("INSERT INTO request VALUES (1)", "INSERT is not allowed"),
        ("UPDATE request SET worker = 'x'", "UPDATE is not allowed"),
        ("DELETE FROM request", "DELETE is not allowed"),
        ("TRUNCATE request", "is not allowed"),
        ("MERGE INTO request USING step ON true WHEN MATCHED THEN DELETE", "MERGE_INTO is not allowed"),
        ("WITH gone AS (DELETE FROM request RETURNING *) SELECT * FROM gone", "CTE needs a SELECT"),
        ("COPY request TO 'x.csv'", "COPY is not allowed"),
        ("COPY (SELECT 1) TO 'x.parquet'", "COPY is not allowed"),
        ("COPY request FROM 'x.csv'", "COPY is not allowed"),
        ("EXPORT DATABASE 'x'", "EXPORT is not allowed"),
        ("ATTACH 'x.duckdb'", "ATTACH is not allowed"),
        ("ATTACH 'host=localhost' AS p (TYPE postgres)", "ATTACH is not allowed"),
        ("DETACH memory", "DETACH is not allowed"),
        ("USE memory", "SET is not allowed"),
        ("INSTALL httpfs", "LOAD is not allowed"),
        ("LOAD httpfs", "LOAD is not allowed"),
        ("SET threads = 8", "SET is not allowed"),
        ("SET VARIABLE a = 1", "SET is not allowed"),
        ("RESET threads", "SET is not allowed"),
        ("PRAGMA version", "PRAGMA is not allowed"),
        ("PRAGMA database_list", "PRAGMA is not allowed"),
        ("PRAGMA enable_profiling", "PRAGMA is not allowed"),
        ("CALL pragma_version()", "CALL is not allowed"),
        ("CHECKPOINT", "CALL is not allowed"),
        ("VACUUM", "VACUUM is not allowed"),
        ("BEGIN", "TRANSACTION is not allowed"),
        ("PREPARE a AS SELECT 1", "PREPARE is not allowed"),
        ("EXECUTE a", "EXECUTE is not allowed"),
        ("EXPLAIN ANALYZE SELECT 1", "EXPLAIN is allowed without options only"),
        ("EXPLAIN ANALYSE SELECT 1", "EXPLAIN is allowed without options only"),
        ("EXPLAIN ANALYZE DELETE FROM request", "EXPLAIN is allowed without options only"),
        ("EXPLAIN /* so */ ANALYZE DELETE FROM request", "EXPLAIN is allowed without options only"),
        ("EXPLAIN (ANALYZE) SELECT 1", "EXPLAIN is allowed without options only"),
        ("EXPLAIN (FORMAT json) SELECT 1", "EXPLAIN is allowed without options only"),
        ("EXPLAIN DELETE FROM request", "DELETE is not allowed"),
        ("EXPLAIN COPY (SELECT 1) TO 'x'", "COPY is not allowed"),
        ("EXPLAIN SELECT 1; DELETE FROM request", "2 statements"),
        ("EXPLAIN", "no statement"),
        ("PIVOT request ON state", "PIVOT needs its values"),
        ("SELECT\x001", r"control character U\+0000 at position 6"),
        ("SELECT 1\x00; DELETE FROM request", r"control character U\+0000"),
        ("SELECT '\x1b[2J'", r"control character U\+001B"),
        ("\ud800", r"control character U\+D800"),
    ],
)
def test_everything_else_is_refused_by_name(parser: duckdb.DuckDBPyConnection, sql: str, said: str) -> None:
    """A text that is not one reading statement is refused, and the message says what it is instead."""
    with pytest.raises(Refused, match=said):
        check(parser, sql)


REACHING_OUT = """read_csv read_csv_auto read_parquet parquet_scan parquet_metadata read_json read_ndjson read_text
read_blob read_duckdb glob sniff_csv query query_table json_execute_serialized_sql duckdb_secrets duckdb_settings
which_secret arrow_scan pandas_scan python_map_function seq_scan checkpoint force_checkpoint pragma_version
pragma_table_info truncate_duckdb_logs duckdb_logs duckdb_temporary_files"""


@pytest.mark.parametrize("function", REACHING_OUT.split())
def test_table_functions_that_reach_out_are_refused(parser: duckdb.DuckDBPyConnection, function: str) -> None:
    """A table function that is not on the short list is refused by name."""
    with pytest.raises(Refused, match=f"table function {function} is not allowed"):
        check(parser, f"SELECT * FROM {function}('x')")


@pytest.mark.parametrize(
    "around",
    [
        "SELECT * FROM {f}('x')",
        "SELECT (SELECT count(*) FROM {f}('x'))",
        "WITH a AS (SELECT * FROM {f}('x')) SELECT * FROM a",
        "SELECT 1 WHERE EXISTS (FROM {f}('x'))",
        "SELECT * FROM request r, LATERAL (SELECT * FROM {f}('x'))",
        "DESCRIBE SELECT * FROM {f}('x')",
        "SUMMARIZE SELECT * FROM {f}('x')",
        "EXPLAIN SELECT * FROM {f}('x')",
        "FROM \"{f}\"('x')",
        "FROM main.{f}('x')",
        "PIVOT {f}('x') ON a IN (1)",
    ],
)
@pytest.mark.parametrize("function", ["read_csv", "query"])
def test_a_function_is_found_wherever_it_hides(parser: duckdb.DuckDBPyConnection, function: str, around: str) -> None:
    """Depth, quoting, schema and capitals do not hide a table function."""
    for name in (function, function.upper()):
        with pytest.raises(Refused, match=rf"(?i)table function {function} is not allowed"):
            check(parser, around.format(f=name))


@pytest.mark.parametrize("table", sorted(TABLES_REFUSED))
@pytest.mark.parametrize("where", ["{}", "PG_CATALOG.{}", '"{}"', "system.main.{}"])
def test_tables_that_tell_about_the_process_are_refused(
    parser: duckdb.DuckDBPyConnection, table: str, where: str
) -> None:
    """DuckDB's views over the same functions, however they are spelt, wherever they stand."""
    for name in (table, table.upper()):
        for sql in (f"FROM {where.format(name)}", f"SELECT (SELECT count(*) FROM {where.format(name)})"):
            with pytest.raises(Refused, match="is not allowed here"):
                check(parser, sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT getenv('HOME')",
        "SELECT upper(current_setting('allowed_directories')::VARCHAR)",
        "SELECT write_log('x')",
        "SELECT pg_sleep(100)",
        "SELECT list_transform([1], x -> GETENV('HOME'))",
    ],
)
def test_functions_that_tell_about_the_process_are_refused(parser: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Scalar functions that read the environment or settings, or only wait, are refused."""
    with pytest.raises(Refused, match="is not allowed here"):
        check(parser, sql)


@pytest.mark.parametrize(
    "sql",
    [
        "FROM '/etc/passwd'",
        "FROM 'x.parquet'",
        'SELECT * FROM "data/*.csv"',
        "FROM 'https://example.org/x'",
        "FROM '..'",
    ],
)
def test_a_table_name_that_is_a_path_is_refused(parser: duckdb.DuckDBPyConnection, sql: str) -> None:
    """DuckDB would read a file of that name."""
    with pytest.raises(Refused, match="looks like a file"):
        check(parser, sql)


def test_a_syntax_error_shows_its_place(parser: duckdb.DuckDBPyConnection) -> None:
    """The message has the line and a caret under the word that is wrong."""
    with pytest.raises(Refused) as refused:
        check(parser, "SELECT count(*)\nFORM request")
    lines = str(refused.value).splitlines()
    assert 'syntax error at or near "request"' in lines[0]
    assert lines[-2] == "LINE 2: FORM request"
    assert lines[-1].index("^") == lines[-2].index("request")


def test_a_text_that_is_too_long_is_refused(parser: duckdb.DuckDBPyConnection) -> None:
    """The limit is on bytes, not on characters."""
    half = "ä" * (MAX_SQL_BYTES // 2)
    with pytest.raises(Refused, match="longer than 256 KiB"):
        check(parser, f"SELECT '{half}'")


def test_deep_nesting_is_refused_or_parsed_but_never_crashes(parser: duckdb.DuckDBPyConnection) -> None:
    """Ten thousand brackets end in a message."""
    with pytest.raises(Refused):
        check(parser, "SELECT " + "(" * 10_000 + "1" + ")" * 10_000)


def test_explain_runs_exactly_the_text_that_was_checked(parser: duckdb.DuckDBPyConnection) -> None:
    """What follows EXPLAIN is checked alone and put behind EXPLAIN again."""
    checked = check(parser, "/* see */ explain\nSELECT 1")
    assert checked.explain
    assert checked.sql == "EXPLAIN \nSELECT 1"


def test_show_tables_does_not_list_helpers(parser: duckdb.DuckDBPyConnection) -> None:
    """SHOW TABLES becomes a SELECT over the views that are meant for people."""
    assert "duckdb_views()" in check(parser, "show tables").sql


@pytest.mark.parametrize(
    ("sql", "tables", "columns"),
    [
        ("SELECT arrival_ns FROM request WHERE state = 'failed'", {"request"}, {"arrival_ns", "state"}),
        ("SELECT count(*) FROM request", {"request"}, set()),
        ("SELECT R.Model FROM Request R", {"request"}, {"r", "model"}),
        ("SELECT waiting_on.blocks FROM step", {"step"}, {"waiting_on", "blocks"}),
        ("SELECT x FROM request JOIN step USING (worker)", {"request", "step"}, {"x", "worker"}),
        ("SELECT a FROM (SELECT a, b FROM block) t", {"block"}, {"a", "b"}),
        ("SELECT * FROM request", {"request"}, None),
        ("FROM request", {"request"}, None),
        ("SELECT r FROM request r", {"request"}, None),
        ("SELECT unnest(request) FROM request", {"request"}, None),
        ("SELECT main.request FROM request", {"request"}, None),
        ("SELECT memory.request FROM request", {"request"}, None),
        ("SELECT s.step FROM step s", {"step"}, {"s", "step"}),
        ("SELECT #2, worker FROM request", {"request"}, None),
        ("SELECT COLUMNS('_ns$') FROM request", {"request"}, None),
        ("SELECT a FROM request NATURAL JOIN step", {"request", "step"}, None),
        ("PIVOT request ON state IN ('failed')", {"request"}, None),
        ("SUMMARIZE request", {"request"}, None),
        ("DESCRIBE request", set(), None),
    ],
)
def test_the_columns_a_statement_reads_are_known_or_all(
    parser: duckdb.DuckDBPyConnection, sql: str, tables: set[str], columns: set[str] | None
) -> None:
    """Only these columns of the hot rows are handed over; where the text does not name them, all are."""
    reads = check(parser, sql).reads
    assert reads.tables == tables
    if tables:
        assert reads.columns == columns


def test_the_short_list_has_no_function_that_reads_files() -> None:
    """Whoever adds a table function to the list thinks twice: none may read, scan, log or run text."""
    assert not [
        f for f in TABLE_FUNCTIONS if any(word in f for word in ("read", "scan", "glob", "query", "log", "sql"))
    ]
