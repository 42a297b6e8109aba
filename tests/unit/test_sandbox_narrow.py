"""A statement over some of its rows answers what it answers over all: what is left out could not have been in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.sandbox.check import check
from store.sandbox.narrow import MOST_COMPUTED, narrow
from store.sandbox.wanted import MOST_CONDITIONS, MOST_VALUES, Wanted, column_types

KINDS = {kind: column_types(kind) for kind in ("block", "request")}
MOST_ROWS = 1000
"""Of an answer."""
COLUMNS = "at_ns BIGINT, worker VARCHAR, block_hash UBIGINT, tenant VARCHAR"


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    """Twelve sealed rows and twelve hot ones, with equal values, unknown ones, and each in both."""
    with duckdb.connect() as made:
        for part, first in (("sealed", 0), ("hot", 6)):
            made.execute(f"CREATE TABLE {part} ({COLUMNS})")
            made.execute(f"""INSERT INTO {part}
SELECT {first} + range // 2, CASE WHEN range % 4 > 0 THEN 'w' || range % 3 END, range * 1000, CASE WHEN range % 2 = 0 THEN 'it''s' END
FROM range(12)""")
        made.execute("BEGIN TRANSACTION")
        yield made


def wanted(connection: duckdb.DuckDBPyConnection, sql: str, max_rows: int = MOST_ROWS) -> Wanted | None:
    """What a statement can need of `block`; None where nothing can be told."""
    return narrow(connection, check(connection, sql).statement, KINDS, max_rows).get("block")


def rows(connection: duckdb.DuckDBPyConnection, sql: str, hot: str) -> list[tuple[object, ...]]:
    """Of a statement over the sealed rows and these hot ones."""
    connection.execute(f"CREATE OR REPLACE TEMP VIEW block AS FROM sealed UNION ALL BY NAME SELECT * FROM ({hot})")
    return connection.execute(sql).fetchall()


LISTED = ["*", "* EXCLUDE (tenant)", "at_ns, worker", "worker AS at_ns, at_ns AS t", "block.at_ns", "DISTINCT worker"]
COUNTED = [
    "count(*)",
    "max(at_ns), count(DISTINCT worker)",
    "worker, count(*)",
    "at_ns, row_number() OVER (ORDER BY at_ns)",
]
PARTS = [
    "at_ns >= 6", "9 > at_ns", "at_ns BETWEEN 4 AND 8", "at_ns <> 7", "at_ns IN (5, 7, 9)", "worker = 'w1'", "worker IS NULL",
    "tenant IS NOT NULL", "worker > 'w0'", "tenant = 'it''s'", "block_hash = 3000", "at_ns > 5.5", "at_ns > 3 + 4", "NOT at_ns > 7",
    "(at_ns > 8 OR worker = 'w2')", "worker LIKE 'w%'", "at_ns = NULL", "at_ns >= (SELECT 6)", "at_ns < epoch_ns(now())", "at_ns BETWEEN 4 AND 8.5",
    "worker IN ('w1', NULL)", "at_ns = '7'",
]  # fmt: skip
ORDERS = ["at_ns", "at_ns DESC", "worker NULLS FIRST, at_ns", "1", "at_ns + 1", "tenant DESC NULLS LAST, block_hash"]


@given(
    what=st.sampled_from(LISTED + COUNTED),
    parts=st.lists(st.sampled_from(PARTS), max_size=3),
    order=st.none() | st.sampled_from(ORDERS),
    limit=st.none() | st.integers(0, 15),
    offset=st.none() | st.integers(0, 6),
    max_rows=st.sampled_from([3, MOST_ROWS]),
)
def test_what_is_left_out_changes_no_answer(
    connection: duckdb.DuckDBPyConnection,
    what: str,
    parts: list[str],
    order: str | None,
    limit: int | None,
    offset: int | None,
    max_rows: int,
) -> None:
    """Whatever is asked: as many rows, and the same ones up to those that were equal before a LIMIT cut them."""
    sql = f"SELECT {what} FROM block"
    sql += f" WHERE {' AND '.join(parts)}" if parts else ""
    sql += " GROUP BY worker" if what.startswith("worker, count") else ""
    sql += f" ORDER BY {order}" if order else ""
    sql += f" LIMIT {limit}" if limit is not None else ""
    sql += f" OFFSET {offset}" if offset is not None else ""
    try:
        whole = rows(connection, sql, "FROM hot")
    except duckdb.Error:  # the order is no column of what is asked
        connection.execute("ROLLBACK")
        connection.execute("BEGIN TRANSACTION")
        return
    asked = wanted(connection, sql, max_rows)
    assert asked is not None
    found = rows(connection, sql, asked.sql("block", KINDS["block"]).replace('"block"', "hot"))
    assert len(found[: max_rows + 1]) == len(whole[: max_rows + 1])
    everything = Counter(
        rows(connection, sql.partition(" ORDER BY")[0].partition(" LIMIT")[0].partition(" OFFSET")[0], "FROM hot")
    )
    assert not Counter(found) - everything
    if asked.limit is None:
        assert Counter(found) == Counter(whole) or limit is not None or offset is not None
    if order in ("at_ns", "at_ns DESC") and what == "*":
        assert [row[0] for row in found[: max_rows + 1]] == [row[0] for row in whole[: max_rows + 1]]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT * FROM block LIMIT 5", (0, 0, 5)),
        ("SELECT * FROM block", (0, 0, MOST_ROWS + 1)),
        ("FROM block WHERE at_ns BETWEEN 1 AND 5 AND worker = 'w' ORDER BY at_ns DESC LIMIT 2 OFFSET 3", (3, 1, 5)),
        ("SELECT count(*) FROM block WHERE at_ns >= 7", (1, 0, None)),
        ("SELECT * FROM block WHERE at_ns >= 7 AND worker LIKE 'w%' LIMIT 5", (1, 0, None)),
        ("SELECT * FROM block LIMIT 10%", (0, 0, None)),
        ("SELECT DISTINCT worker FROM block LIMIT 5", (0, 0, None)),
        ("SELECT worker AS at_ns FROM block ORDER BY at_ns LIMIT 5", (0, 0, None)),
        ("EXPLAIN SELECT * FROM block LIMIT 5", (0, 0, 5)),
    ],
)
def test_what_is_asked_for(
    connection: duckdb.DuckDBPyConnection, sql: str, expected: tuple[int, int, int | None]
) -> None:
    """How many conditions, how many columns of an order, how many rows."""
    found = wanted(connection, sql)
    assert found is not None
    assert (len(found.where), len(found.order), found.limit) == expected


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM block a JOIN block b ON a.at_ns = b.at_ns WHERE a.at_ns > 5",
        "WITH x AS (SELECT 1) SELECT * FROM block LIMIT 5",
        "SELECT * FROM block WHERE at_ns > (SELECT max(at_ns) FROM block)",
        "SELECT * FROM block UNION SELECT * FROM block",
        "SELECT * FROM (SELECT * FROM block) LIMIT 1",
        "SELECT * FROM block AS b(worker, at_ns) WHERE worker > 5",
        "SELECT * FROM block USING SAMPLE 2",
        "SELECT * FROM block, range(3) LIMIT 1",
        "SELECT * FROM somewhere LIMIT 1",
        "SHOW TABLES",
        "SELECT 1",
    ],
)
def test_what_is_not_one_table_read_once_narrows_nothing(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Two readers of a table need different rows of it."""
    assert wanted(connection, sql) is None


@pytest.mark.parametrize(
    "instant",
    [
        "epoch_ns(now() - INTERVAL 5 MINUTE)",
        "epoch_ns(now()::DATE)",
        "epoch_ns(now() - INTERVAL '1 month')",
        "2 * epoch_ns(now()) - epoch_ns(now())",
        "epoch_ns(today())",
        "epoch_ns(date_trunc('hour', now()))",
    ],
)
def test_now_is_the_same_for_the_rows_that_are_asked_for_and_in_the_statement(
    connection: duckdb.DuckDBPyConnection, instant: str
) -> None:
    """Else a statement at midnight would ask for the rows of one day and look for those of another."""
    found = wanted(connection, f"SELECT * FROM block WHERE at_ns > {instant} LIMIT 5")
    assert found is not None
    assert found.where == [("at_ns", ">", connection.execute(f"SELECT {instant}").fetchall()[0][0])]
    assert found.limit == 5


@pytest.mark.parametrize(
    "condition",
    [
        "at_ns BETWEEN 5 AND 1e300",
        "at_ns BETWEEN 5 AND 5.5",
        "at_ns > CAST(1e3 * 1.0125 AS BIGINT)",
        "at_ns > 1e3",
        "at_ns > epoch_ns(now()) * 1.5",
        "at_ns > random()",
        "at_ns > 18446744073709551616",
        "block_hash > -1",
        "at_ns > 9223372036854775807 + 1",
        "at_ns IN (5, NULL)",
        "at_ns IN (5, '6')",
        "worker = 5",
    ],
)
def test_what_is_compared_in_another_type_narrows_nothing(
    connection: duckdb.DuckDBPyConnection, condition: str
) -> None:
    """4611686018427387919 is within [4611686018427387930, 1e300]: as DOUBLE they are compared, which has 53 bits.

    1e3 * 1.0125 is 1012.4999999999999 as DOUBLE and 1012.5 as DECIMAL, which the text of the constant would be.
    """
    found = wanted(connection, f"SELECT * FROM block WHERE {condition} LIMIT 5")
    assert found is None or (not found.where and found.limit is None)
    connection.execute("SELECT 1")  # the transaction goes on


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("LIMIT 9223372036854775807", MOST_ROWS + 1),
        ("OFFSET 9223372036854775807", None),
        ("LIMIT 5.7", None),
        ("LIMIT NULL", None),
        ("LIMIT '5'", None),
        ("LIMIT 0", 0),
        ("FETCH FIRST 5 ROWS ONLY", 5),
        ("ORDER BY at_ns, at_ns DESC LIMIT 5", 5),
    ],
)
def test_a_limit_is_a_whole_number_of_rows(
    connection: duckdb.DuckDBPyConnection, tail: str, expected: int | None
) -> None:
    """The first rows and those that OFFSET skips; no more than a LIMIT can say."""
    found = wanted(connection, f"SELECT * FROM block {tail}")
    assert found is not None
    assert found.limit == expected
    connection.execute(found.sql("block", KINDS["block"]).replace('"block"', "hot"))


def test_a_statement_of_many_conditions_hands_over_some_of_them(connection: duckdb.DuckDBPyConnection) -> None:
    """Those that are left out hold for fewer rows still; LIMIT counts after them."""
    for condition, most in (("at_ns <> 7", MOST_CONDITIONS), ("at_ns > 3 + 4", MOST_COMPUTED)):
        found = wanted(connection, f"SELECT * FROM block WHERE {' AND '.join([condition] * (most + 1))} LIMIT 5")
        assert found is not None
        assert (len(found.where), found.limit) == (most, None)
    values = ", ".join(str(number) for number in range(MOST_VALUES + 1))
    found = wanted(connection, f"SELECT * FROM block WHERE at_ns > 5 AND at_ns IN ({values})")
    assert found is not None
    assert (len(found.where), found.limit) == (1, None)


@pytest.mark.parametrize(
    "asked",
    [
        Wanted(['at_ns" FROM block; --']),
        Wanted(["at_ns"] * 2),
        Wanted([]),
        Wanted(where=[("nothing", "=", 1)]),
        Wanted(where=[("at_ns", "; DROP", 1)]),
        Wanted(where=[("at_ns", "=", "1 OR true")]),
        Wanted(where=[("at_ns", "=", 2**63)]),
        Wanted(where=[("block_hash", "=", -1)]),
        Wanted(where=[("at_ns", "=", None)]),
        Wanted(where=[("worker", "IN", [])]),
        Wanted(where=[("worker", "=", "a\0b")]),
        Wanted(where=[("at_ns", "=", 1)] * (MOST_CONDITIONS + 1)),
        Wanted(where=[("at_ns", "IN", [1] * (MOST_VALUES + 1))]),
        Wanted(order=[("at_ns", "ASC; --", "")], limit=1),
        Wanted(order=[("at_ns", "", "")] * 2, limit=1),
        Wanted(limit=2**63),
        Wanted(limit=-1),
    ],
)
def test_what_no_statement_of_ours_says_is_refused(asked: Wanted) -> None:
    """It comes from a process that a person's text may have broken: nothing of it becomes SQL unseen."""
    with pytest.raises(ValueError, match=r"no column|the condition|the order|a limit of|named twice|more than"):
        asked.sql("block", KINDS["block"])
